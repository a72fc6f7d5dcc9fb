"""Jobs without replicas under `jitckpt run --memory-tier`: what is lost comes back from memory."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from final_lines import finals
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, Launcher, Result
from programs_of_tests import text_of

from jitckpt.wire import environment

TRAINING = str(Path(__file__).parent / "sharded_training.py")
RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
RUN += ["--checkpoint-dir", "ckpt"]
FORMS = ("full", "zero", "flat", "kinds", "coded_full")
WAITS = "--until-safe"  # in the middle of a minibatch, for the snapshot of the last one


@pytest.fixture(scope="module")
def undisturbed_of_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    out = launcher.succeed(*RUN, TRAINING, *FORMS, "--unprotected")
    return {form: finals(out, f"{form} rank ", 2) for form in FORMS}


@pytest.fixture
def undisturbed(undisturbed_of_all: dict[str, list[str]]) -> list[str]:
    return undisturbed_of_all["full"]


def events(launcher: Launcher, name: str) -> list[dict[str, object]]:
    lines = (launcher.directory / "ckpt" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


Asked = tuple[list[str], list[str]]  # options of the command, and of the script
BY_COMMAND: Asked = (["--memory-tier", "peer"], [])
BY_SCRIPT: Asked = ([], ["--memory", "peer"])


@pytest.mark.parametrize(
    ("form", "options", "of_script"), [*((form, *BY_COMMAND) for form in FORMS), ("full", *BY_SCRIPT)]
)
def test_a_killed_rank_comes_back_from_memory_and_no_file(
    launcher: Launcher,
    undisturbed_of_all: dict[str, list[str]],
    form: str,
    options: list[str],
    of_script: list[str],
) -> None:
    fault = "rank=1 step=5 phase=backward kind=kill"
    result = launcher.run(*RUN, *options, "--fault", fault, TRAINING, form, WAITS, *of_script)
    assert result.status == 0, result.err
    assert finals(result.out, f"{form} rank ", 2) == undisturbed_of_all[form]
    assert [event["step"] for event in events(launcher, "restored")] == [4, 4], "one minibatch was redone"
    assert all("own host's memory" in str(event["in_memory"]) for event in events(launcher, "restored"))
    assert "the state after step 4 is in memory" in result.err
    states = [(event["state"], event["ranks"]) for event in events(launcher, "memory_state")]
    assert (states[0], states[-1]) == (("healthy", [0, 1]), ("healthy", [0, 1]))
    assert ("unhealthy", [1]) in states
    assert list((launcher.directory / "ckpt").glob("step-*")) == [], "no save was written"
    assert launcher.survivors() == []


@pytest.mark.parametrize("state", ["--state-on-device", "--no-state-on-device"])
def test_in_transparent_mode_memory_has_what_its_devices_have_not(
    launcher: Launcher, undisturbed: list[str], state: str
) -> None:
    """A lost device comes back in the same processes; a killed rank from memory, and no file."""
    faults = ["rank=1 step=3 phase=optimizer kind=proxy-kill", "rank=1 step=5 phase=backward kind=kill"]
    options = ["--mode", "transparent", state, "--memory-tier", "peer"]
    options += [word for fault in faults for word in ("--fault", fault)]
    out = launcher.succeed(*RUN, *options, TRAINING, "full", WAITS)
    assert finals(out, "full rank ", 2) == undisturbed
    assert len(events(launcher, "recovered")) == 1, "in place"
    assert [event["step"] for event in events(launcher, "restored")] == [4, 4], "one minibatch was redone"
    assert all("own host's memory" in str(event["in_memory"]) for event in events(launcher, "restored"))
    assert list((launcher.directory / "ckpt").glob("step-*")) == [], "no save was written"
    assert launcher.survivors() == []


def test_what_two_replicas_had_cut_among_them_is_whole_again(launcher: Launcher) -> None:
    """Both are killed in one minibatch, so no replica is left to save."""
    expected = launcher.run(*RUN, TRAINING, "replicated", "--unprotected")
    faults = [f"rank={rank} step=5 phase=backward kind=kill" for rank in (0, 1)]
    options = ["--memory-tier", "sharded", "--fault", faults[0], "--fault", faults[1]]
    result = launcher.run(*RUN, *options, TRAINING, "replicated", WAITS)
    assert result.status == 0, result.err
    assert finals(result.out, "replicated rank ", 2) == finals(expected.out, "replicated rank ", 2)
    assert all("own host's memory" in str(event["in_memory"]) for event in events(launcher, "restored"))
    assert "the state of all 2 ranks, cut among 2 replicas, is kept in the memory of this host" in result.err
    assert launcher.survivors() == []


@pytest.mark.parametrize(("end", "status"), [("ends", 0), ("raises", 1)])
def test_a_thread_that_is_inside_of_torch_does_not_abort_the_process_at_its_end(
    launcher: Launcher, end: str, status: int
) -> None:
    options = ["--nproc-per-node", "1", "--memory-tier", "peer", "--max-restarts", "0"]
    script = str(Path(__file__).parent / "busy_at_the_end.py")
    result = launcher.run(*RUN, *options, script, "3", end, "full", "--steps", "3")
    assert result.status == status, result.err
    assert "SIGABRT" not in result.err
    assert "terminate called" not in result.err
    assert ("ValueError: of the script" in result.err) == (end == "raises")
    assert launcher.survivors() == []


def test_auto_protects_what_has_no_replica_and_nothing_else(launcher: Launcher) -> None:
    options = [*RUN, "--nproc-per-node", "4", "--memory-tier", "auto"]
    with_replicas = launcher.run(*options, TRAINING, "fsdp2")
    assert with_replicas.status == 0, with_replicas.err
    assert with_replicas.err.count("memory tier: nothing is kept in memory, since each rank's state") == 1
    assert events(launcher, "memory_safe") == []
    (launcher.directory / "ckpt").rename(launcher.directory / "with-replicas")
    assert launcher.run(*options, TRAINING, "zero").status == 0
    assert events(launcher, "memory_safe") != []


def test_the_command_goes_before_the_script(launcher: Launcher) -> None:
    result = launcher.run(*RUN, "--memory-tier", "off", TRAINING, "full", "--memory", "peer")
    assert result.status == 0, result.err
    assert "There is no memory tier, for which jitckpt.init(memory=...) asks" in result.err
    assert events(launcher, "memory_safe") == []


def test_a_job_that_makes_no_progress_ends_and_leaves_what_memory_has_in_files(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    command = [*RUN, "--max-restarts", "9", "--memory-tier", "peer", TRAINING, "full", WAITS]
    first = launcher.run(*command, "--dies-in", "5")
    assert first.status == 93, first.err
    assert "3 starts have come to step 5 and failed alike (rank 1 was killed by SIGKILL)" in first.err
    assert "the state after step 4, which was in memory alone, lies in" in first.err
    assert len(events(launcher, "restart")) == 2
    second = launcher.succeed(*command)
    assert finals(second, "full rank ", 2) == undisturbed
    restored = [(event["step"], event["in_memory"]) for event in events(launcher, "restored")]
    assert restored[-2:] == [(4, "")] * 2
    assert launcher.survivors() == []


def test_the_same_command_goes_on_when_the_agent_was_killed_with_its_ranks(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    command = [*RUN, "--memory-tier", "peer", "--memory-keep", "30", TRAINING, "full", "--pause", "0.5"]
    first = launcher.start(*command)
    file = launcher.directory / "ckpt" / "events.jsonl"
    launcher.wait_until(lambda: file.exists() and events(launcher, "memory_safe") != [])
    first.kill()
    keepers = []
    for pid in launcher.survivors():
        if b"tiers.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            keepers.append(pid)
        else:
            os.kill(pid, signal.SIGKILL)
    assert len(keepers) == 1
    first.communicate(timeout=LIMIT)
    launcher.wait_until(lambda: launcher.survivors() == keepers)
    inspected = launcher.run(*JITCKPT, "inspect", "--memory", "--verify", "--json")
    kept = [one for one in json.loads(inspected.out) if one["keeper"] == keepers[0]]
    assert {one["rank"] for one in kept} == {0, 1}
    assert all(one["problem"] == "" for one in kept)
    assert any(one["safe"] for one in kept)
    second: Result = launcher.run(*command)
    assert second.status == 0, second.err
    assert finals(second.out, "full rank ", 2) == undisturbed
    steps = {event["step"] for event in events(launcher, "restored")}
    assert len(steps) == 1
    assert steps <= {1, 2, 3}
    assert not list((launcher.directory / "ckpt").glob("step-*/rank-*"))
    assert launcher.survivors() == []


def test_memory_that_does_not_fit_is_refused_in_a_sentence(
    launcher: Launcher, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another number of ranks has left, or another layout or model, is never loaded in part."""
    training = [TRAINING, "full", "--pause", "0.5"]
    options = [*RUN, "--memory-tier", "peer", "--memory-keep", "120", "--max-restarts", "0"]
    first = launcher.start(*options, *training)
    file = launcher.directory / "ckpt" / "events.jsonl"
    launcher.wait_until(lambda: file.exists() and events(launcher, "memory_safe") != [])
    first.kill()
    for pid in launcher.survivors():
        if b"tiers.keeper" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=LIMIT)
    launcher.wait_until(lambda: len(launcher.survivors()) == 1)

    of_three = launcher.run(*options, "--nproc-per-node", "3", *training)
    assert of_three.status == 1
    told = (
        "This host's memory has steps of this job, but none that rank 1 of 3 can use: memory of this host is"
    )
    assert f"{told} of a job with 2 ranks; this one has 3." in of_three.err
    assert "Other ranks have found steps of this job" in of_three.err
    assert "start the job as it was, to go on from it" in of_three.err
    with monkeypatch.context() as context:
        context.setenv("WIDTH", "32")
        wider = launcher.run(*options, *training)
    assert wider.status == 1
    assert "memory of this host is of another model or optimizer (names, shapes, types or parts" in wider.err
    assert events(launcher, "restored") == []
    as_it_was = launcher.succeed(*options, *training)
    assert finals(as_it_was, "full rank ", 2) == undisturbed
    assert all(event["in_memory"] for event in events(launcher, "restored"))
    assert launcher.survivors() == []


