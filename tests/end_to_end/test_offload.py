"""Copies fill pinned memory that later copies read, ordered by streams alone: the result is the same."""

from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.events import read_events

# Activations go to pinned memory and come back; a swap of two tensors goes through one piece of it.
OFFLOAD = text_of("offload_offload")


def test_copies_of_pinned_memory_are_the_same_in_transparent_mode(launcher: Launcher) -> None:
    script = launcher.script(OFFLOAD)
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
    directory = launcher.directory / "checkpoints"
    faults = [
        "rank=0 step=3 phase=backward kind=sticky",
        "rank=1 step=7 phase=backward kind=collective-error",
        "rank=0 step=9 phase=backward kind=proxy-kill",
    ]
    transparent = [*run, "--mode", "transparent", "--checkpoint-dir", str(directory)]
    direct = launcher.run(*run, script)
    calm = launcher.run(*transparent, script)
    disturbed = launcher.run(*transparent, *(word for fault in faults for word in ("--fault", fault)), script)
    for result in (direct, calm, disturbed):
        assert result.status == 0, result.err
        lines = sorted(line for line in result.out.splitlines() if line.startswith("rank "))
        assert len(lines) == 2 * 13
        assert lines == sorted(line for line in direct.out.splitlines() if line.startswith("rank "))
    events = read_events(directory)[0]
    assert {event["fault"] for event in events if event["event"] == "fault"} == set(faults)
    assert not any(event["event"] in ("restart", "switched_off", "recovery_given_up") for event in events)
