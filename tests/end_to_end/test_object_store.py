"""A job whose files are lost goes on from the object store, though that fails now and then."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from final_lines import finals
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from object_store import Door, Request, object_store

TRAINING = str(Path(__file__).parent / "sharded_training.py")
RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
PLACE = "s3://saves/jobs/one"
SAVED = ["--checkpoint-dir", "ckpt", "--max-restarts", "0", "--objects", PLACE]
KILL = ["--fault", "rank=1 step=6 phase=backward kind=kill"]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    with object_store() as door:
        for name, value in {
            "AWS_ENDPOINT_URL": door.endpoint,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield door


def events(launcher: Launcher, kind: str) -> list[dict[str, object]]:
    lines = (launcher.directory / "ckpt" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_files_that_are_lost_come_back(launcher: Launcher, door: Door) -> None:
    undisturbed = launcher.succeed(*RUN, "--max-restarts", "0", TRAINING, "replicated", "--unprotected")

    chance, lock = random.Random(0), threading.Lock()

    def fault(request: Request) -> str:
        with lock:
            return chance.choice(["500", "cut request", *[""] * 8])

    door.fault = fault
    died = launcher.run(*RUN, *SAVED, *KILL, TRAINING, "replicated")
    assert died.status == 1
    assert {"500", "cut request"} & set(door.done)
    (saved,) = (event["step"] for event in events(launcher, "saved"))
    assert saved in (4, 5)  # rank 0 may have been a step behind
    # Of what a rank alone knows later steps may be there, until it is known that nobody needs them.
    copied = [event for event in events(launcher, "copied_to_objects") if event["kind"] == "rank"]
    assert {event["step"] for event in copied} == {saved}
    door.fault = lambda request: ""
    inspected = launcher.run(*JITCKPT, "inspect", "--verify", PLACE)
    assert inspected.status == 0, inspected.out + inspected.err
    assert f"would go on from step {saved}" in inspected.out

    shutil.rmtree(launcher.directory / "ckpt")
    result = launcher.run(*RUN, *SAVED, TRAINING, "replicated")
    assert result.status == 0, result.err
    assert f"step {saved} has come from {PLACE}" in result.err
    assert "own state" not in result.err, "no rank lost what it alone knew"
    assert finals(result.out, "replicated rank ") == finals(undisturbed, "replicated rank ")


def test_saves_go_from_host_memory_to_the_store_without_a_disk(launcher: Launcher, door: Door) -> None:
    """They are written from the memory tier's copy into a file system in memory, and come back from there."""
    undisturbed = launcher.succeed(*RUN, "--max-restarts", "0", TRAINING, "full", "--unprotected")
    with TemporaryDirectory(dir="/dev/shm") as folder:
        place = Path(folder) / "ckpt"
        saved = ["--checkpoint-dir", str(place), "--max-restarts", "0", "--objects", PLACE]
        saves = [TRAINING, "full", "--save-every", "4"]
        launcher.succeed(*RUN, *saved, "--memory-tier", "peer", *saves, "--steps", "5")
        lines = (place / "events.jsonl").read_text().splitlines()
        told = [event for event in map(json.loads, lines) if event["event"] == "copied_to_objects"]
        assert {(event["step"], event["rank"]) for event in told} == {(4, 0), (4, 1)}
        shutil.rmtree(place)  # with the host
        result = launcher.run(*RUN, *saved, *saves)
    assert result.status == 0, result.err
    assert f"step 4 has come from {PLACE}" in result.err
    assert sorted(result.out.split()) == sorted(undisturbed.split())


def test_another_number_of_ranks_goes_on_from_the_store(launcher: Launcher, door: Door) -> None:
    """Each rank cuts its shard anew out of all that the store has."""
    four = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "4", "--warm-spares", "0"]
    launcher.succeed(*four, *SAVED, TRAINING, "full", "--save-every", "2", "--steps", "5")
    shutil.rmtree(launcher.directory / "ckpt")
    result = launcher.run(*RUN, *SAVED, "--reshard", TRAINING, "full", "--save-every", "2", "--steps", "7")
    assert result.status == 0, result.err
    assert f"step 4 has come from {PLACE}" in result.err
    assert [event["step"] for event in events(launcher, "restored")] == [4, 4]


def test_a_store_that_is_away_holds_up_no_training(launcher: Launcher, door: Door) -> None:
    first = launcher.succeed(*RUN, *SAVED, TRAINING, "replicated", "--save-every", "4")
    door.fault = lambda request: "500"
    shutil.rmtree(launcher.directory / "ckpt")
    refused = launcher.run(*RUN, *SAVED, TRAINING, "replicated")
    assert refused.status == 2, "it does not begin anew beside what it can't see"
    assert PLACE in refused.err

    door.fault = lambda request: "500" if request.method == "PUT" else ""
    shutil.rmtree(launcher.directory / "ckpt", ignore_errors=True)
    elsewhere = [*SAVED[:-1], "s3://saves/jobs/two", "--objects-deadline", "3"]
    result = launcher.run(*RUN, *elsewhere, TRAINING, "replicated", "--save-every", "4")
    assert result.status == 0, result.err
    assert "not all that is saved is in s3://saves/jobs/two yet" in result.err
    assert finals(result.out, "replicated rank ") == finals(first, "replicated rank ")
