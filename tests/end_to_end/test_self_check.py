"""What a save would not bring back is named after the first steps of a training, and nothing else is."""

import json
from pathlib import Path

import pytest
from launcher import JITCKPT, JITCKPT_RUN, Launcher

from jitckpt.events import Event, read_events

PLANTED = str(Path(__file__).parent / "planted.py")
RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
# What is planted: where it is named, and whose warning it is.
NAMED = {
    "closure": "scheduler 0.lr_lambdas.0.calls.0 (",
    "teacher": "the module Model (changes in the training, and jitckpt.init was not given it)",
}


def self_checks(launcher: Launcher) -> list[Event]:
    events, _ = read_events(launcher.directory / "ckpt")
    return [event for event in events if event["event"] == "self_check"]


@pytest.mark.parametrize(
    "plants", ["nothing", "attribute", "buffer", "replaced", "momentum", "moved", "moved in a range"]
)
def test_a_training_that_comes_back_is_not_spoken_of(plants: str, launcher: Launcher) -> None:
    result = launcher.run(*RUN, PLANTED, plants)
    assert result.status == 0, result.err
    checks = self_checks(launcher)
    # The device may be steps behind its host when it is asked for, and a copy that the next step would
    # change is taken of a later one.
    assert sorted((check["rank"], 2 if check["step"] < 6 else 6) for check in checks) == [
        (0, 2),
        (0, 6),
        (1, 2),
        (1, 6),
    ]
    for check in checks:
        assert (check["differences"], check["skipped"]) == ([], [])
        assert check["tensors"] >= 22
    assert "self-check" not in result.err + result.out
    assert "would not bring" not in result.err
    assert "taken for replicas" not in result.err


@pytest.mark.parametrize("plants", NAMED)
def test_what_does_not_come_back_is_named_once(plants: str, launcher: Launcher) -> None:
    result = launcher.run(*RUN, PLANTED, plants)
    assert result.status == 0, result.err
    for rank in (0, 1):
        said = [line for line in result.err.splitlines() if line.startswith(f"jitckpt: rank {rank}: ")]
        assert len(said) == 1, said
        assert NAMED[plants] in said[0]
        assert "would not bring this training back" in said[0]


def test_replicas_that_differ_are_named_once(launcher: Launcher) -> None:
    result = launcher.run(*RUN, PLANTED, "replicas")
    assert result.status == 0, result.err
    (said,) = (line for line in result.err.splitlines() if line.startswith("jitckpt: rank "))
    assert (
        "are taken for replicas, but after step 2 they hold different values of parameter last.weight" in said
    )


@pytest.mark.parametrize("plants", ["attribute", "replicas"])
def test_it_can_be_switched_off(plants: str, launcher: Launcher) -> None:
    result = launcher.run(*RUN, "--no-self-check", PLANTED, plants)
    assert result.status == 0, result.err
    assert self_checks(launcher) == []
    assert "jitckpt: rank" not in result.err


def test_doctor_reports_it(launcher: Launcher) -> None:
    result = launcher.run(*JITCKPT, "doctor", "--json", "--device", "softgpu", "--", PLANTED, "closure")
    rows = [row for row in json.loads(result.out)["rows"] if row["check"] == "self-check"]
    assert [row["state"] for row in rows] == ["problem"]
    assert rows[0]["found"].startswith(NAMED["closure"])


def test_verify_reports_it(launcher: Launcher) -> None:
    options = ["--json", "--device", "softgpu", "--trials", "1", "--seed", "3", "--kinds", "kill"]
    out = launcher.succeed(*JITCKPT, "verify", *options, "--", PLANTED, "count")
    document = json.loads(out)
    assert document["self_check"][0].startswith(NAMED["closure"])
    assert (document["not_checked"], document["passed"]) == ([], 1)
