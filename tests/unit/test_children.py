"""The agent's children: its guardian does nothing at an end in order."""

import os
import signal
import time
from pathlib import Path

import pytest

from jitckpt.agent.processes import children as module
from jitckpt.agent.processes.children import Children

LIMIT = 60.0


def test_the_guardian_does_not_take_an_end_in_order_for_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would remove the agent's temporary folder, and the agent's own end would fail for want of it."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "error.json").touch()
    children = Children(1.0, folder)
    end = Children._end_guardian

    def late(self: Children) -> None:
        time.sleep(1.0)  # as on a busy machine
        end(self)

    monkeypatch.setattr(Children, "_end_guardian", late)
    children.close()
    assert folder.exists()


def test_the_folder_goes_while_the_guardian_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may be killed while it waits for a blocked disk, and its guardian has ended by then."""
    folder = tmp_path / "folder"
    (folder / "attempt_0").mkdir(parents=True)
    children = Children(1.0, folder)
    end, was_there = Children._end_guardian, []

    def look(self: Children) -> None:
        was_there.append(folder.exists())
        end(self)

    monkeypatch.setattr(Children, "_end_guardian", look)
    children.close()
    assert was_there == [False]


def test_a_guardian_that_is_killed_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next look: the agent may be killed in between, and nobody would end its workers."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 10 * LIMIT)
    children = Children(1.0, None)
    try:
        first = children._guardian.pid
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + LIMIT
        while children._guardian.pid == first and time.monotonic() < until:
            time.sleep(0.01)
        assert children._guardian.pid != first
    finally:
        children.close()
