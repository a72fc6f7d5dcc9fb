"""A rank that has lost its state gets the copy that a replica on another host has made in that host's memory.

The agent of the host that lacks it fetches it into memory of its own, which the rank's device server reads as
it reads the copy of a replica on its own host.
"""

import asyncio
import contextlib
import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from jitckpt.hosts import visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.communicators import RecoveryNumber
from jitckpt.wire.proxy_messages import HostCopy, Replay
from jitckpt.wire.visits import CopyPiece, Refused, WantCopy

VISIT = "state"  # what an agent says that wants a copy
PIECE = 4 << 20  # bytes
ANSWER_SECONDS = 60.0  # for each piece


@dataclass(frozen=True)
class Ready:
    """The order for a rank here, with a copy that it can read; or `failed`: why it has none, a clause."""

    rank: int
    order: Replay
    failed: str = ""


class Transfers:
    """Of one start of this host's ranks. Used by the supervisor's thread, but for what visits."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._offered: dict[int, tuple[RecoveryNumber, HostCopy]] = {}
        self._files: dict[int, int] = {}  # by rank; each as long as its server may read it
        self._under_way: dict[int, tuple[Future[None], Replay]] = {}
        self._ready: deque[Ready] = deque()
        self._open = threading.Lock()  # held to write to `wake`, which is closed at the end
        self._closed = False
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when something is ready
        hosts.answers[VISIT] = self._serve

    def offer(self, recovery: RecoveryNumber, copy: HostCopy) -> None:
        """A rank here has copied its state, for whoever needs it in this recovery."""
        self._offered[copy.rank] = recovery, copy

    def begin(self, rank: int, order: Replay) -> None:
        """Fetch what a rank here is to take from one of another host; `take` returns the order then."""
        self.end(rank)
        copy = order.source[0]
        try:
            file = os.memfd_create("jitckpt-state", os.MFD_CLOEXEC)
        except OSError as error:
            self._under_way[rank] = Future(), order
            self._put(
                Ready(rank, order, f"there is no place for the copy of rank {copy.rank}'s state: {error}")
            )
            return
        self._files[rank] = file
        own = replace(order, source=(replace(copy, process=os.getpid(), file=file, offset=0),))
        fetched = self._hosts.start(self._fetch(order.recovery, copy, file))
        self._under_way[rank] = fetched, own
        fetched.add_done_callback(partial(self._fetched, rank, own))

    def break_off(self, rank: int) -> None:
        """A newer order counts for the rank. Its server may still read what has been fetched."""
        if rank in self._under_way:
            self._under_way.pop(rank)[0].cancel()

    def end(self, rank: int) -> None:
        """The rank does not read any more what was fetched for it, if anything was."""
        self.break_off(rank)
        if rank in self._files:
            os.close(self._files.pop(rank))

    def take(self) -> list[Ready]:
        """Return the orders that can be carried out by now, each once."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        found = [self._ready.popleft() for _ in range(len(self._ready))]
        found = [one for one in found if self._under_way.get(one.rank, (None, None))[1] is one.order]
        for one in found:
            del self._under_way[one.rank]
        return found

    def close(self) -> None:
        """Give up what is under way; the connections between the hosts may be closed later."""
        del self._hosts.answers[VISIT]
        for rank in list(self._files):
            self.end(rank)
        with self._open:
            self._closed = True
            os.close(self.wake)

    def _fetched(self, rank: int, order: Replay, result: "Future[None]") -> None:
        """On the thread of the connections."""
        try:
            result.result()
            ready = Ready(rank, order)
        except CancelledError:
            return
        except (LinkError, OSError) as error:
            source = order.source[0].rank
            what = f"the copy of rank {source}'s state could not be fetched from its host"
            ready = Ready(rank, order, f"{what}: {error}")
        self._put(ready)

    def _put(self, ready: Ready) -> None:
        self._ready.append(ready)
        with self._open:
            if not self._closed:
                os.eventfd_write(self.wake, 1)

    async def _fetch(self, recovery: RecoveryNumber, copy: HostCopy, file: int) -> None:
        """Raises LinkError if it does not come, or not whole, OSError if there is no memory for it."""
        file = os.dup(file)  # which may be closed before a cancellation is heard here
        try:
            os.ftruncate(file, copy.bytes)
            async with self._hosts.visit(self._hosts.host_of(copy.rank), VISIT) as (reader, writer):
                writer.write(visiting.encode(WantCopy(copy.rank, recovery)))
                at = 0
                while at < copy.bytes:
                    piece, data = await visiting.answer(reader, "It", ANSWER_SECONDS, CopyPiece)
                    at += _write(file, piece, data, at)
                if at > copy.bytes:
                    raise LinkError(f"It has sent more than the {copy.bytes} bytes that there should be.")
        except visiting.RefusedError as error:
            raise LinkError(f"It says: {error}") from error
        finally:
            os.close(file)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give another host the copy that it asks for. Raises LinkError if the connection ends."""
        try:
            wanted, _ = await visiting.hear(reader, WantCopy)
            recovery, copy = self._offered[wanted.rank]
            if recovery != wanted.recovery:
                raise LinkError(f"There is a copy for recovery {recovery}, not for {wanted.recovery}.")
            file = os.open(f"/proc/{copy.process}/fd/{copy.file}", os.O_RDONLY | os.O_CLOEXEC)
        except (LinkError, ProtocolError, KeyError, OSError) as error:
            writer.write(visiting.encode(Refused(f"{error!r}")))
            await writer.drain()
            return
        try:
            for at in range(0, copy.bytes, PIECE):
                writer.write(_piece(file, min(PIECE, copy.bytes - at), copy.offset + at))
                await writer.drain()
        finally:
            os.close(file)


def checksum(data: bytes) -> str:
    """Return what goes before a piece."""
    return xxhash.xxh3_64_hexdigest(data)


def _piece(file: int, size: int, offset: int) -> bytes:
    data = os.pread(file, size, offset)
    return visiting.encode(CopyPiece(checksum(data)), data)


def _write(file: int, piece: CopyPiece, data: bytes, at: int) -> int:
    """Return the bytes of a piece that has come as it was sent."""
    if not data or piece.sum != checksum(data):
        raise LinkError(f"The piece at {at} came damaged.")
    written = os.pwrite(file, data, at)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written")
    return written
