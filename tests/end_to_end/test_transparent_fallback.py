"""Transparent mode and jitckpt.init together: what it can't bring back goes on from a save."""

import re
from pathlib import Path

from gpt import RUN, TRAINING, digests
from launcher import Launcher
from programs_of_tests import text_of

from jitckpt.events import Event, read_events


def transparent(directory: Path, *faults: str) -> list[str]:
    options = ["--mode", "transparent", "--checkpoint-dir", str(directory)]
    return [*RUN, *options, *(word for fault in faults for word in ("--fault", fault))]


def named(events: list[Event], *names: str) -> list[str]:
    return [event["event"] for event in events if event["event"] in names]


def test_a_failed_collective_is_a_pause_and_a_killed_worker_a_restart(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    directory = launcher.directory / "ckpt"
    faults = ["rank=1 step=3 phase=allreduce kind=collective-error", "rank=0 step=8 phase=backward kind=kill"]
    result = launcher.run(*transparent(directory, *faults), *TRAINING)
    assert result.status == 0, result.err
    assert digests(result.out) == undisturbed
    events = read_events(directory)[0]
    told = named(events, "proxy_connected", "recovered", "recovery_given_up", "saved", "restart", "restored")
    two = ["proxy_connected"] * 2
    assert told == [*two, "recovered", "recovery_given_up", "saved", "restart", *two, "restored", "restored"]
    by_name = {event["event"]: event for event in events}
    assert by_name["restored"]["step"] == by_name["saved"]["step"]
    assert f"Restart 1 went on from step {by_name['saved']['step']}" in result.err


# A copy to the device of 2 MB travels through the log, which has no room for it. `save_every` as given. The
# save of step 4 is written by the time of the failure.
UNKEPT = text_of("transparent_fallback_unkept")


def test_what_is_given_up_goes_on_from_the_periodic_save(launcher: Launcher) -> None:
    script = launcher.script(UNKEPT)
    undisturbed = launcher.succeed(*RUN, script, "2")
    directory = launcher.directory / "ckpt"
    directory.rename(launcher.directory / "other")
    faults = [f"rank={rank} step=6 phase=backward kind=proxy-kill" for rank in (0, 1)]
    log = ["env", "JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=1048576"]
    result = launcher.run(*log, *transparent(directory, *faults), script, "2")
    assert result.status == 0, result.err
    assert sorted(result.out.splitlines()) == sorted(undisturbed.splitlines())
    assert "are more than the device proxy's log holds" in result.err
    events = read_events(directory)[0]
    # Before the fifth step it would have been seen whether the minibatch can be made again: it can't.
    told = named(events, "validation_left_out", "recovered", "recovery_given_up", "not_saved", "restored")
    assert told == ["validation_left_out", "recovery_given_up", "not_saved", "restored", "restored"]
    assert next(event["step"] for event in events if event["event"] == "restored") == 4
    # A rank that is late has not outgrown its log yet, and its image is of no use without the other's.
    why = (
        "than the log holds, as a long evaluation does; raise JITCKPT_PROXY_LOG_BYTES to have them protected"
    )
    late = "it has none yet, or the log was full; more memory for the log would have protected the job"
    (given_up,) = (event["text"] for event in events if event["event"] == "recovery_given_up")
    assert given_up.removesuffix(". The job restarts from the best save.").endswith((why, late)), given_up
    assert re.search(r"Restart 1 went on from step 4, with at most 2 minibatches done again", result.err)
