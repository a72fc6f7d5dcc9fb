"""Hangs are found, whatever the application does with its events; what is in flight is known."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESTART = 75  # exit status: run the job again


@pytest.mark.parametrize("events", ["none", "recorded_again", "destroyed", "kept"])
def test_a_hang_is_found(run_program: Callable[..., Any], events: str) -> None:
    seen = run_program("hang", events)
    hang = seen["hang"]
    assert (hang["operation"], hang["sequence"], hang["bytes"]) == ("ncclAllReduce", 4, 4096)
    assert re.fullmatch(r"[0-9a-f]{16}", hang["communicator"])
    assert hang["seconds"] >= 1.0
    assert [(c["sequence"], c["oldest"]) for c in hang["collectives"]] == [(4, True), (5, False)]
    assert seen["held"]["rest"] == "settled"
    assert seen["order"] == {"type": "save", "save_id": 7}
    assert seen["holding"] == 1


def test_what_is_in_flight(run_program: Callable[..., Any]) -> None:
    seen = run_program("in_flight")
    assert seen["armed_inside_group"] is False, "a group is one watch a stream, armed at its outermost end"
    listed = seen["listed"]
    assert [c["operation"] for c in listed] == ["ncclAllReduce"] * 200 + ["ncclSend", "ncclSend"]
    assert [c["sequence"] for c in listed] == [*range(1, 201), 200, 200], "a send is no collective"
    assert [c["exchanges"] for c in listed[200:]] == [[[True, 1, 1], [False, 1, 1]], [[True, 1, 2]]]
    assert [c["oldest"] for c in listed] == [True] + [False] * 199 + [True, False]
    group = listed[200]
    assert (group["calls"], group["bytes"]) == (2, 2 * 4 * 128)


def test_a_hang_without_an_agent_saves_and_ends_the_process(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "saved"
    ended = run_program("alone", "hang", str(file), status=RESTART)
    assert re.match(
        r"ncclAllReduce \(communicator [0-9a-f]{16}, number 1, 1024 bytes\) is unfinished after 1\.",
        file.read_text(),
    )
    assert "the state is saved; the process ends" in ended.stderr


def test_sigterm_without_an_agent_saves_and_then_acts(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "saved"
    run_program("alone", "sigterm", str(file), status=-signal.SIGTERM)
    assert file.read_text() == "SIGTERM"


def test_sigterm_reaches_the_applications_handler_after_the_save(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "saved"
    run_program("alone", "sigterm_handled", str(file), status=33)
    assert file.read_text() == "SIGTERM"


def test_an_ignored_sigterm_stays_ignored(run_program: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "saved"
    assert run_program("alone", "sigterm_ignored", str(file)) == {"saved": False}


def test_sigterm_is_the_agents_business_where_there_is_one(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "saved"
    run_program("alone", "sigterm_with_agent", str(file), status=-signal.SIGTERM)
    assert not file.exists()


def test_the_agents_death_saves_and_ends_the_process(run_program: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "saved"
    run_program("alone", "agent_dies", str(file), status=RESTART)
    assert file.read_text() == "the agent died"
