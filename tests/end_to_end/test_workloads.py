"""A workload of the paper ends with the same losses and state, whatever fails, by the script as it is."""

import re
from pathlib import Path

import pytest
from gpt import RUN
from launcher import JITCKPT, TORCHRUN, Launcher

from jitckpt.events import read_events
from jitckpt.reports.timeline_transparent import transparent_recoveries

SCRIPT = Path(__file__).parents[2] / "examples" / "workloads" / "pyramidnet.py"
TRAINING = [str(SCRIPT), "--steps", "11", "--layers", "1", "--size", "8", "--batch", "4"]


def said(out: str) -> dict[str, str]:
    """Return the loss of each step and what each rank has in the end; a step made twice counts once."""
    found = dict(re.findall(r"^(step \d+|rank \d): (.+)$", out, re.MULTILINE))
    assert len(found) == 11 + 2, out
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What it says under torchrun."""
    devices = [*JITCKPT, "exec", "--device", "softgpu", "--devices", "2", "--"]
    launcher = Launcher(tmp_path_factory.mktemp("plain"))
    out = launcher.succeed(*devices, *TORCHRUN, "--nproc-per-node", "2", *TRAINING)
    assert len(set(said(out).values())) == 13  # of BatchNorm each rank has its own
    return said(out)


def test_user_level_mode(launcher: Launcher, plain: dict[str, str]) -> None:
    fault = ["--fault", "rank=1 step=8 phase=backward kind=kill"]
    result = launcher.run(*RUN, *fault, *TRAINING, "--protect")
    assert result.status == 0, result.err
    # Rank 0 may not have come to its optimizer's step 7 when rank 1 was in step 8.
    assert re.search("Restart 1 went on from step [67], with at most 1 minibatch done again", result.err)
    assert said(result.out) == plain


def test_transparent_mode(launcher: Launcher, plain: dict[str, str]) -> None:
    options = ["--mode", "transparent", "--checkpoint-dir", "ckpt"]
    fault = ["--fault", "rank=1 step=8 phase=allreduce kind=collective-error"]
    out = launcher.succeed(*RUN, *options, *fault, *TRAINING)
    events, _ = read_events(launcher.directory / "ckpt")
    (recovery,) = transparent_recoveries(events)
    assert (recovery.state, recovery.replaced) == (7, [])
    assert said(out) == plain
