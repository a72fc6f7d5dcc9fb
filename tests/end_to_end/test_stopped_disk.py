"""A rank that saves, and an agent that writes a dead rank's state, stopped at one call after the other.

A sample; all by command: JITCKPT_ALL_CALLS=40 pytest tests/end_to_end/test_stopped_disk.py
"""

import errno
import os
import re
import signal

import preloads
import pytest
from gpt import TRAINING, digests
from launcher import JITCKPT_RUN, Launcher

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
FAULT = ["--fault", "rank=1 step=8 phase=backward kind=kill"]
ALL = int(os.environ.get("JITCKPT_ALL_CALLS", "0"))
KILL = -1
KINDS = [KILL, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR]
SAMPLE = [(12, KILL), (27, KILL), (9, errno.EIO), (20, errno.EINTR)]
CALLS = [(number, what) for number in range(1, ALL + 1) for what in KINDS] or SAMPLE
SAVING_RANK, AGENT = "0 0", " "


def stop(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, who: str, number: int, what: int) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(preloads.compiled(launcher.directory)))
    monkeypatch.setenv("DISK_UNDER", str(launcher.directory / "ckpt" / "step-0000000007"))
    monkeypatch.setenv("DISK_OF", who)
    monkeypatch.setenv("DISK_STOP", str(number))
    monkeypatch.setenv("DISK_WHAT", str(what))


@pytest.mark.parametrize(("number", "what"), CALLS)
def test_the_job_goes_on_whenever_the_rank_that_saves_is_stopped(
    launcher: Launcher,
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    what: int,
) -> None:
    stop(launcher, monkeypatch, SAVING_RANK, number, what)
    out = launcher.succeed(*RUN, *FAULT, *TRAINING)
    assert digests(out) == undisturbed


@pytest.mark.parametrize(("number", "what"), CALLS)
def test_the_job_goes_on_whenever_the_agent_that_writes_is_stopped(
    launcher: Launcher,
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    what: int,
) -> None:
    stop(launcher, monkeypatch, AGENT, number, what)
    ended = launcher.run(*RUN, *FAULT, *TRAINING)
    if ended.status == -signal.SIGKILL:
        monkeypatch.delenv("DISK_STOP")
        ended = launcher.run(*RUN, *TRAINING)
        assert re.search("goes on from step [67],", ended.err)  # rank 0 may have been a step behind
    assert ended.status == 0, ended.err
    # What only the dead rank knew is gone with the agent, and that is said.
    if "is lost" not in ended.err and "left no state of its own" not in ended.err:
        assert digests(ended.out) == undisturbed
