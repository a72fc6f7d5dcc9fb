"""`jitckpt run --reshard`: a job goes on with another number of ranks, or laid out otherwise."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from launcher import JITCKPT_RUN, Launcher, Result
from test_export import assert_alike

from jitckpt.worker import resharding

KILL = ["--fault", "rank=1 step=7 phase=backward kind=kill"]
TRAINING = str(Path(__file__).parent / "sharded_training.py")
STEPS = 8


def train(
    launcher: Launcher, form: str, ranks: int, *more: str, reshard: bool = True, fault: Sequence[str] = ()
) -> Result:
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(ranks), "--warm-spares", "0"]
    run += ["--checkpoint-dir", "ckpt", "--max-restarts", "1", *(["--reshard"] if reshard else []), *fault]
    return launcher.run(*run, TRAINING, form, "--save-every", "4", *more)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp2", 4), ("full", 3)),
        (("full", 3), ("plain", 2)),
        (("plain", 2), ("tensor", 4)),
        (("tensor", 4), ("fsdp2", 4)),
    ],
)
def test_the_state_is_the_same_in_another_layout(
    launcher: Launcher, before: tuple[str, int], after: tuple[str, int]
) -> None:
    first = train(launcher, *before, "--state", "before.pt")
    assert first.status == 0, first.err
    refused = train(launcher, *after, reshard=False)
    assert refused.status != 0
    assert "give `jitckpt run --reshard`" in refused.err
    second = train(launcher, *after, "--state", "after.pt")
    assert second.status == 0, second.err
    assert f"Step {STEPS} was saved by {before[1]} ranks" in second.err
    assert "Random numbers, `extra` and the place in the data" in second.err
    states = [torch.load(launcher.directory / name) for name in ("before.pt", "after.pt")]
    for state in states:
        for group in state["optim"]["param_groups"]:
            for how in resharding.HOW - {"params"}:  # the step is computed: that is the script's, as before
                group.pop(how, None)
    assert_alike(*states)


def test_replicas_of_a_state_that_is_made_of_other_tensors_may_be_more_or_fewer(launcher: Launcher) -> None:
    first = train(launcher, "coded_plain", 2)
    assert first.status == 0, first.err
    second = train(launcher, "coded_plain", 1)
    assert second.status == 0, second.err
    assert second.out.splitlines() == [line for line in first.out.splitlines() if " rank 0 " in line]


def test_parts_of_such_a_state_can_not_be_cut_anew(launcher: Launcher) -> None:
    first = train(launcher, "coded_full", 2)
    assert first.status == 0, first.err
    second = train(launcher, "coded_full", 1)
    assert second.status != 0
    assert "mean is a Coded, which is made of other tensors: nobody can tell which part" in second.err


def test_a_job_in_another_layout_is_protected_as_any_other(launcher: Launcher) -> None:
    dies = train(launcher, "full", 3, "--dies-in", "6")
    assert dies.status != 0
    checkpoints = launcher.directory / "ckpt"
    shutil.copytree(checkpoints, launcher.directory / "kept")
    undisturbed = train(launcher, "tensor", 4)
    assert undisturbed.status == 0, undisturbed.err
    assert "Step 4 was saved by 3 ranks" in undisturbed.err

    shutil.rmtree(checkpoints)
    (launcher.directory / "kept").rename(checkpoints)
    killed = train(launcher, "tensor", 4, fault=KILL)
    assert killed.status == 0, killed.err
    assert "Restart 1 went on from step" in killed.err
    assert "own state" not in killed.err, "no rank lost what it alone knew"
    assert sorted(killed.out.splitlines()) == sorted(undisturbed.out.splitlines())

    back = train(launcher, "full", 3, reshard=False)
    assert back.status != 0, "it would go back to step 4 of its own"
    assert f"Step {STEPS} in {checkpoints} is newer than what this job could go on from" in back.err
    assert "was saved by 4 ranks" in back.err
