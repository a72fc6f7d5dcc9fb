"""Which host that stands by takes a host's ranks: one after the other is asked, while they may be held."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby

TRIES = 2  # hosts that stand by, of which each has got the images
LOOK_SECONDS = 0.5  # between two looks who stands by

Answer = TypeVar("Answer")


class NotNowError(LinkError):
    """That host can't be reached, or takes another one's ranks just now: it may be asked again."""


async def first_that_takes(
    standbys: Callable[[], list[Standby]],
    ask: Callable[[Standby], Awaitable[Answer]],
    say: Callable[[str], None],
    *,
    wait: float,
    is_over: Callable[[], bool],
) -> Answer:
    """Return the first answer. ask: raises NotNowError, or LinkError or OSError where that host can't.

    wait: seconds in which one may come, or have room again. is_over: nobody is waited for any more. Raises
    what the last of TRIES hosts has raised, or why there is none.
    """
    failed: list[Standby] = []
    failure: LinkError | OSError | None = None
    until, told = time.monotonic() + wait, False
    while True:
        reasons = []
        found = [one for one in await asyncio.to_thread(standbys) if one not in failed]
        for standby in found:
            try:
                return await ask(standby)
            except NotNowError as error:
                reasons.append(f"{standby.address}: {error}")
            except (LinkError, OSError) as error:
                failure = error
                failed.append(standby)
                if len(failed) == TRIES:
                    raise
                if standby is not found[-1]:
                    say(f"{standby.address} could not take this host's ranks, so another is asked: {error}")
        left = until - time.monotonic()
        why = "; ".join(reasons) or "none stands by"
        if left <= 0 or is_over():
            raise failure or LinkError(f"No host that stands by can be reached, or has room ({why}).")
        if not told:
            told = True
            why = why if failure is None else f"{why}; {failure}"
            say(f"no host that stands by can take this host's ranks now, so they are held: {why}")
        await asyncio.sleep(min(LOOK_SECONDS, left))
