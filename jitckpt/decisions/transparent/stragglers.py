"""Whether a job hangs, or waits for a rank that is only late."""

from collections.abc import Mapping

from jitckpt.decisions.transparent.cuts import progress, unknown_to
from jitckpt.wire.communicators import FOREVER
from jitckpt.wire.proxy_messages import Standing


def late(standings: Mapping[int, Standing]) -> frozenset[int]:
    """Return the ranks that others wait for and that don't wait for their devices: their hosts are busy.

    standings: of all ranks that can make calls. If one of them has waited for too long and none is late, the
    job hangs: whoever has not made a call that others have made waits for its own device, and for too long.
    """
    places = {rank: standing.communicators for rank, standing in standings.items()}
    behind: set[int] = set().union(*unknown_to(places).values())
    for numbers in progress(places, dict.fromkeys(places, FOREVER)).values():
        behind |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
    return frozenset(rank for rank in behind if not standings[rank].too_long)
