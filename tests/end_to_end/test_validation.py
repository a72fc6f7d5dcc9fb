"""Minibatches are run again to see what their devices' memory depends on, and nothing else comes of that."""

import re

import pytest
from launcher import JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of

from jitckpt.events import Event, read_events

RANKS = 2
# Trains three times, four steps each. The first time no step is validated; then all are; the third time a
# server is killed in each validation but the last, at one moment or another.
LEARNED = text_of("validation_learned")


def run(launcher: Launcher, script: str, *more: str) -> tuple[Result, list[Event]]:
    directory = launcher.directory / "checkpoints"
    options = ["--nproc-per-node", str(RANKS), "--device", "softgpu", "--mode", "transparent"]
    options += ["--warm-start", "--warm-spares", "0", "--validate-every", "1", *more]
    result = launcher.run(*JITCKPT_RUN, *options, "--checkpoint-dir", str(directory), launcher.script(script))
    assert result.status == 0, result.err
    return result, read_events(directory)[0]


def is_told(address: int, text: str) -> bool:
    """Whether that is in one of the ranges that are told by address."""
    ranges = [(int(begin, 16), int(size)) for begin, size in re.findall(r"(0x\w+) \((\d+) bytes\)", text)]
    return any(begin <= address < begin + size for begin, size in ranges)


def test_what_a_minibatch_needs_is_learned_and_a_failure_meanwhile_is_recovered_from(
    launcher: Launcher,
) -> None:
    result, events = run(launcher, LEARNED)
    ended = [event for event in events if event["event"] in ("restart", "recovery_given_up", "switched_off")]
    assert ended == [], result.err
    for rank in range(RANKS):
        for name in ("second", "third"):
            assert f"{name}, rank {rank}, equal: True" in result.out.splitlines(), result.out
        (found,) = re.findall(rf"^second, rank {rank}: (.*)$", result.out, re.MULTILINE)
        # In the first of them the gradients are new yet.
        validated = [event["text"] for event in events if event["event"] == "validated"][2 * RANKS :]
        of_rank = [event for event in events if event["event"] == "validated" and event["rank"] == rank]
        text = of_rank[2]["text"]
        for name in ("running_mean", "running_var", "num_batches_tracked", "_growth_tracker"):
            assert name in text, validated
        for address in found.split():
            assert is_told(int(address, 16), text), (address, text)
        # Torch's allocator takes no less than 2 MiB from the device, of which little is given out.
        assert all(0 < event["image_bytes"] < 2 * 1024**2 for event in of_rank), of_rank
        # These are set to zero before they are added to.
        assert ".gradient." not in text
        assert ".parameter." not in text
        assert ".state." not in text
    named = [event["event"] for event in events]
    # A server that dies early in a validation is replaced in what brings all back for that.
    assert [event["rank"] for event in events if event.get("how") == "was ended by Killed"][:1] == [1]
    assert named.count("proxy_connected") == RANKS


# The kernels of the second training read pinned memory that the program overwrites behind them.
HIDDEN = text_of("validation_hidden")


def test_input_behind_the_calls_switches_transparent_mode_off_and_the_training_goes_on(
    launcher: Launcher,
) -> None:
    result, events = run(launcher, HIDDEN)
    for rank in range(RANKS):
        assert f"rank {rank}, equal: True" in result.out.splitlines(), result.out
    named = [event["event"] for event in events]
    assert named.count("switched_off") == 1
    assert not {"restart", "recovery_given_up", "recovered", "validated"} & set(named)
    text = next(event["text"] for event in events if event["event"] == "switched_off")
    assert re.search(r"switched off: optimizer\.\d\.gradient\.0 and more is not the same when the mini", text)
    assert "something reads host memory behind the calls" in text
    assert "a failure would now end the job" in result.err


# As an operator whose usual algorithm does not give the same twice, and which has another one.
UNSTEADY = HIDDEN.replace(
    "model(on_device * 1.0)",
    "model(on_device * 1.0 if torch.get_deterministic_debug_mode() == 0 else pinned.clone().cuda())",
)


