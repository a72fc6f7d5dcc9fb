"""Files of images go to another host in pieces with checksums, packed where that pays, with their holes.

Disks are read and written by other threads: the connections' own has to say that its host lives.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.same_pages import SameOrNew, SamePages, SamePagesOfFile
from jitckpt.agent.proxies.state_transfer import checksum
from jitckpt.hosts import visiting
from jitckpt.hosts.link import LinkError
from jitckpt.wire.moves import MOST_PACKED, ImageFile, ImagePiece, SamePiece, Whole

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
    on_its_way: asyncio.Task[None] | None = None
    pieces = _pieces(file, None if same is None else same.of(rank, image))
    try:
        while (piece := await to_its_end(next, pieces, None)) is not None:
            if isinstance(piece, SamePiece):
                writer.write(visiting.encode(replace(piece, rank=rank, image=image)))
                sent += piece.size
                continue
            at, data, proof = piece
            packed = await packer.pack(data)  # while the piece before is on its way
            if on_its_way is not None:
                await on_its_way
            said = ImagePiece(rank, image, at, proof, 0 if packed is None else len(data))
            message = visiting.encode(said, data if packed is None else packed)
            writer.write(message)
            on_its_way = asyncio.create_task(_drain(packer, writer, len(message), patience))
            sent += len(data)
            if pace is not None:
                await pace.keep(len(data))
    finally:
        if on_its_way is not None:
            await on_its_way
    return sent


async def _drain(packer: Packer, writer: asyncio.StreamWriter, size: int, patience: float | None) -> None:
    async with _in_time(patience, "takes"):
        await packer.drain(writer, size)


def _pieces(file: int, same: SamePagesOfFile | None) -> Iterator[tuple[int, bytes, str] | SamePiece]:
    """Yield what is written of a file, with where it stands, and its checksum; or where the same has gone."""
    size, at = os.fstat(file).st_size, 0
    while at < size:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = min(os.lseek(file, at, os.SEEK_HOLE), at + PIECE)
        data = os.pread(file, end - at, at)
        for run in (SameOrNew(0, len(data), None),) if same is None else same.runs(at, data):
            if run.same is None:
                part = data[run.begin : run.end]
                yield at + run.begin, part, checksum(part)
            else:
                yield SamePiece(0, "", at + run.begin, run.end - run.begin, *run.same)
        at += len(data)


@dataclass(frozen=True)
class _Opened:
    file: int
    size: int


async def receive_files(
    reader: asyncio.StreamReader, opened: Callable[[ImageFile], int | None], patience: float | None = None
) -> int:
    """Take files until all are whole; return their bytes. They are closed, but not flushed.

    opened: returns a descriptor for a file that is to come, and None for any other. patience: seconds until
    the next piece. Raises LinkError if they don't come whole, ProtocolError, or OSError.
    """
    files: dict[tuple[int, str], _Opened] = {}
    size = 0
    try:
        while True:
            async with _in_time(patience, "sends"):
                said, data = await visiting.hear(reader, Whole, ImageFile, ImagePiece, SamePiece)
            match said:
                case SamePiece() if said.of in files and (said.rank, said.image) in files:
                    size += await to_its_end(_copy, files[said.of], files[said.rank, said.image], said)
                case ImagePiece(rank, image) if (rank, image) in files:
                    size += await to_its_end(_write, files[rank, image], said, data)
                case ImageFile(rank, image, whole) if (rank, image) not in files:
                    if (file := opened(said)) is None:
                        raise LinkError(f"{said!r:.200} makes no sense here.")
                    files[rank, image] = _Opened(file, whole)
                    os.ftruncate(file, whole)
                case Whole():
                    return size
                case _:
                    raise LinkError(f"{said!r:.200} makes no sense here.")
    finally:
        for one in files.values():
            os.close(one.file)


def _write(to: _Opened, said: ImagePiece, data: bytes) -> int:
    if said.packed:
        data = packing.unpack(data, said.packed)
    if said.sum != checksum(data) or said.at + len(data) > to.size:
        raise LinkError("A piece of an image came damaged.")
    return os.pwrite(to.file, data, said.at)


async def to_its_end(call: Callable[..., Value], *arguments: Any) -> Value:
    """Return what it returns on another thread. Who cancels this waits for that, whose files stay open."""
    call_ends = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(call_ends)
    except asyncio.CancelledError:
        await asyncio.wait([call_ends])
        raise


def _copy(origin: _Opened, to: _Opened, said: SamePiece) -> int:
    data = os.pread(origin.file, said.size, said.of_at)
    if len(data) < said.size or said.at + said.size > to.size:
        raise LinkError("A piece of an image is to be the same as what has not come.")
    return os.pwrite(to.file, data, said.at)


@contextlib.asynccontextmanager
async def _in_time(patience: float | None, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(patience):
            yield
    except TimeoutError as error:
        raise LinkError(f"The other side {what} nothing any more, for {patience:g} s.") from error
