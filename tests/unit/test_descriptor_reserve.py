"""A process without a descriptor left can still write what it must."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from jitckpt.agent.local_state_writer import LocalStateWriter

PROGRAM = """
import os, resource, sys
from contextlib import suppress
from jitckpt.system import descriptor_reserve
path = sys.argv[1]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
if "filled" in sys.argv:
    descriptor_reserve.fill()
taken = []
with suppress(OSError):
    while True:
        taken.append(os.dup(0))

def write():
    with open(path, "a") as file, open(path):
        file.write("written ")

for _ in range(2):  # they are set aside again
    with suppress(OSError), descriptor_reserve.lent():
        write()
with suppress(OSError):
    write()
    print("nothing is set aside")
os.close(taken.pop())
"""


def _run(path: str, *how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, *how], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_what_is_set_aside_is_there_when_all_others_are_taken(tmp_path: Path) -> None:
    assert _run(str(tmp_path / "without")) == ""
    assert not (tmp_path / "without").exists()
    assert _run(str(tmp_path / "with"), "filled") == ""
    assert (tmp_path / "with").read_text() == "written written "


WRITES_LOCAL_STATES = """
import os, resource, sys
from contextlib import suppress
from pathlib import Path
from jitckpt.agent.local_state_writer import LocalStateWriter
from jitckpt.system import descriptor_reserve

def write(ring, directory, steps, by, is_host_missed):
    with open(directory / "state", "w") as file:
        return {7: file.write("its own")}

ring = os.open(os.devnull, os.O_RDONLY)
descriptor_reserve.fill()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
with suppress(OSError):
    while True:
        taken.append(os.dup(0))
writer = LocalStateWriter(
    {0: ring},
    copied=set(),
    directory=Path(sys.argv[1]),
    steps={7},
    is_host_missed=False,
    write=write,
    done=lambda: None,
)
writer.run()
print(writer.written, writer.problems)
"""


def test_an_agent_without_a_descriptor_left_writes_what_a_dead_rank_alone_knew(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES_LOCAL_STATES, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "{0: {7: 7}} {}\n"


@pytest.mark.parametrize("is_there", [True, False])
def test_that_a_step_was_whole_is_noted_where_a_part_of_it_lies(tmp_path: Path, is_there: bool) -> None:
    (folder := tmp_path / "step-0000000007").mkdir()
    if not is_there:
        folder.rmdir()
    writer = LocalStateWriter(
        {},
        copied=set(),
        directory=tmp_path,
        steps={7},
        is_host_missed=False,
        write=Mock(),
        done=lambda: None,
    )
    writer.run()
    assert [path.name for path in tmp_path.glob("step-*/*")] == ["whole"] * is_there
    assert folder.exists() == is_there
