"""The arithmetic of the paper's tables, on events that are planted."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench import workload_tables
from bench.workload_tables import PHASES, beside, overhead, tables, transparent_figures, user_figures

from jitckpt.events import FILE_NAME, Event, read_events


def planted(folder: Path, *lines: tuple[float, int, str, dict[str, Any]]) -> list[Event]:
    """Return events, as they are read from the file of a job: clock, restart, name and what else it has."""
    text = "".join(
        json.dumps({"event": name, "time": 1e9 + clock, "clock": clock, "restart": restart} | more) + "\n"
        for clock, restart, name, more in lines
    )
    (folder / FILE_NAME).write_text(text)
    events, damages = read_events(folder)
    assert damages == []
    return events


def killed(begun: float, restart: int, *, slower: float) -> list[tuple[float, int, str, dict[str, Any]]]:
    """Return what follows a kill: the save takes 0.5 s, the start 4 s, and rank 1 so much longer."""
    again = restart + 1
    return [
        (begun, restart, "detected", {"first": True, "text": "rank 1 was killed", "ranks": [1]}),
        (begun + 0.1, restart, "save_ordered", {"save_id": 1}),
        (begun + 0.4, restart, "save_ended", {"rank": 0, "step": 7, "bytes": 10}),
        (begun + 0.6, restart, "saved", {"step": 7}),
        (begun + 1, again, "restart", {}),
        (begun + 3, again, "registered", {"rank": 0}),
        (begun + 5, again, "restored", {"rank": 0, "step": 7}),
        (begun + 5 + slower, again, "restored", {"rank": 1, "step": 7}),
        (begun + 9, again, "first_step", {"rank": 0, "step": 8}),
    ]


def test_user_level_mode_is_timed_to_the_slowest_ranks_state(tmp_path: Path) -> None:
    start: tuple[float, int, str, dict[str, Any]] = (0, 0, "job_started", {})
    events = planted(tmp_path, start, *killed(10, 0, slower=1), *killed(30, 1, slower=2))
    assert user_figures(events) == pytest.approx({"checkpoint": 0.5, "restore": 5.5, "recovery": 6.5})


@pytest.mark.parametrize(("left_out", "said"), [("saved", "saved"), ("restored", "restored")])
def test_a_recovery_that_lacks_a_part_is_none(tmp_path: Path, left_out: str, said: str) -> None:
    lines = [line for line in killed(10, 0, slower=1) if line[2] != left_out]
    with pytest.raises(ValueError, match=f"after 'rank 1 was killed' nothing was {said}"):
        user_figures(planted(tmp_path, *lines))


def test_without_a_failure_there_are_no_figures(tmp_path: Path) -> None:
    events = planted(tmp_path, (0, 0, "job_started", {}))
    for figures in (user_figures, transparent_figures):
        with pytest.raises(ValueError, match="nothing failed"):
            figures(events)


def recovered(begun: float, number: int) -> list[tuple[float, int, str, dict[str, Any]]]:
    """Return a transparent recovery of 2 s; rank 1 takes `number` times as long for its parts as rank 0."""
    lines: list[tuple[float, int, str, dict[str, Any]]] = [
        (begun, 0, "device_alarm", {"rank": 1, "text": "NCCL error 6"}),
        (begun, 0, "recovery_begun", {"recovery": number}),
    ]
    for rank, times in ((0, 1), (1, number)):
        own = {"rank": rank, "recovery": number}
        parts = {"handles": 0.01, "image": 0.02, "communicators": 0.03, "replay": 0.04}
        lines += [
            (begun + 0.5, 0, "rank_stopped", own | {"seconds": 0.05 * times}),
            (
                begun + 1,
                0,
                "server_restarted",
                own | {"ending": 0.06 * times, "starting": 0.07, "stays": True},
            ),
            (begun + 1.5, 0, "calls_made_again", own | {name: one * times for name, one in parts.items()}),
        ]
    return [*lines, (begun + 2, 0, "recovered", {"state": 7})]


def test_a_transient_recovery_is_cut_into_the_papers_steps(tmp_path: Path) -> None:
    whole, phases = transparent_figures(planted(tmp_path, *recovered(10, 1), *recovered(20, 3)))
    assert whole == pytest.approx(2)
    # Medians of two recoveries, of which the slower rank took once and three times as long.
    expected = [0.1, 0.12, (0.1 + 0.07 + 0.09) / 2, 0.04, 0.02, 0.08]
    assert phases == pytest.approx(dict(zip(PHASES, expected, strict=True)))


def test_a_recovery_that_was_given_up_is_said(tmp_path: Path) -> None:
    lines = recovered(10, 1)[:-1]
    events = planted(tmp_path, *lines, (12, 0, "recovery_given_up", {"text": "All devices are lost."}))
    with pytest.raises(ValueError, match=r"All devices are lost\."):
        transparent_figures(events)


def test_overhead_is_the_median_of_pairs() -> None:
    # Each pair differs by 0.01, however the machine's speed changes from pair to pair.
    assert overhead([1, 2, 5, 3], [1.01, 2.01, 5.01, 3.01]) == pytest.approx([0.01] * 3)
    assert overhead([1.0, 1.0, 1.0], [1.5, 0.5, 1.0]) == [0.0, -0.25, 0.25]
    assert overhead([1.0], [1.5]) == [0.5] * 3


def test_cells_have_our_figure_and_the_papers() -> None:
    assert beside(0.28, 3.8) == "0.28 (3.8)"
    assert beside(12.345, None) == "12.3 (none)"
    assert beside([0.0004, -0.001, 0.002], 0) == "0.0004 [-0.001 to 0.002] (0)"
    assert beside(None, 20.85) == "not measured (20.85)"
    assert beside(0.00002, 0.00001) == "2e-05 (1e-05)"


def test_each_workload_has_the_rows_that_the_paper_or_this_machine_has() -> None:
    user = {name: 1.0 for name in workload_tables.USER}
    transparent = {"recovery": 1.0, "minibatch": 1.0, "overhead": [0.0, 0.0, 0.0]}
    transparent["phases"] = dict.fromkeys(PHASES, 1.0)
    records = [
        {"workload": name, "user": user, "transparent": transparent, "move": None}
        for name in ("ViT", "GPT2-S")
    ]
    found = tables(records)
    assert [[row[0] for row in one.rows] for one in found[:3]] == [
        ["ViT", "GPT2-S"],
        ["ViT", "GPT2-S"],
        ["GPT2-S"],
    ]
    assert found[2].rows == [
        ["GPT2-S", "not measured (23.97)", "not measured (20.85)", "not measured (0.21)"]
    ]
    assert found[3].headings == ["step", "ViT", "GPT2-S"]
    assert found[3].rows[2] == ["Recreate NCCL communicators", "1 (none)", "1 (8.34)"]