@pytest.mark.parametrize("way", ["as-it-is", "deterministic"])
def test_a_training_that_is_deterministic_by_other_algorithms_stays_protected(
    launcher: Launcher, way: str
) -> None:
    """If the user wants that they are used in the minibatches that are validated."""
    assert UNSTEADY != HIDDEN
    result, events = run(launcher, UNSTEADY, "--validate", way)
    for rank in range(RANKS):
        assert f"rank {rank}, equal: True" in result.out.splitlines(), result.out
    named = [event["event"] for event in events]
    assert not {"restart", "recovery_given_up"} & set(named), result.err
    if way == "deterministic":
        assert named.count("validated") >= RANKS, result.err
        assert "switched_off" not in named, result.err
    else:
        assert named.count("switched_off") == 1
        assert "(which --validate deterministic may help)" in result.err


# The next batch of indices is put on the device while this one is computed: the minibatch begins with one
# that is read and then freed, so that other tensors lie where it was.
PREFETCHED = text_of("validation_prefetched")
# As if it were tried what would happen without that batch, which breaks the device.
WITHOUT_WHAT_IT_NEEDS = """
import torch
from jitckpt.worker.in_place import keeper

original = keeper._Validation._put_back

def put_back(self, shadow):
    original(self, shadow if self._rounds else torch.zeros_like(shadow))

keeper._Validation._put_back = put_back
"""


def losses(result: Result) -> list[str]:
    return sorted(line for line in result.out.splitlines() if line.startswith("rank "))


def test_a_batch_that_was_put_on_the_device_before_is_not_overwritten(launcher: Launcher) -> None:
    result, events = run(launcher, PREFETCHED)
    named = [event["event"] for event in events]
    assert named.count("validated") >= RANKS
    assert not {"device_alarm", "recovered", "validation_left_out", "switched_off"} & {*named}, result.err
    assert len(losses(result)) == 5 * RANKS


def test_a_trial_that_breaks_the_device_is_mended_and_not_taken_for_the_programs_error(
    launcher: Launcher,
) -> None:
    expected = losses(run(launcher, PREFETCHED)[0])
    result, events = run(launcher, WITHOUT_WHAT_IT_NEEDS + PREFETCHED)
    named = [event["event"] for event in events]
    alarms = {event["text"] for event in events if event["event"] == "device_alarm"}
    assert any("a validation could not be made as it should" in text for text in alarms), alarms
    assert "validated" in named
    assert not {"restart", "recovery_given_up", "switched_off"} & {*named}, result.err
    assert losses(result) == expected


DIES_ONCE = """
import ctypes, os, signal
from pathlib import Path

def dies(step):
    died = Path("died")
    if step == 2 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os.kill(ctypes.CDLL(None).jitckpt_proxy_server(), signal.SIGKILL)
"""


def test_what_was_recovered_from_calls_that_can_not_be_repeated_is_not_gone_on_with(
    launcher: Launcher,
) -> None:
    """The failure comes before the first validation, which finds that the replay may have gone wrong."""
    script = DIES_ONCE + HIDDEN.replace("step in range(4):", "step in range(4):\n        dies(step)")
    directory = launcher.directory / "checkpoints"
    options = ["--nproc-per-node", str(RANKS), "--device", "softgpu", "--mode", "transparent"]
    options += ["--warm-start", "--warm-spares", "0", "--max-restarts", "2"]
    result = launcher.run(*JITCKPT_RUN, *options, "--checkpoint-dir", str(directory), launcher.script(script))
    assert result.status == 0, result.err
    named = [event["event"] for event in read_events(directory)[0]]
    assert named.count("recovered") == named.count("restart") == 1
    assert "the result may differ" in result.err
    for rank in range(RANKS):
        assert f"rank {rank}, equal: True" in result.out.splitlines(), result.out
