"""Loops that tell their boundaries, with a rank killed at each kind of place in them."""

import re
import signal

import pytest
from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.worker.one_connection import VARIABLE

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
# The first argument chooses the training, the second where rank 1 is killed in its first life: a place and
# how often it has been there.
TRAINING = text_of("loops")
NOWHERE = "nowhere:0"


def ends(out: str) -> list[str]:
    found = sorted(line for line in out.splitlines() if re.match(r"rank \d ended with ", line))
    assert len(found) == 2, out
    return found


@pytest.mark.parametrize(
    ("training", "places"),
    [
        ("adversaries", {"step:4": 4, "step:9": 9}),
        ("gradients", {"step:6": 6, "scheduled:2": 8}),
        ("found", {"reduced:6": 6, "updated:9": 9}),
        ("brought_forward", {"reduced:6": 6}),
        ("average", {"forward:5": 4, "forward:10": 9}),
        ("averaged", {"forward:5": 4}),
        ("averaged_beside", {"forward:5": 4, "updated:9": 9}),
        ("noise", {"drawn:8": 8}),
        ("batches", {"backward:8": 8, "tail:2": 10, "evaluated:1": 5, "scheduled:2": 10}),
        ("warmed", {"backward:3": 3, "backward:12": 12, "backward:19": 19}),
        ("folds", {"tail:2": 10, "caught:1": 10, "backward:13": 13, "caught:2": 18, "backward:21": 21}),
    ],
)
def test_a_rank_that_is_killed_changes_nothing(
    launcher: Launcher, training: str, places: dict[str, int]
) -> None:
    script = launcher.script(TRAINING)
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", NOWHERE, script, training, NOWHERE)
    assert undisturbed.status == 0, undisturbed.err
    for place, step in places.items():
        result = launcher.run(*RUN, "--checkpoint-dir", place, script, training, place)
        assert result.status == 0, result.err
        went_on = re.search(r"Restart 1 went on from step (\d+), ", result.err)
        # The other rank may have been a step behind, as far as it is the host that is.
        assert went_on is not None, (place, result.err)
        assert int(went_on[1]) in (step - 1, step), (place, result.err)
        assert ends(result.out) == ends(undisturbed.out), (place, result.err)
        assert "was dropped before its end" not in undisturbed.err + result.err


def test_what_changes_of_extra_where_a_failure_may_lose_it_and_one_queue_are_told(launcher: Launcher) -> None:
    one_queue = f"import os\nos.environ[{VARIABLE!r}] = '1'\n{TRAINING}"
    result = launcher.run(*RUN, launcher.script(one_queue), "noise", "alone:0")
    assert "`extra` changes between forward pass and optimizer step" in result.err, result.err
    assert f"jitckpt: rank 0: {VARIABLE}" in result.err, result.err
    plain = TRAINING.replace("job.steps(12)", "range(job.restore(), 12)")
    result = launcher.run(*RUN, "--checkpoint-dir", "plain", launcher.script(plain), "average", NOWHERE)
    assert "`extra` changes between an optimizer step and the next forward pass" in result.err, result.err
    # The other rank makes the step, and this one does not come to what it does behind it.
    script = launcher.script(TRAINING)
    result = launcher.run(*RUN, "--checkpoint-dir", "late", script, "average", "outrun:8")
    assert result.status == 0, result.err
    assert "Rank 1 may have failed between its optimizer step 8 and the end of that" in result.err, result.err
    assert "`extra` changes between an optimizer step and the end of its iteration" in result.err, result.err


def test_what_is_changed_at_the_top_of_the_next_iteration_is_not_lost(launcher: Launcher) -> None:
    late = re.search(r"        with .*\n.*zip\(kept.*\n.*\n", TRAINING)
    assert late is not None
    top = "extra=kept)\n    for step in job.steps(12):\n"
    script = launcher.script(TRAINING.replace(late[0], "").replace(top, top + late[0]))
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", NOWHERE, script, "average", NOWHERE)
    result = launcher.run(*RUN, "--checkpoint-dir", "outrun", script, "average", "outrun:8")
    assert result.status == 0, result.err
    assert "went on from step 8" in result.err, result.err
    assert ends(result.out) == ends(undisturbed.out), result.err
    assert "`extra` changes" not in result.err, result.err


