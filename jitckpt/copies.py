"""Copies of the ranks' local states on another host, so that the loss of a host loses nothing.

A ring (local_state.py) is copied piece by piece, each to the place where it lies in the original; so the
copy is a ring like any other, whole up to the last piece that came. A thread looks for what is new.
"""

import os
import threading
from collections.abc import Callable, Mapping

from jitckpt import local_state
from jitckpt.errors import SaveError
from jitckpt.link import Header

LOOK_SECONDS = 0.01  # shorter than what is left of a minibatch after its forward pass
MOST_WAITING = 64 << 20  # bytes that are not sent yet; more than that and the network can't follow
MOST_BYTES = 1 << 40  # of a ring, which takes no more memory than is written


class Copier(threading.Thread):
    """Sends what is new in the rings of this host's ranks, until it is told to stop."""

    def __init__(
        self, rings: Mapping[int, int], send: Callable[[Header, bytes], None], waiting: Callable[[], int]
    ) -> None:
        """rings: memory files by rank. send: to the host that keeps copies. waiting: bytes not sent yet."""
        super().__init__(name="jitckpt-copies", daemon=True)
        self._rings = {rank: local_state.Tail(descriptor) for rank, descriptor in rings.items()}
        self._send, self._waiting = send, waiting
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            if self._waiting() < MOST_WAITING:
                self.look()

    def look(self) -> None:
        """Send what has come since the last time."""
        for rank, tail in self._rings.items():
            try:
                news = tail.news()
            except SaveError:  # it is just being laid out; if it is damaged, that is said when it matters
                continue
            for place, data in news:
                self._send({"ring": rank, "size": tail.size, "at": place}, data)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self.is_alive():
            self.join()


class Copies:
    """The copies that this host keeps, as memory files by rank."""

    def __init__(self) -> None:
        self.rings: dict[int, int] = {}

    def write(self, rank: int, size: int, place: int, data: bytes) -> None:
        """Put a piece where it belongs. Raises ValueError where that is nowhere."""
        if not 0 <= place <= size - len(data) <= MOST_BYTES:
            raise ValueError(f"{len(data)} bytes at {place} are no part of a ring of {size}")
        if rank not in self.rings:
            self.rings[rank] = local_state.create()
        if place == 0:  # a training begins, and what is left of one before it means nothing
            os.ftruncate(self.rings[rank], 0)
            os.ftruncate(self.rings[rank], size)
        os.pwrite(self.rings[rank], data, place)

    def close(self) -> None:
        """Forget them all."""
        while self.rings:
            os.close(self.rings.popitem()[1])
