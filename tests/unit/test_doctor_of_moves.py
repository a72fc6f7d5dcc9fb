"""What the doctor says of a script in transparent mode."""

import pytest

from jitckpt.doctor.moves import check_moves, check_transparent

LEFT_OUT = "validation_left_out"
VALIDATED = [{"event": "validated", "rank": rank} for rank in (0, 1)]


@pytest.mark.parametrize(
    ("events", "status", "state", "found"),
    [
        (VALIDATED, "", "ok", "2 ranks ran a minibatch again, bit for bit"),
        ([], "it ended with status 1", "problem", "it ended with status 1"),
        ([{"event": "switched_off", "text": "It differs."}], "", "problem", "It differs."),
        (
            [{"event": "validation_left_out", "text": "so"}],
            "",
            "warning",
            "a minibatch was not run again: so",
        ),
    ],
)
def test_a_script(events: list[dict[str, object]], status: str, state: str, found: str) -> None:
    (row,) = check_transparent(events, 2, status)
    assert (row.state, row.found) == (state, found)


def test_what_keeps_ranks_is_named_once_with_the_ranks() -> None:
    ring, log = "Process {} (python) has an io_uring.", "Process {} (loader) has /log open to write."
    here = {0: [ring.format(7)], 1: [ring.format(8)], 2: []}
    elsewhere = {0: [ring.format(7), log.format(9)], 1: [ring.format(8)], 2: ["It has something else."]}
    rows = check_moves(here, elsewhere)
    assert [row.found for row in rows] == [
        "rank 0, 1: python has an io_uring",
        "rank 0: loader has /log open to write",
        "rank 2: It has something else.",
    ]
    assert {row.state for row in rows} == {"warning"}
    assert "anew" in rows[0].advice
    assert all("another host" in row.advice for row in rows[1:])


def test_nothing_in_the_way() -> None:
    (row,) = check_moves({0: []}, {0: []})
    assert (row.state, "--no-state-on-device" in row.advice) == ("ok", True)
    assert check_moves({}, {}) == [], "nobody was seen"


def test_a_script_that_calls_init_stays_on_its_host() -> None:
    (row,) = check_moves({0: []}, {0: []}, calls_init=True)
    assert (row.state, row.found) == ("warning", "the script calls jitckpt.init")
    assert "another host" in row.advice