def test_what_a_rank_drew_behind_its_step_and_lost_is_told(launcher: Launcher) -> None:
    result = launcher.run(*RUN, launcher.script(TRAINING), "gradients", "behind:2")
    assert result.status == 0, result.err
    assert "Rank 1 may have failed between its optimizer step 8 and the end of that" in result.err, result.err


def test_a_preemption_in_the_middle_of_an_iteration_waits_for_its_end(launcher: Launcher) -> None:
    """There the scheduler's step is still to come, which comes every fourth time."""
    command = [*RUN, launcher.script(TRAINING), "gradients", "preemption:0"]
    undisturbed = launcher.run(*command, "--undisturbed")
    process = launcher.start(*RUN, "--checkpoint-dir", "preempted", *command[len(RUN) :])
    assert process.stdout is not None
    while "evaluates" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    interrupted = launcher.finish(process)
    # The other rank may still have been in its step.
    assert re.search("The state after step [78] lies in", interrupted.err), interrupted.err
    again = launcher.run(*RUN, "--checkpoint-dir", "preempted", *command[len(RUN) :])
    assert again.status == 0, again.err
    assert ends(again.out) == ends(undisturbed.out), (interrupted.err, again.err)


def test_a_loop_that_draws_its_batches_elsewhere_is_named_with_what_to_write(launcher: Launcher) -> None:
    plain = TRAINING.replace("job.epochs(3)", "range(3)").replace("job.batches(loader)", "loader")
    result = launcher.run(*RUN, launcher.script(plain), "batches", NOWHERE)
    assert result.status == 0, result.err
    said = [line for line in result.err.splitlines() if line.startswith("jitckpt: rank ")]
    named = [line for line in said if "The training draws from a DataLoader over Samples" in line]
    assert len(named) == 1
    assert "`for epoch in job.epochs(n):` and in it `for batch in job.batches(loader):`" in named[0]
    exact = launcher.run(*RUN, "--checkpoint-dir", "exact", launcher.script(TRAINING), "batches", NOWHERE)
    assert "DataLoader" not in exact.err, "an evaluation's own loader disturbs nothing"
    assert ends(exact.out) == ends(result.out), "the loop alone changes nothing"


PLAIN = text_of("loops_plain")


def test_what_a_plain_loop_carries_on_in_variables_is_named(launcher: Launcher) -> None:
    result = launcher.run(*RUN, launcher.script(PLAIN))
    assert result.status == 0, result.err
    named = re.findall(r"rank \d: The loop changes variables .* no save holds: ([\w, ]+)\.", result.err)
    assert named == ["averages"], result.err
    assert result.err.count("rank 0: An AveragedModel is updated between an optimizer step") == 1, result.err


TAIL = text_of("loops_tail")


def test_an_optimizer_step_behind_a_loop_is_named_with_how_to_make_it_in_the_loop(launcher: Launcher) -> None:
    named = "rank 0: An optimizer step is made behind a loop over job.batches"
    result = launcher.run(*RUN, launcher.script(TAIL))
    assert result.status == 0, result.err
    assert result.err.count(named) == 1, result.err
    assert "top of the loop" not in result.err, "no batch is drawn ahead"
    behind = "    if (index + 1) % 4:\n        step()\n"
    inside = TAIL.replace(behind, "").replace("if (index + 1) % 4 == 0:", "if job.sync_gradients:")
    assert inside != TAIL
    result = launcher.run(*RUN, "--checkpoint-dir", "inside", launcher.script(inside))
    assert (result.status, "optimizer step" in result.err) == (0, False), result.err
