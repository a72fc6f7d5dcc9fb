"""Trainings that keep or change their state in unusual ways end as the undisturbed ones, bit for bit."""

from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher
from state_kinds import DIES, KINDS, KINDS_OF_RINGS

from jitckpt.events import read_events

SCRIPT = str(Path(__file__).with_name("state_kinds.py"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_costs_one_minibatch(launcher: Launcher, kind: str) -> None:
    result = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", SCRIPT, kind)
    assert result.status == 0, result.err
    assert result.out.count(" equal ") == 2, result.out + result.err
    assert "would not bring this training back" not in result.err, result.err
    events = read_events(launcher.directory / "ckpt")[0]
    restored = [event["step"] for event in events if event["event"] == "restored"]
    assert restored in ([DIES, DIES], [DIES - 1, DIES - 1]), result.err  # rank 0 may not have come so far


@pytest.mark.parametrize("kind", KINDS_OF_RINGS)
def test_sums_are_rounded_as_in_an_undisturbed_run(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A restart begins with the buckets of gradients that it would have made behind its first step."""
    command = [*JITCKPT_RUN, "--nproc-per-node", "3", "--device", "softgpu", SCRIPT, kind]
    monkeypatch.setenv("SOFTGPU_REDUCTION", "ring")
    result = launcher.run(*command)
    assert result.status == 0, result.err
    assert result.out.count(" equal ") == 3, result.out + result.err
    assert "rounded otherwise" not in result.err, result.err
    events = read_events(launcher.directory / "ckpt")[0]
    restored = [event["step"] for event in events if event["event"] == "restored"]
    assert restored in ([DIES] * 3, [DIES - 1] * 3), result.err
