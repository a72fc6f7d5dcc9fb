"""What Kubeflow Trainer's status server is told, and that nobody waits for it: real servers, with TLS."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import crd_schemas
import jsonschema
import pytest
from certificates import certificates
from kubeflow_server import PATH, Server

from jitckpt.clusters import kubeflow
from jitckpt.clusters.kubeflow import KubeflowReporter, StatusServer, StepsMade, server_of, status_of

TOTAL = 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said; reports follow each other quickly."""
    monkeypatch.setattr(kubeflow, "SECONDS", 0.02)
    monkeypatch.setattr(kubeflow, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(kubeflow, "LAST_SECONDS", 3.0)
    return []


def reporter(environment: dict[str, str], said: list[str]) -> KubeflowReporter:
    found = server_of(environment)
    assert found is not None
    return KubeflowReporter(found, TOTAL, said.append)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_what_is_told_is_what_the_schema_takes() -> None:
    schema = crd_schemas.read()["trainer.kubeflow.org/v1alpha1", "TrainJob"]
    status = schema["properties"]["status"]["properties"]["trainerStatus"]
    for told in (
        status_of(StepsMade(50, 0.5, 1), TOTAL),
        status_of(StepsMade(1, None, 0), TOTAL),
        status_of(StepsMade(TOTAL + 1, 1e12, 0), TOTAL),
        status_of(StepsMade(TOTAL, 0.5, 0), TOTAL, succeeded=True),
    ):
        jsonschema.validate(told, status)
    told = status_of(StepsMade(50, 0.5, 1), TOTAL)
    assert (told["progressPercentage"], told["estimatedRemainingSeconds"]) == (25, 75)
    assert {one["name"]: one["value"] for one in told["metrics"]} == {
        "step": "50",
        "restarts": "1",
        "step_seconds": "0.5",
    }
    assert status_of(StepsMade(TOTAL, 0.5, 0), TOTAL)["progressPercentage"] == 99, "it has not ended yet"


def test_without_a_server_there_is_none(server: Server) -> None:
    for name in server.environment:
        assert server_of({other: text for other, text in server.environment.items() if other != name}) is None


def test_it_is_told_what_was_noted_last_and_the_end(server: Server, said: list[str], tmp_path: Path) -> None:
    tells = reporter(server.environment, said)
    tells.note(10, 0.5, 0)
    until(lambda: server.reports)
    (tmp_path / "token").write_text("another, as this one is written anew now and then")
    tells.note(20, 0.5, 1)
    until(lambda: len(server.reports) == 2)
    time.sleep(0.2)
    assert len(server.reports) == 2, "nothing new was noted"
    tells.finish(succeeded=True)
    assert [told["progressPercentage"] for told in server.reports] == [5, 10, 100]
    assert said == []


def test_who_never_was_the_first_host_tells_nothing(server: Server, said: list[str]) -> None:
    reporter(server.environment, said).finish(succeeded=True)
    assert server.asked == 0


def test_an_error_is_said_once_and_it_is_tried_again(server: Server, said: list[str]) -> None:
    server.answer = 403
    tells = reporter(server.environment, said)

    def asked_for(step: int) -> None:
        until(lambda: server.asked >= step)

    for step in range(1, 4):
        tells.note(step, None, 0)
        asked_for(step)
    (sentence,) = said
    assert 'it answers 403 Forbidden {"message": "Forbidden"}. The training goes on' in sentence
    server.answer = 200
    tells.note(4, None, 0)
    until(lambda: server.reports)
    tells.finish(succeeded=False)
    assert len(said) == 1


def test_nobody_waits_for_a_server_that_never_answers(server: Server, said: list[str]) -> None:
    server.answer = None
    tells = reporter(server.environment, said)
    begun = time.monotonic()
    for step in range(1000):
        tells.note(step, None, 0)
    assert time.monotonic() - begun < 1
    until(lambda: said)
    begun = time.monotonic()
    tells.finish(succeeded=True)
    assert time.monotonic() - begun < 3.5
    assert "timed out" in said[0]


@pytest.mark.parametrize("what", ["nobody", "stranger", "no certificate", "no token", "clear text"])
def test_why_it_can_not_be_told_is_said(server: Server, said: list[str], tmp_path: Path, what: str) -> None:
    environment = dict(server.environment)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if what == "nobody":
            environment[kubeflow.URL] = f"https://127.0.0.1:{taken.getsockname()[1]}{PATH}"
        elif what == "stranger":
            (tmp_path / "other").mkdir()
            environment[kubeflow.CERTIFICATE] = str(certificates(tmp_path / "other") / "ca.crt")
        elif what == "no certificate":
            environment[kubeflow.CERTIFICATE] = str(tmp_path / "none")
        elif what == "no token":
            environment[kubeflow.TOKEN] = str(tmp_path / "none")
        else:
            environment[kubeflow.URL] = environment[kubeflow.URL].replace("https", "http")
        tells = reporter(environment, said)
        tells.note(1, None, 0)
        until(lambda: said)
        tells.finish(succeeded=False)
    why = {
        "nobody": "Connection refused",
        "stranger": "certificate verify failed",
        "clear text": "its address is not https://",
    }
    assert why.get(what, "No such file or directory") in said[0]
    assert server.reports == []
    assert "a token" not in said[0]


def test_a_server_is_what_the_variables_say() -> None:
    environment = {kubeflow.URL: "https://k", kubeflow.CERTIFICATE: "c", kubeflow.TOKEN: "t"}
    assert server_of(environment) == StatusServer("https://k", "c", "t")