def test_what_has_no_room_is_refused_before_the_first_step(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters tell how long Adam's averages will be, which its first step makes."""
    monkeypatch.setenv("WIDTH", "512")
    result = launcher.run(*RUN, "--memory-tier", "peer", "--memory-limit", "2", TRAINING, "full")
    assert result.status == 0, result.err
    assert re.search(r"two snapshots of this rank would take \d{7} bytes of host memory, and may", result.err)
    assert "which its parameters and optimizer tell before the first step" in result.err
    lines = (launcher.directory / "ckpt" / "events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    first = next(place for place, event in enumerate(told) if event["event"] == "first_step")
    refused = [place for place, event in enumerate(told) if "would take" in str(event.get("text"))]
    assert refused != []
    assert max(refused) < first
    assert events(launcher, "memory_safe") == []


UNSAVED = text_of("memory_tier_unsaved")


def test_nobody_waits_for_a_rank_whose_state_can_be_saved_no_more(launcher: Launcher) -> None:
    """Its optimizer keeps what no save holds, which is named; memory has the steps before."""
    result = launcher.run(*RUN, "--memory-tier", "peer", launcher.script(UNSAVED))
    assert result.status == 0, result.err
    assert "is a Codes, which has no __tensor_unflatten__" in result.err
    assert (
        "rank 1 saves its state no more, so no rank keeps newer steps: what memory has of step" in result.err
    )
    assert "was left out" not in result.err
    assert "late" not in result.out
    restored = events(launcher, "restored")
    assert len({event["step"] for event in restored}) == 1
    assert {event["step"] for event in restored} <= {6, 7, 8, 9}
    assert [bool(event["in_memory"]) for event in restored] == [True, True]


ALLOCATES = text_of("memory_tier_allocates")


def test_a_snapshot_allocates_nothing_on_the_device(launcher: Launcher) -> None:
    """A minibatch with one has as many allocations as one without, and leaves as much memory free."""
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "1", "--checkpoint-dir", "ckpt"]
    tier = ["--memory-tier", "peer=1", "--memory-every", "2"]
    out = launcher.succeed(*run, *tier, launcher.script(ALLOCATES))
    assert "changes True" in out
    assert events(launcher, "memory_safe") != []


# What the device does beside most of what is copied once its minibatches are known.
BESIDE = {"stages": "idle", "full": "computation", "plain": "computation"}


@pytest.mark.parametrize("form", BESIDE)
def test_snapshots_leave_the_device_where_it_is_idle_and_come_back_the_same(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A pipeline's stages wait for each other; other trainings are never idle, but compute."""
    monkeypatch.setenv("WIDTH", "256")
    steps = ["--steps", "300"]  # what minibatches are like is known after some tenths of a second
    expected = launcher.run(*RUN, TRAINING, form, "--unprotected", *steps)
    fault = "rank=1 step=290 phase=backward kind=kill"
    also_in_short = ["env", f"{environment.SNAPSHOT_SPANS.name}=1"]
    out = launcher.succeed(
        *also_in_short, *RUN, "--memory-tier", "peer", "--fault", fault, TRAINING, form, *steps
    )
    assert finals(out, f"{form} rank ", 2) == finals(expected.out, f"{form} rank ", 2)
    copied = [event for event in events(launcher, "memory_safe") if event["restart"] == 0][-1]
    where = copied["copied"]
    assert isinstance(where, dict)
    assert where[BESIDE[form]] > 0, where
    minibatch = copied["minibatch"]
    assert isinstance(minibatch, dict)
    assert {"at once", "in spans"} <= minibatch.keys()
    assert launcher.survivors() == []
