"""Whether DTensor has sent rank 0's random numbers of the device to all ranks, as it does once in a process.

Its first operation that draws some does it (OffsetBasedRNGTracker of torch 2.11), in the middle of the
training if its parameters were not made by one. In a start that goes on from a save it would be done once
more, elsewhere in the sequence: ranks that have drawn differently since would go on with rank 0's numbers.
"""

import sys

from torch import distributed

from jitckpt._seen import Seen
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded

PART = "sent_numbers"
_MODULE, _TRACKER = "torch.distributed.tensor._random", "_rng_tracker"


class SentNumbers:
    """Of this process."""

    def __init__(self) -> None:
        self._told: Seen | None = None

    def capture(self) -> dict[str, Encoded]:
        """Return that it has been done as a named part, or no part."""
        return {PART: tree_codec.encode(True, PART)} if _is_done() else {}

    def look(self) -> Seen:
        """Return what tells whether it is as it is now."""
        if self._told is None or not self._told.is_same():
            self._told = told = Seen()
            told.entry(sys.modules, _MODULE)
            if (module := sys.modules.get(_MODULE)) is not None:
                told.attribute(module, _TRACKER)
        return self._told


def restore(saved: bool | None) -> None:
    """Have it not done again, if it was where `saved`, of what `capture` returned, comes from."""
    if not saved or _is_done():
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _random

    # Any mesh of this device: it is asked for nothing else. It makes no group.
    mesh = DeviceMesh("cuda", range(distributed.get_world_size()), _init_backend=False)
    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def _is_done() -> bool:
    return getattr(sys.modules.get(_MODULE), _TRACKER, None) is not None
