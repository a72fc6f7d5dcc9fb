"""The agent's children: its guardian does nothing at an end in order."""

import time
from pathlib import Path

import pytest

from jitckpt.agent.processes.children import Children


def test_the_guardian_does_not_take_an_end_in_order_for_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would remove the agent's temporary folder, and the agent's own end would fail for want of it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    children = Children(1.0, folder)
    end = Children._end_guardian

    def late(self: Children) -> None:
        time.sleep(1.0)  # as on a busy machine
        end(self)

    monkeypatch.setattr(Children, "_end_guardian", late)
    children.close()
    assert folder.exists()
