"""An output that is a pipe of another user's is exchanged for one of this user's own."""

import os
import subprocess
from pathlib import Path

import pytest

import jitckpt
from jitckpt.system import own_outputs
from jitckpt.system.own_outputs import is_closed_to_us, outputs_of_own

SAYS = """
import os, subprocess, sys
from jitckpt.system.own_outputs import is_closed_to_us, outputs_of_own
before = [is_closed_to_us(number) for number in range(3)]
with outputs_of_own(True):
    within = [is_closed_to_us(number) for number in range(3)]
    for number in range(1000):
        os.write(1 + number % 2, b"%d\\n" % number)
    subprocess.run(["echo", "a child"])
print(before, within)
"""


def test_lines_keep_their_order_and_the_last_ones_are_not_lost() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can have another user's pipes")
    root = str(Path(jitckpt.__file__).parents[1])
    python = ["/usr/bin/python3", "-I", "-c"]  # which any user can run
    text = f"import sys; sys.path.insert(0, {root!r})\n{SAYS}"
    command = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", *python, text]
    ended = subprocess.run(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if "No module named 'jitckpt'" in ended.stdout or "Permission denied" in ended.stdout:
        pytest.skip("another user can't read this installation")
    *lines, child, last = ended.stdout.splitlines()
    assert lines == [str(number) for number in range(1000)]
    assert child == "a child"
    assert last == "[True, True, True] [True, False, False]"


def test_who_made_a_pipe_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    try:
        assert not is_closed_to_us(write)
        monkeypatch.setattr(own_outputs, "OUTPUT", write)
        monkeypatch.setattr(own_outputs, "ERROR", write)
        before = os.fstat(write)
        with outputs_of_own(True):
            assert os.fstat(write) == before
    finally:
        os.close(read)
        os.close(write)
