"""The first host's agent looks who waits to be taken in, and says when (decisions/elastic.py)."""

import threading
import time
from collections.abc import Callable, Collection, Sequence

from jitckpt.console import say
from jitckpt.decisions.elastic import StartBegun, next_look

LOOK_SECONDS = 2.0


class TakingIn(threading.Thread):
    """Looks for one start of the ranks, until hosts are to be taken in."""

    def __init__(
        self,
        waiting: Callable[[], Collection[str]],
        starts: Sequence[StartBegun],
        *,
        hosts: int,
        wait: float,
        hindrance: Callable[[], str | None],
        take_in: Callable[[str], None],
    ) -> None:
        """waiting: who waits now. hosts: how many there are when none is missing.

        hindrance: why a save now might fail, as a clause; "" if that ends by itself, None if nothing does.
        take_in: what is done, with who waits, as a clause.
        """
        super().__init__(name="jitckpt-taking-in", daemon=True)
        self._waiting, self._starts, self._hosts, self._wait = waiting, tuple(starts), hosts, wait
        self._hindrance, self._take_in = hindrance, take_in
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Look no more. A look that is under way ends by itself."""
        self._stopped.set()

    def run(self) -> None:
        since: dict[str, float] = {}
        said = ""
        while not self._stopped.wait(LOOK_SECONDS):
            now = time.monotonic()
            since = {name: since.get(name, now) for name in self._waiting()}
            at = next_look(self._starts, self._hosts, since, self._wait)
            if at is None or at > now:
                continue
            count = min(len(since), self._hosts - self._starts[-1].hosts)
            who = (
                f"{count} host{'s' if count > 1 else ''} beyond {self._starts[-1].hosts} "
                f"{'wait' if count > 1 else 'waits'} to be taken in"
            )
            if (hindrance := self._hindrance()) is None:
                self._take_in(who)
                return
            if hindrance and hindrance != said:
                said = hindrance
                say(f"{who}, but {hindrance}.")
