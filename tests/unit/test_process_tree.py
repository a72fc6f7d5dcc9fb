"""Processes as /proc has them, and how long one is waited for."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jitckpt.system import process_tree
from jitckpt.system.process_tree import Patience, Process


def process(pid: int, parent: int) -> Process:
    return Process(pid, parent, session=pid, dead=False)


def test_what_is_below_a_process() -> None:
    tree = [process(2, 1), process(3, 2), process(4, 3), process(5, 1), process(6, 7)]
    assert process_tree.below(tree, [2]) == {2, 3, 4}
    assert process_tree.below(tree, []) == set()
    assert process_tree.below([process(1, 2), process(2, 1)], [1]) == {1, 2}  # read while numbers changed


def test_of_a_process_that_is_not_there_nothing_is_known() -> None:
    assert process_tree.look(2**22 + 1) is None


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    environment = {process_tree.MARK: "this-job"}
    program = "import time; print(flush=True); time.sleep(1000)"
    command = [sys.executable, "-ISc", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # before its program runs a process has no environment for a moment
        yield child
        child.kill()


def test_a_marked_process_is_found_and_ended(child: "subprocess.Popen[bytes]") -> None:
    assert process_tree.of_job("another-job", ()) == set()
    assert process_tree.of_job("this", ()) == set()
    assert process_tree.of_job("this-job", ()) == {child.pid}
    assert process_tree.end(lambda: process_tree.of_job("this-job", ())) == set()
    assert child.wait() == -signal.SIGKILL


def test_who_does_not_end_is_told(child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "ENDING_SECONDS", -1.0)
    assert process_tree.end(lambda: [child.pid]) == {child.pid}
    assert child.poll() is None


def test_patience_ends_with_what_can_do_no_more(child: "subprocess.Popen[bytes]") -> None:
    patience = Patience(child.pid, 1000.0)
    assert patience.lost() is None
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert patience.lost() == "is stopped by a signal"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert patience.lost() == "has ended"


def test_patience_ends_where_nothing_moves(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience(child.pid, 0.0)
    while (lost := patience.lost()) is None:
        pass
    assert lost == "takes too long"
    monkeypatch.setattr(process_tree, "STUCK_SECONDS", 0.0)
    patience = Patience(child.pid, 1000.0)
    while (lost := patience.lost()) is None:
        pass
    assert lost == "has done nothing for 0 s"
