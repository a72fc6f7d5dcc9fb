"""Copies of the ranks' local states on another host, so that the loss of a host loses nothing.

A ring (format.py) is copied piece by piece, each to the place where it lies in the original; so the
copy is a ring like any other, whole up to the last piece that came. A thread looks for what is new. A rank
asks, and waits, for the copy of what it knows of a minibatch before it takes part in a collective without
which no other rank gets to the end of the minibatch, and saves a step of which only this host had the state.
"""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from jitckpt.errors import SaveError
from jitckpt.ring import local_state
from jitckpt.ring.tail import Tail
from jitckpt.wire.agents import RingPart

LOOK_SECONDS = 0.01  # shorter than what is left of a minibatch after its forward pass
ANSWER_SECONDS = 5.0  # that a rank waits for a copy which has not come for long
# Between two looks whether the device has come there: seconds, and a part of the time that it has taken.
DEVICE_SECONDS, DEVICE_PART = 0.0005, 0.05
QUESTION_BYTES = 8
MOST_WAITING = 64 << 20  # bytes that are not sent yet; more than that and the network can't follow
MOST_BYTES = 1 << 40  # of a ring, which takes no more memory than is written


class Copier(threading.Thread):
    """Sends what is new in the rings of this host's ranks, until it is told to stop."""

    def __init__(
        self,
        rings: Mapping[int, int],
        send: Callable[[RingPart, bytes], None],
        waiting: Callable[[], int],
        confirm: Callable[[Callable[[], None]], None] = lambda received: None,
        askers: Sequence[socket.socket] = (),
    ) -> None:
        """rings: memory files by rank. send: to the host that keeps copies. waiting: bytes not sent yet.

        confirm: has a function called once that host has all that was sent. askers: by which the ranks ask
        for copies.
        """
        super().__init__(name="jitckpt-copies", daemon=True)
        self._rings = {rank: Tail(descriptor) for rank, descriptor in rings.items()}
        self._send, self._waiting, self._confirm = send, waiting, confirm
        self._askers = selectors.DefaultSelector()
        for asker in askers:
            self._askers.register(asker, selectors.EVENT_READ)
        self._replaced: deque[tuple[socket.socket, socket.socket]] = deque()
        self._stopping = threading.Event()
        self._looking = threading.Lock()

    def replace(self, before: socket.socket, now: socket.socket) -> None:
        """A rank asks over another socket. The old one is closed once it is not listened to any more."""
        self._replaced.append((before, now))

    def run(self) -> None:
        while not self._stopping.is_set():
            self._replace()
            asked = self._asked()
            if asked or self._waiting() < MOST_WAITING:
                self.look()
            for asker, question in asked:
                self._confirm(partial(_answer, asker, question))

    def _asked(self) -> list[tuple[socket.socket, bytes]]:
        """Return who has asked, and what, in the next moment."""
        if not self._askers.get_map():
            self._stopping.wait(LOOK_SECONDS)
        asked = []
        for key, _ in self._askers.select(LOOK_SECONDS):
            asker = cast(socket.socket, key.fileobj)
            try:
                question = asker.recv(QUESTION_BYTES)
            except ConnectionError:
                question = b""
            if question:
                asked.append((asker, question))
            else:
                self._askers.unregister(asker)  # its rank has ended
        return asked

    def _replace(self) -> None:
        while self._replaced:
            before, now = self._replaced.popleft()
            with suppress(KeyError):  # its other end has been closed
                self._askers.unregister(before)
            before.close()
            self._askers.register(now, selectors.EVENT_READ)

    def look(self) -> None:
        """Send what has come since the last time. Any thread may call it."""
        with self._looking:
            for rank, tail in self._rings.items():
                try:
                    news = tail.news()
                except SaveError:  # it is just being laid out; if it is damaged, that is said when it matters
                    continue
                for place, data in news:
                    self._send(RingPart(rank, tail.size, place), data)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self.is_alive():
            self.join()
        self._askers.close()


def _answer(asker: socket.socket, question: bytes) -> None:
    with suppress(OSError):  # its rank has ended
        asker.send(question)


class Asker:
    """The rank's side: waits until its state is on another host, too.

    patience: seconds. If an agent on the way stands still, it is given up before that, and the ranks go on
    from the step before, of which there is a copy: had this one gone on, what it alone knows would be lost.
    Who stands still for less holds the step up for as long.
    """

    def __init__(
        self,
        descriptor: int,
        warn: Callable[[str], None],
        patience: float = ANSWER_SECONDS,
        hold: Callable[[float], None] = time.sleep,
    ) -> None:
        """hold: has the training's thread wait for so many seconds where a save can hold it."""
        os.set_inheritable(descriptor, False)  # not for programs that the training starts
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(patience)
        self._warn, self._patience, self._hold = warn, patience, hold
        self._is_open, self._has_warned = True, False
        self._question = 0

    def wait(self, step: int, is_written: Callable[[], bool] = lambda: True) -> None:
        """Wait for the copy of the state that was last written for this step, but not for ever.

        is_written: whether the device has written its part, which takes as long as it takes.
        """
        begun = time.monotonic()
        while self._is_open and not is_written():
            time.sleep(max(DEVICE_SECONDS, DEVICE_PART * (time.monotonic() - begun)))
        if not self._is_open:
            return
        self._question += 1
        wanted = self._question.to_bytes(QUESTION_BYTES, "little")
        try:
            self._socket.send(wanted)
            # An older answer is to what was not waited for.
            while (answer := self._socket.recv(QUESTION_BYTES)) != wanted:
                if not answer:
                    raise ConnectionResetError
            self._socket.settimeout(self._patience)
        except TimeoutError:
            self._socket.settimeout(min(self._patience, ANSWER_SECONDS))
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"In {self._patience:g} s no other host confirmed its copy of what this rank alone knows "
                    f"of step {step}; the training goes on. If this host is lost now, that may be lost, too."
                )
        except OSError:
            # The agent has ended, and soon will this rank. Until then it may not help another one to the end
            # of a step of which what this one alone knows is on no other host.
            self._is_open = False
            self._hold(self._patience)


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
