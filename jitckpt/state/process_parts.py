"""What libraries keep in a process beside all that a training gives: named parts of the rank's own state."""

from collections.abc import Mapping
from typing import Any

from jitckpt._seen import Seen
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state import sent_numbers, trackers
from jitckpt.state.gradient_buckets import GradientBuckets
from jitckpt.state.sent_numbers import SentNumbers


class ProcessParts:
    """Megatron-core's random numbers, whether DTensor has sent its own, DistributedDataParallel's buckets."""

    def __init__(self) -> None:
        self._sent = SentNumbers()
        self.gradient_buckets = GradientBuckets()

    def capture(self) -> dict[str, Encoded]:
        """Return the parts that there are."""
        return {**self.gradient_buckets.capture(), **self._sent.capture(), **trackers.capture()}

    def look(self) -> Seen | None:
        """Return what tells that `capture` would return the same; None if nothing can."""
        can_tell = self.gradient_buckets.are_final and not trackers.are_there()
        return self._sent.look() if can_tell else None

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Put back what `capture` returned, decoded, but for the buckets: they are for a first pass alone."""
        trackers.restore(parts.get(trackers.PART))
        sent_numbers.restore(parts.get(sent_numbers.PART))
