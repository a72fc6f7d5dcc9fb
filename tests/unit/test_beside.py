"""An agent and the processes beside it live on whatever one of them tells the other."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jitckpt.agent.object_copies import ObjectCopies, WantedObjects
from jitckpt.events import EventLog
from jitckpt.web.serve import AgentTold
from jitckpt.wire.beside import AllCopied, CopiedSave, CopyProblem, JobDirectory, line_of

NONSENSE = [
    (b"no JSON\n", "A message is not JSON"),
    (b"[]\n", "A message is not a JSON object but list."),
    (b"{}\n", "unknown type None"),
    (b'{"type": "copied_save", "step": "7"}\n', "A message of type copied_save lacks rank"),
    (b'{"type": "copy_problem", "text": 7}\n', "text can't be 7."),
    (b'{"type": "directory", "path": null}\n', "path can't be None."),
]


@pytest.fixture
def copies() -> ObjectCopies:
    """Without its process."""
    made = ObjectCopies.__new__(ObjectCopies)
    made._wanted, made._log = WantedObjects("file:///there", 1.0), EventLog()
    made.some, made._problem, made._ended = False, "", threading.Event()
    return made


def test_nonsense_of_who_copies_is_a_warning_and_what_comes_behind_is_heard(copies: ObjectCopies) -> None:
    copied = CopiedSave(5, 1, "rank", 100, 40, 0.5)
    sense = [line_of(one) for one in (CopyProblem("no answer."), copied, AllCopied())]
    played: Any = SimpleNamespace(stdout=[line for line, _ in NONSENSE] + sense)
    copies._process = played
    copies._hear()
    *warnings, problem, event = [
        {name: value for name, value in one.items() if name not in ("time", "clock", "pid")}
        for one in copies._log.events
    ]
    assert len(warnings) == len(NONSENSE)
    for warning, (line, why) in zip(warnings, NONSENSE, strict=True):
        assert warning["text"].startswith("what copies saves says what makes no sense: ")
        assert why in warning["text"] or b"directory" in line  # which is said to another
    assert problem["text"] == "no answer."
    told = {name: event[name] for name in ("event", "step", "rank", "kind", "bytes", "there", "seconds")}
    assert told == {
        "event": "copied_to_objects",
        **{"step": 5, "rank": 1, "kind": "rank", "bytes": 100, "there": 40, "seconds": 0.5},
    }
    assert (copies.some, copies._problem, copies._ended.is_set()) == (True, "", True)


class Ended(Exception):
    """The process would have ended."""


def test_nonsense_of_the_agent_is_said_and_its_directory_is_heard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    lines = [line for line, _ in NONSENSE]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=[*lines, line_of(JobDirectory(str(tmp_path)))]))
    monkeypatch.setattr(os, "_exit", end)
    told = AgentTold()
    with pytest.raises(Ended):
        told.listen()
    assert told.follower() is not None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(NONSENSE)
    assert all("tells who serves its job what makes no sense: " in one for one in said)
