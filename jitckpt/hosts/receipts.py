"""Whether another host has what was sent to it: it is asked for a receipt, and says which one it answers."""

import itertools
from collections import defaultdict
from collections.abc import Callable


class Receipts:
    """Of one host's connections, for their thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: defaultdict[int, dict[int, Callable[[], None]]] = defaultdict(dict)  # by host

    def number(self, host: int, received: Callable[[], None]) -> int:
        """Return the number of a receipt that the host is asked for; `received` is called once."""
        number = next(self._numbers)
        self._open[host][number] = received
        return number

    def hear(self, host: int, number: int) -> None:
        """The host answers."""
        if (received := self._open[host].pop(number, None)) is not None:
            received()

    def end(self, host: int) -> None:
        """It answers no more: nobody waits for that."""
        for received in self._open.pop(host, {}).values():
            received()
