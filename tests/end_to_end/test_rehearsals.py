"""Failures on order in models of several modules, and those that never happen."""

import re

from gpt import RUN, run_of
from launcher import Launcher
from programs_of_tests import text_of

SCRIPT = text_of("rehearsals")


def test_a_failure_comes_in_the_backward_pass_of_a_part(launcher: Launcher) -> None:
    fault = "rank=1 step=7 phase=backward kind=kill"
    ended = launcher.run(*RUN, "--fault", fault, launcher.script(SCRIPT))
    assert ended.status == 0, ended.err
    # Rank 0 may not have come to its optimizer step 6 when rank 1 was in step 7.
    assert re.search("Restart 1 went on from step [56], with at most 1 minibatch done again", ended.err)
    assert "never happened" not in ended.err


def test_a_failure_that_never_came_is_told(launcher: Launcher) -> None:
    faults = ["rank=1 step=13 phase=backward kind=kill", "rank=0 step=2 phase=between kind=exit"]
    ended = launcher.run(*RUN, "--fault", faults[0], "--fault", faults[1], launcher.script(SCRIPT))
    assert ended.status == 0, ended.err
    assert ended.err.count("never happened") == 1
    assert f"jitckpt: the rehearsed failure {faults[0]!r} never happened" in ended.err


def test_a_replica_whose_disk_is_not_blocked_saves(launcher: Launcher) -> None:
    faults = ["rank=1 step=5 phase=backward kind=blocked-disk", "rank=2 step=8 phase=backward kind=kill"]
    command = [*run_of(3), "--fault", faults[0], "--fault", faults[1]]
    ended = launcher.run(*command, launcher.script(SCRIPT))
    assert ended.status == 0, ended.err
    assert re.search("Restart 1 went on from step [67], with at most 1 minibatch done again", ended.err)
    assert "never happened" not in ended.err
    (saved,) = {path.parent.name for path in launcher.directory.glob("ckpt/step-*/rank-*")}
    ranks = {path.name for path in launcher.directory.glob(f"ckpt/{saved}/rank-*")}
    assert ranks == {"rank-00000"}
