"""Who waits for whom, from made-up answers of the ranks."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.agent.investigation import Investigation
from jitckpt.decisions.hang import diagnose, named, report
from jitckpt.events import EventLog
from jitckpt.wire.protocol import Hang, Progress


def place(rank: int, ranks: int, sequence: int, **by_peer: Any) -> dict[str, Any]:
    counts = {"sends": [], "receives": []} | by_peer
    return {"communicator": "c", "rank": rank, "ranks": ranks, "sequence": sequence, **counts}


def waiting(
    sequence: int, seconds: float = 9.0, exchanges: Any = (), communicator: str = "c"
) -> dict[str, Any]:
    return {
        "communicator": communicator,
        "operation": "ncclRecv" if exchanges else "ncclAllReduce",
        "sequence": sequence,
        "bytes": 4096,
        "seconds": seconds,
        "exchanges": list(exchanges),
    }


def answer(*communicators: Any, collectives: Any = ()) -> Progress:
    return Progress(1, list(communicators), list(collectives))


def test_the_rank_that_has_not_arrived_is_late() -> None:
    answers = {
        0: answer(place(0, 3, 7), collectives=[waiting(7)]),
        1: answer(place(1, 3, 6)),
        2: answer(place(2, 3, 7), collectives=[waiting(7)]),
    }
    diagnosis = diagnose(answers, [])
    assert diagnosis.late == diagnosis.stragglers == (1,)
    assert str(diagnosis) == (
        "rank 0 has waited 9.0 s in ncclAllReduce number 7 (4.1 kB) of ranks 0 to 2, "
        "where rank 1 has not arrived"
    )


def test_where_all_have_arrived_nobody_is_late() -> None:
    answers = {rank: answer(place(rank, 2, 7), collectives=[waiting(7)]) for rank in (0, 1)}
    diagnosis = diagnose(answers, [])
    assert diagnosis.late == ()
    assert str(diagnosis).endswith("of ranks 0 to 1, where all have arrived")


def test_a_rank_that_hangs_alone_where_all_have_arrived_is_no_straggler() -> None:
    """Rank 0 has left the broadcast, and waits for rank 1 in what comes next."""
    answers = {
        0: answer(place(0, 2, 8), collectives=[waiting(8, seconds=20.0)]),
        1: answer(place(1, 2, 7), collectives=[waiting(7)]),
    }
    diagnosis = diagnose(answers, [])
    assert diagnosis.stragglers == ()
    assert str(diagnosis).startswith("rank 1 has waited 9.0 s in ncclAllReduce number 7")
    assert str(diagnosis).endswith("where all have arrived")


def test_a_rank_that_does_not_answer_is_no_straggler() -> None:
    diagnosis = diagnose({0: answer(place(0, 2, 7), collectives=[waiting(7)])}, [1])
    assert diagnosis.late == (1,)
    assert diagnosis.stragglers == ()
    assert str(diagnosis).endswith("of 2 ranks, where rank 1 has not arrived; rank 1 does not answer")
    assert str(diagnose({}, [0, 1])) == "ranks 0 to 1 do not answer"


def test_a_rank_that_can_not_be_asked_yet_may_be_on_its_way() -> None:
    diagnosis = diagnose({0: answer(place(0, 2, 7), collectives=[waiting(7)])}, [], absent=[1])
    assert diagnosis.stragglers == (1,)
    everybody = {rank: answer(place(rank, 2, 7), collectives=[waiting(7)]) for rank in (0, 1)}
    assert diagnose(everybody, [], absent=[2]).late == (), "it is not of this communicator"


def test_who_waits_for_a_waiting_rank_does_not_make_it_late() -> None:
    """Rank 2 waits for 1 on one communicator, 1 for 0 on another: 0 is the cause."""
    answers = {
        0: answer({**place(0, 2, 3), "communicator": "a"}),
        1: answer(
            {**place(1, 2, 4), "communicator": "a"},
            {**place(0, 2, 8), "communicator": "b"},
            collectives=[waiting(4, communicator="a")],
        ),
        2: answer({**place(1, 2, 9), "communicator": "b"}, collectives=[waiting(9, communicator="b")]),
    }
    diagnosis = diagnose(answers, [])
    assert diagnosis.late == (0,)
    assert {(one.rank, one.late) for one in diagnosis.waits} == {(1, (0,)), (2, (1,))}


def test_a_circle_is_named() -> None:
    answers = {
        0: answer(
            {**place(0, 2, 1), "communicator": "a"},
            {**place(0, 2, 0), "communicator": "b"},
            collectives=[waiting(1, communicator="a")],
        ),
        1: answer(
            {**place(1, 2, 0), "communicator": "a"},
            {**place(1, 2, 1), "communicator": "b"},
            collectives=[waiting(1, communicator="b")],
        ),
    }
    diagnosis = diagnose(answers, [])
    assert diagnosis.stragglers == ()
    assert str(diagnosis).endswith("all ranks wait for each other in a circle")


def test_a_receive_waits_for_its_sender() -> None:
    receiver = answer(place(1, 2, 0, receives=[[0, 5]]), collectives=[waiting(0, exchanges=[[False, 0, 5]])])
    for sent, late in ((4, (0,)), (5, ()), (6, ())):
        assert diagnose({0: answer(place(0, 2, 0, sends=[[1, sent]])), 1: receiver}, []).late == late
    assert diagnose({0: answer(place(0, 2, 0)), 1: receiver}, []).late == (0,)
    unknown = answer(place(0, 2, 0, sends=None))
    assert diagnose({0: unknown, 1: receiver}, []).late == ()


def idle(communicator: str = "c") -> dict[str, Any]:
    """What a rank says of a communicator on which it has enqueued nothing yet."""
    return {**place(-1, 0, 0), "communicator": communicator}


def test_ranks_that_have_not_begun_with_a_communicator_are_late() -> None:
    """As in the first iteration, where the communicators were made in advance."""
    answers = {
        0: answer(place(0, 4, 1), collectives=[waiting(1)]),
        1: answer(place(1, 4, 1), collectives=[waiting(1)]),
        2: answer(idle()),
        3: answer(idle()),
    }
    diagnosis = diagnose(answers, [])
    assert diagnosis.stragglers == (2, 3)
    assert "of ranks 0 to 3, where ranks 2 to 3 have not arrived" in str(diagnosis)


def test_a_sender_that_has_not_begun_with_a_communicator_is_late() -> None:
    receiver = answer(place(1, 2, 0, receives=[[0, 1]]), collectives=[waiting(0, exchanges=[[False, 0, 1]])])
    for answers in ({0: answer(idle()), 1: receiver}, {1: receiver, 0: answer(idle())}):
        assert diagnose(answers, []).stragglers == (0,)


GROUPS = {
    frozenset((0, 1)): {"tensor"},
    frozenset((2, 3)): {"tensor"},
    frozenset((0, 2)): {"data"},
    frozenset((1, 3)): {"data"},
}


def test_the_parallel_dimension_is_named() -> None:
    answers = {0: answer(place(0, 2, 7), collectives=[waiting(7)]), 1: answer(place(1, 2, 6))}
    assert "(4.1 kB) of ranks 0 to 1 along tensor, where rank 1 has not arrived" in str(
        diagnose(answers, [], groups=GROUPS)
    )
    both = {frozenset((0, 1)): {"tensor", "cp"}}
    assert diagnose(answers, [], groups=both).waits[0].dimension == "cp or tensor"
    assert diagnose(answers, [], groups={}).waits[0].dimension == ""


def test_the_dimension_is_told_by_who_has_answered_and_does_not_know_the_communicator() -> None:
    """Rank 3 is silent; it is the one that rank 1 waits for, since rank 0 has never heard of it."""
    answers = {0: answer(), 1: answer(place(1, 2, 7), collectives=[waiting(7)]), 2: answer()}
    (wait,) = diagnose(answers, [3], groups=GROUPS).waits
    assert (wait.dimension, wait.late) == ("data", (3,))
    alone = {1: answers[1]}
    assert diagnose(alone, [0, 2, 3], groups=GROUPS).waits[0].dimension == "", "it may be either"


def test_short_waits_do_not_count() -> None:
    answers = {0: answer(place(0, 2, 7), collectives=[waiting(7, seconds=0.1)]), 1: answer(place(1, 2, 6))}
    assert diagnose(answers, [], patience=5.0).waits == ()


def test_the_report_tells_all() -> None:
    answers = {0: answer(place(0, 2, 7), collectives=[waiting(7)]), 1: answer(place(1, 2, 6))}
    text = report(diagnose(answers, []), {1: 'File "train.py", line 7 in load'})
    assert "rank 1 has not arrived" in text
    assert 'Python stacks of rank 1:\nFile "train.py", line 7 in load\n' in text


def test_ranks_in_words() -> None:
    assert named([3]) == "rank 3"
    assert named([7, 0, 1, 2]) == "ranks 0 to 2, 7"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_in_one_communicator_the_last_are_late(sequences: list[int]) -> None:
    """Every rank waits in its newest collective, but for those that have not come to the first."""
    size = len(sequences)
    answers = {
        rank: answer(place(rank, size, number), collectives=[waiting(number)] if number else [])
        for rank, number in enumerate(sequences)
    }
    diagnosis = diagnose(answers, [])
    expected = tuple(rank for rank, number in enumerate(sequences) if number == 0) if any(sequences) else ()
    assert diagnosis.late == expected


def test_a_rank_that_registers_after_the_question_is_no_failure() -> None:
    """It could not be asked yet, so nobody knows that all have arrived."""
    log = EventLog()
    looks = Investigation({}, lambda *_: None, log, stall_timeout=540.0, answer_within=3.0)
    looks.begin(0, Hang("c", 7, "ncclAllReduce", 4096, 9.0), askable=(0,))
    looks.hear(0, answer(place(0, 2, 7), collectives=[waiting(7)]))
    assert looks.verdict(askable=(0, 1), absent=()) is None
    (straggler,) = [event for event in log.events if event["event"] == "straggler"]
    assert straggler["ranks"] == (1,)
