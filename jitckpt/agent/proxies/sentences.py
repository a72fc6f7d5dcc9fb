"""What the user is told of a job's transparent recoveries."""

from collections.abc import Mapping
from typing import cast

from jitckpt.decisions.hang import named


class Sentences:
    """Of one start."""

    def __init__(self) -> None:
        self._alarm = ""  # the newest
        self._left_out = False  # whether it was said that a validation was

    def of(self, event: str, details: Mapping[str, object]) -> str:
        """Return what an event is in words; "" if nothing is said of it."""
        match event:
            case "device_alarm":
                self._alarm = f"{details['text']} (rank {details['rank']})"
            case "recovered":
                return (
                    f"{self._alarm}: all ranks went back to the state after step {details['state']} and have "
                    f"made their calls since then again, in {details['seconds']:.2f} s."
                )
            case "recovery_given_up" | "switched_off":
                return str(details["text"])
            case "validation_left_out" if not self._left_out:
                self._left_out = True
                return (
                    f"a minibatch could not be validated: {details['text']}. That is tried again in later "
                    "ones. Until one is valid, all memory is copied to the host with each step, and nobody "
                    "has seen whether a recovery leads to the same result."
                )
            case "state_in_images":
                return (
                    "parameters and optimizer state are copied to the host with each step, as they can't "
                    f"stay on the devices: {details['text']}."
                )
            case "straggler":
                late = cast(list[int], details["ranks"])
                return (
                    f"{named(late)} {'has' if len(late) == 1 else 'have'} let others wait for "
                    f"{details['seconds']:.0f} s. No device has failed: a program does something else. "
                    "The others go on once it does."
                )
        return ""
