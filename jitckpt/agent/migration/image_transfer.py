"""Files of images go to another host in pieces with checksums, packed where that pays, with their holes.

The system sends pieces out of the files while the next are looked through by another thread: the connections'
own has to say that its host lives.
"""

import asyncio
import contextlib
import io
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from jitckpt._pages import PAGE
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.same_pages import PartOfFile, SamePages, SamePagesOfFile
from jitckpt.hosts import visiting
from jitckpt.hosts.link import LinkError
from jitckpt.wire.moves import MOST_PACKED, ImageFile, ImagePiece, SamePiece

PIECE = MOST_PACKED
SLOWEST = 50e6  # bytes a second that no training misses

Value = TypeVar("Value")


class Pace:
    """Has so many bytes go no faster than evenly in so many seconds, and never held back below SLOWEST."""

    def __init__(self, size: int, seconds: float) -> None:
        self._seconds = min(seconds / max(size, 1), 1 / SLOWEST)  # for a byte
        self._begun, self._went = time.monotonic(), 0

    async def keep(self, size: int) -> None:
        """So many more have gone."""
        self._went += size
        await asyncio.sleep(self._begun + self._went * self._seconds - time.monotonic())


@dataclass(frozen=True)
class _Ready:
    """A part that goes now. packed: its bytes, if they go so."""

    part: PartOfFile
    packed: bytes | None


async def send_file(
    writer: asyncio.StreamWriter,
    rank: int,
    image: str,
    file: int,
    packer: Packer,
    *,
    patience: float | None = None,
    pace: Pace | None = None,
    same: SamePages | None = None,
) -> int:
    """Send what is written of a file; return how much that was.

    patience: seconds in which the other side takes a piece. same: the pages that have gone that way before.
    Raises LinkError or OSError.
    """
    sent = 0
    writer.write(visiting.encode(ImageFile(rank, image, os.fstat(file).st_size)))
    way = _Way(writer, rank, image, file, packer)
    on_its_way: asyncio.Task[None] | None = None
    pieces = _pieces(file, (same or SamePages(0)).of(rank, image), packer)
    try:
        while (piece := await to_its_end(next, pieces, None)) is not None:
            if on_its_way is not None:
                await on_its_way
            on_its_way = asyncio.create_task(way.send(piece, patience))
            size = sum(one.part.size for one in piece)
            sent += size
            if pace is not None:
                await pace.keep(size)
    finally:
        if on_its_way is not None:
            await on_its_way
    return sent


@dataclass(frozen=True)
class _Way:
    """Of one file."""

    writer: asyncio.StreamWriter
    rank: int
    image: str
    file: int
    packer: Packer

    async def send(self, piece: list[_Ready], patience: float | None) -> None:
        """Send a piece's parts. Raises LinkError or OSError."""
        async with _in_time(patience, "takes"):
            for one in piece:
                await self._send_part(one)
            await self.writer.drain()

    async def _send_part(self, one: _Ready) -> None:
        part, packed = one.part, one.packed
        if part.same is not None:
            said = SamePiece(self.rank, self.image, part.at, part.size, *part.same)
            self.writer.write(visiting.encode(said))
            return
        size = part.size if packed is None else len(packed)
        head = ImagePiece(self.rank, self.image, part.at, part.sum, 0 if packed is None else part.size)
        self.writer.write(visiting.head(head, size))
        begun = time.monotonic()
        if packed is None:
            await self._out_of_file(part)
        else:
            self.writer.write(packed)
            await self.writer.drain()
        self.packer.worth.was_sent(size, time.monotonic() - begun)

    async def _out_of_file(self, part: PartOfFile) -> None:
        loop = asyncio.get_running_loop()
        with io.FileIO(self.file, closefd=False) as source:
            try:
                sent = await loop.sendfile(self.writer.transport, source, part.at, part.size)
            except RuntimeError as error:  # asyncio's word for a connection that the other side has closed
                raise ConnectionError(str(error)) from error
        if sent < part.size:
            raise OSError(f"only {sent} of {part.size} bytes of {self.image} could be sent")


def _pieces(file: int, same: SamePagesOfFile, packer: Packer) -> Iterator[list[_Ready]]:
    """Yield what is written of a file, in parts that are new or have gone."""
    for begin, end in _written(file):
        for at in range(begin, end, PIECE):
            parts = same.parts(file, at, min(end - at, PIECE))
            yield [
                _Ready(one, packer.pack(file, one.at, one.size) if one.same is None else None)
                for one in parts
            ]


def _written(file: int) -> Iterator[tuple[int, int]]:
    """Yield where a file has no holes. The system looks for the next hole from page to page."""
    size, end = os.fstat(file).st_size, 0
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin - begin % PAGE, end


async def to_its_end(call: Callable[..., Value], *arguments: Any) -> Value:
    """Return what it returns on another thread. Who cancels this waits for that, whose files stay open."""
    call_ends = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(call_ends)
    except asyncio.CancelledError:
        await asyncio.wait([call_ends])
        raise


@contextlib.asynccontextmanager
async def _in_time(patience: float | None, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(patience):
            yield
    except TimeoutError as error:
        raise LinkError(f"The other side {what} nothing any more, for {patience:g} s.") from error
