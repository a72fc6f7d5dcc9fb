"""Scripts that know nothing of jitckpt live on in the same processes, whatever befalls their devices."""

import os
from pathlib import Path

from launcher import JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of

from jitckpt.events import read_events
from jitckpt.rehearsal.runs import lasting_shared_memory
from jitckpt.reports.timeline import in_words
from jitckpt.reports.timeline_transparent import STEPS, transparent_recoveries

# Trains twice, once undisturbed; `place` says where in which step the server is killed: before the backward
# pass, before the optimizer's step, after it.
SCRIPT = text_of("transparent")
# What CUDA and torch say without jitckpt.
ERRORS = [
    "RuntimeError mat1 and mat2 shapes cannot be multiplied (3x5 and 4x1)",
    "OutOfMemoryError CUDA out of memory. Tried to allocate 4194304.00 GiB.",
    "[0, 1, 2, 3]",
    "AcceleratorError CUDA error: device-side assert triggered: aten_call",
    "AcceleratorError CUDA error: device-side assert triggered: aten_call",
]


def test_a_killed_server_is_only_a_pause_but_an_error_of_the_script_is_the_scripts(
    launcher: Launcher,
) -> None:
    command = [*JITCKPT_RUN, "--nproc-per-node", "1", "--device", "softgpu"]
    script = launcher.script(SCRIPT)
    command = ["env", "JITCKPT_PROXY_SPARE=1", *command]  # servers that wait, or load libraries still
    result = launcher.run(*command, "--mode", "transparent", "--warm-spares", "0", script)
    assert result.status == 0, result.err
    assert "equal: True 27" in result.out, result.out
    assert "servers: 5" in result.out, result.out
    assert result.err.count("was ended by Killed; the program waits") == 4
    assert "switched off" not in result.err
    said = result.out.splitlines()[2:]
    assert [line.startswith(start) for line, start in zip(said, ERRORS, strict=True)] == [True] * 5, said


EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_ddp.py"
TRAINING = [str(EXAMPLE), "--steps", "16", "--width", "16", "--layers", "1"]


def seen_and_ended_with(result: Result) -> list[str]:
    """Return all losses, and the digests of all that the ranks end with."""
    assert result.status == 0, result.err
    return sorted(line for line in result.out.splitlines() if line.startswith(("step ", "rank ")))


def test_every_kind_of_failure_is_only_a_pause_for_two_ranks(launcher: Launcher) -> None:
    # Two steps between them: a rank may be one ahead of another.
    faults = [
        "rank=1 step=2 phase=allreduce kind=collective-error",
        "rank=0 step=4 phase=backward kind=sticky call=2",
        "rank=1 step=6 phase=optimizer kind=sticky call=3",
        "rank=0 step=8 phase=forward kind=proxy-kill",
        "rank=0 step=10 phase=allreduce kind=driver-suspect",
        "rank=1 step=12 phase=optimizer kind=proxy-kill",
        "rank=0 step=14 phase=backward kind=network-cut",
    ]
    shared_memory = set(os.listdir("/dev/shm"))
    directory = launcher.directory / "checkpoints"
    ranks = [
        *JITCKPT_RUN,
        "--device",
        "softgpu",
        "--nproc-per-node",
        "2",
        "--warm-spares",
        "0",
        "--warm-start",
    ]
    transparent = ["--mode", "transparent", "--checkpoint-dir", str(directory), "--hang-timeout", "4"]
    result = launcher.run(
        *ranks, *transparent, *(word for fault in faults for word in ("--fault", fault)), *TRAINING
    )
    assert len(seen_and_ended_with(result)) == 16 + 2
    assert seen_and_ended_with(result) == seen_and_ended_with(launcher.run(*ranks, *TRAINING))
    assert lasting_shared_memory(shared_memory) == []
    assert list(launcher.directory.glob("jitckpt-*")) == []

    events = read_events(directory)[0]
    named = [event["event"] for event in events]
    assert {event["fault"] for event in events if event["event"] == "fault"} == set(faults)
    # A machine under load may be silent for longer than the hang timeout too.
    waits = [event for event in events if event["event"] == "device_alarm" and "no answer" in event["text"]]
    assert waits
    # Rank 1 waits for no result, so its host may be ahead: two failures may be recovered from at once.
    assert all("recovered" in named[place:] for place, name in enumerate(named) if name == "fault")
    assert named.count("proxy_connected") == 2  # the workers are the same
    assert not {"restart", "detected", "recovery_given_up"} & set(named)
    for recovery in transparent_recoveries(events):
        for one in recovery.ranks:
            assert [step.name for step in one.steps] == [*STEPS]
    for event in events:
        if event["event"] == "calls_made_again":
            parts = [event[name] for name in ("handles", "image", "communicators", "replay")]
            assert min(parts) >= 0, event
            assert min(event["handles"], event["communicators"]) > 0, event  # each is several calls
            assert sum(parts) <= event["seconds"], event
    said = in_words(events, str(directory))
    assert sum("in the same processes" in sentence for sentence in said) == named.count("recovered")


