"""The optimizer steps of a script that knows nothing of jitckpt, on two ranks."""

import json

from launcher import JITCKPT, Launcher
from programs_of_tests import text_of

# Two optimizers in turns, a scaler that skips the first steps, statistics, and two micro-batches a step.
SCRIPT = text_of("steps")


def test_steps_are_seen_without_a_word_of_the_script(launcher: Launcher) -> None:
    script = launcher.script(SCRIPT)
    command = [*JITCKPT, "steps", "--json", "--device", "softgpu", "--nproc-per-node", "2", "--", script]
    out = launcher.succeed(*command)
    ranks = json.loads(out)
    assert [one["rank"] for one in ranks] == [0, 1]
    one, other = ranks
    assert one["state"] == other["state"], "names are the same on all replicas"
    assert one["steps"] == other["steps"] == 6
    assert one["optimizers"] == other["optimizers"] == [["Adam", 6], ["AdamW", 6]]
    assert one["state"]["optimizer.0.parameter.0"] == ["torch.float32", [16, 4]]
    assert one["state"]["optimizer.1.state.5.exp_avg_sq"] == ["torch.float32", [4]]
    assert one["buffers"] == other["buffers"]
    assert one["changing"] == [
        f"module.{number}.1.{name}"
        for number in (0, 1)
        for name in ("num_batches_tracked", "running_mean", "running_var")
    ]
    for rank in ranks:
        assert (rank["outside"], rank["in_step"], rank["unsupported"]) == ([], [], [])
