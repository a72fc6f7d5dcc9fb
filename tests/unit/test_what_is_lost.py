"""What a restart says of a rank that has not come to the end of its iteration."""

from jitckpt.state import counters
from jitckpt.state.kept_variables import PART
from jitckpt.worker.restoring import is_half_written, what_is_lost

PARTS = {PART: {"script:main": {"done": 3, "best": 9}}, counters.PART: {"script:main": ["done"]}}


def test_of_a_rank_that_was_killed_the_variables_are_named() -> None:
    assert what_is_lost(1, 7, PARTS, None) == (
        "Rank 1 may have failed between its optimizer step 7 and the end of that iteration. What the script "
        "changes there (random numbers, the variable 'best' of main, extra) is lost: this run may differ "
        "from an undisturbed one. Counters (the variable 'done' of main) are made up."
    )
    assert "(random numbers, variables, extra) is lost" in what_is_lost(1, 7, {}, None)


def test_of_a_rank_that_was_saved_it_is_said_where_it_stood() -> None:
    stood = {"at": "script.py:7, in evaluate", "unchanged": ["the variable 'best' of main"]}
    assert what_is_lost(0, 7, PARTS, stood) == (
        "Rank 0 stood at script.py:7, in evaluate, and was saved there, behind its optimizer step 7 and "
        "before the end of that iteration. Its variables are as they were there. "
        "Counters (the variable 'done' of main) are made up. "
        "What the rest of the iteration changes (random numbers, the variable 'best' of main, extra) is left "
        "out: this run may differ from an undisturbed one."
    )


def test_of_many_some_are_named() -> None:
    stood = {"at": "script.py:7, in evaluate", "unchanged": [f"v{number}" for number in range(20)]}
    assert "v7 ..., extra" in what_is_lost(0, 7, {}, stood)


def test_what_was_half_written_as_a_rank_was_saved_is_told() -> None:
    local = {"earlier": ["variables.shadow"]}
    assert is_half_written(local, 12, 12)
    assert not is_half_written(local, 11, 12), "the end of the iteration was not written at all"
    assert not is_half_written(local, 0, 12), "nothing ever changes there"
    assert not is_half_written({}, 12, 12)
