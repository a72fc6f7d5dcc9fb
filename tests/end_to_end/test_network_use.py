"""Ranks say when the device is inside of a collective, by words in memory that others look at."""

from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

TRAINING = text_of("network_use")


def test_a_collective_that_waits_for_another_rank_is_told_of(launcher: Launcher) -> None:
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
    done = launcher.succeed(*run, "--checkpoint-dir", "ckpt", launcher.script(TRAINING))
    assert done.count("told\n") == 2
