"""`jitckpt run` with a real training on softgpu that is told to end; for failures see tests/faults."""

import re
import signal

import pytest
from gpt import RUN, STEPS, TRAINING, digests
from launcher import Launcher
from programs_of_tests import text_of

from jitckpt.events import read_events

# Runs the training; in the first start rank 0 is killed as its script ends, when rank 1's is at its end.
LAST_LINES = text_of("run_training_last_lines")

# Runs the training; before the last step the ranks wait for the file `go`: it is not over before a signal.
HOLDING = text_of("run_training_holding")

# Runs the training; in the first start rank 1 wants to have failed after a step, which its device has ended.
GIVING_UP = """
import os, runpy, sys

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import results, torch

queued = results.DoneSteps.queued

def end(done, step):
    queued(done, step)
    if (os.environ["JITCKPT_RESTART"], os.environ["RANK"], step) == ("0", "1", 5):
        torch.cuda.synchronize()
        END

results.DoneSteps.queued = end
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_preempted_job_goes_on_when_it_is_started_again(launcher: Launcher, undisturbed: list[str]) -> None:
    command = [*RUN, launcher.script(HOLDING), *TRAINING]
    process = launcher.start(*command)
    assert process.stdout is not None
    while "step 3 of" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGTERM)
    interrupted = launcher.finish(process)
    assert interrupted.status == 75
    saved = re.search(r"The state after step (\d+) lies in", interrupted.err)
    assert saved is not None, interrupted.err
    (launcher.directory / "go").touch()
    again = launcher.succeed(*command)
    steps = [int(number) for number in re.findall(r"step (\d+) of", again)]
    assert steps == list(range(int(saved[1]) + 1, STEPS + 1))
    assert digests(again) == undisturbed


def test_a_rank_at_its_end_saves_if_another_fails(launcher: Launcher, undisturbed: list[str]) -> None:
    result = launcher.run(*RUN, launcher.script(LAST_LINES), *TRAINING)
    assert result.status == 0, result.err
    assert f"Restart 1 went on from step {STEPS}, " in result.err
    assert sorted(set(digests(result.out, 4))) == undisturbed, "all is printed again"


@pytest.mark.parametrize(("end", "hang_timeout"), [("sys.exit(3)", "60"), ("raise SystemExit(3)", "1")])
def test_a_rank_that_ends_with_a_status_has_failed(
    launcher: Launcher, undisturbed: list[str], end: str, hang_timeout: str
) -> None:
    """Who calls sys.exit is not kept; for who raises SystemExit the other rank waits in vain first."""
    command = ["--hang-timeout", hang_timeout, launcher.script(GIVING_UP.replace("END", end)), *TRAINING]
    result = launcher.run(*RUN, *command)
    assert result.status == 0, result.err
    assert "rank 1 ended with exit status 3" in result.err
    # Rank 0 may not have come to its optimizer's fifth step when rank 1's device had ended it.
    assert re.search("Restart 1 went on from step [45], with at most 1 minibatch done again", result.err)
    assert digests(result.out) == undisturbed
    events, _ = read_events(launcher.directory / "ckpt")
    early = [event for event in events if (event["event"], event["restart"]) == ("at_end", 0)]
    assert len(early) == (end != "sys.exit(3)")