# Two stages, each with an optimizer of its own; the second leaves out a step, so the ranks number what they
# keep differently. In the second training servers are killed, and then rank 1 lets the other wait.
STAGES = text_of("transparent_stages")


def test_ranks_of_unequally_many_steps_live_on_and_one_that_is_only_late_is_waited_for(
    launcher: Launcher,
) -> None:
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += [
        "--warm-start",
        "--warm-spares",
        "0",
        "--hang-timeout",
        "2",
        "--checkpoint-dir",
        str(directory),
    ]
    result = launcher.run(*command, launcher.script(STAGES), str(directory))
    assert result.status == 0, result.err
    for line in ("rank 0, equal: True", "rank 1, equal: True", "recoveries meanwhile: 0"):
        assert line in result.out.splitlines(), result.out + result.err
    events = read_events(directory)[0]
    named = [event["event"] for event in events]
    assert [1] in [event["ranks"] for event in events if event["event"] == "straggler"]
    assert "hang_over" in named[named.index("straggler") :]
    assert "rank 1 has let others wait for" in result.err
    assert named.count("proxy_connected") == 2
    assert not {"restart", "recovery_given_up"} & set(named)
    kept = {(event["recovery"], event["rank"]): event["states"] for event in events if "states" in event}
    recoveries = {recovery for recovery, _ in kept}
    assert len(recoveries) >= 2
    # Rank 0 has numbered one more since the first training, and another one since step 2 of the second.
    assert any(min(kept[one, 0]) > max(kept[one, 1]) for one in recoveries)


# Rank 1 lets the other wait for their first collective. Both wait for their devices before their first steps:
# only until then is there no image. The second training is undisturbed.
BEGINNING = text_of("transparent_beginning")


def test_a_cut_network_in_the_first_step_is_a_pause_and_a_late_rank_before_it_is_waited_for(
    launcher: Launcher,
) -> None:
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--warm-start", "--warm-spares", "0", "--hang-timeout", "2"]
    command += ["--checkpoint-dir", str(directory)]
    command += ["--fault", "rank=1 step=1 phase=allreduce kind=network-cut"]
    out = launcher.succeed(*command, launcher.script(BEGINNING), str(directory))
    assert sorted(out.splitlines()) == ["rank 0, equal: True", "rank 1, equal: True"]
    events = read_events(directory)[0]
    named = [event["event"] for event in events]
    assert named.index("straggler") < named.index("recovery_begun")
    assert "recovered" in named[named.index("fault") :]
    assert min(event["state"] for event in events if event["event"] == "recovered") == 0
    assert named.count("proxy_connected") == 2
    assert not {"restart", "recovery_given_up"} & set(named)


# Rank 0 evaluates, and loses its server, when rank 1's script is at its end.
EVALUATION = text_of("transparent_evaluation")


def test_a_rank_at_its_end_takes_part_in_the_recovery_of_another(launcher: Launcher) -> None:
    command = ["--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--mode", "transparent"]
    script = launcher.script(EVALUATION)
    result = launcher.run(*JITCKPT_RUN, *command, "--checkpoint-dir", "ckpt", script)
    assert (result.status, result.out) == (0, "equal: True\n"), result.err
    named = [event["event"] for event in read_events(launcher.directory / "ckpt")[0]]
    assert named.count("recovered") == 1
    assert named.count("at_end") == 2
    assert named.index("at_end") < named.index("recovered")


# Rank 1's server is killed; at the end it stops its server and kills itself, if it is told to.
SERVERS = text_of("transparent_servers")


def test_servers_are_the_agents_children_and_a_program_that_waits_for_all_its_own_waits_for_none(
    launcher: Launcher,
) -> None:
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--checkpoint-dir", str(directory)]
    out = launcher.succeed(*command, launcher.script(SERVERS))
    told = sorted(line for line in out.splitlines() if line.startswith("rank "))
    assert told == [f"rank {rank}: [\"agent's\", 'no children', True, True]" for rank in (0, 1)]
    events = read_events(directory)[0]
    assert "recovered" in [event["event"] for event in events]
    started = [(event["rank"], event["pid"]) for event in events if event["event"] == "server_started"]
    ended = {
        event["pid"]: (event["rank"], event["how"]) for event in events if event["event"] == "server_ended"
    }
    assert {rank for rank, _ in started} == {0, 1}
    assert (1, "was ended by Killed") in ended.values()
    assert launcher.survivors() == []


def test_a_server_that_is_stuck_when_its_worker_is_killed_is_ended(launcher: Launcher) -> None:
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--max-restarts", "0", "--checkpoint-dir", str(launcher.directory / "checkpoints")]
    result = launcher.run(*command, launcher.script(SERVERS), "die")
    assert result.status != 0
    assert launcher.survivors() == []
