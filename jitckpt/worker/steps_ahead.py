"""How many steps the host may be ahead of the device, and for how many its state is kept."""

from jitckpt.ring import format as ring_format
from jitckpt.wire import environment

MAX_AHEAD = (32, 8)  # steps that the host may be ahead of the device: the most for which memory is there
KEPT_BESIDE = 4  # steps: replicas may be a step apart, and the host has begun one more
ROOM_TO_GROW = 4  # times what the rank-local state takes as the job begins


def max_ahead(local_bytes: int, limit: int) -> int:
    """Return how many steps the host may be ahead: what this rank alone knows is kept for each of them."""
    if environment.FAULTS.get():
        return MAX_AHEAD[-1]  # the steps of rehearsed failures are the host's: it stays near to its device
    return next(
        (
            steps
            for steps in MAX_AHEAD
            if ring_format.area_bytes(limit, steps + KEPT_BESIDE)
            >= ROOM_TO_GROW * max(local_bytes, ring_format.PAGE)
        ),
        MAX_AHEAD[-1],
    )
