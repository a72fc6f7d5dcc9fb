"""Files of images that come from another host, of which image_transfer.py is the other side."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from jitckpt._pages import checksum
from jitckpt.agent.migration import packing
from jitckpt.hosts.direct import Direct, directly
from jitckpt.hosts.link import LinkError
from jitckpt.wire import checked
from jitckpt.wire.moves import MOST_PACKED, ImageFile, ImagePiece, SamePiece, Whole

_KINDS = checked.by_type((Whole, ImageFile, ImagePiece, SamePiece))

Opened = Callable[[ImageFile], int | None]


async def receive_files(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: Opened, patience: float
) -> int:
    """Take files until all are whole; return their bytes. They are closed, but not flushed.

    opened: returns a descriptor for a file that is to come, and None for any other; on another thread.
    patience: seconds until the next piece. Raises LinkError if they don't come whole, ProtocolError, OSError.
    """

    def take(direct: Direct) -> int:
        coming = _Coming(opened)
        try:
            while not coming.hear(direct):
                pass
        finally:
            coming.close()
        return coming.bytes

    return await directly(reader, writer, patience, take)


@dataclass(frozen=True)
class _Opened:
    file: int
    size: int


class _Coming:
    """Files that come. bytes: of theirs that have."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self.bytes = opened, 0
        self._files: dict[tuple[int, str], _Opened] = {}
        self._buffer = memoryview(bytearray(MOST_PACKED))

    def close(self) -> None:
        for one in self._files.values():
            os.close(one.file)

    def hear(self, direct: Direct) -> bool:
        """Take the next message; return whether all are whole."""
        header, size = direct.head()
        said, files = checked.understood(_KINDS, header), self._files
        if size > (MOST_PACKED if isinstance(said, ImagePiece) else 0):
            raise LinkError(f"{said!r:.200} has {size} bytes behind it.")
        match said:
            case SamePiece() if said.of in files and (said.rank, said.image) in files:
                self.bytes += _copy(files[said.of], files[said.rank, said.image], said)
            case ImagePiece(rank, image) if (rank, image) in files:
                direct.fill(data := self._buffer[:size])
                self.bytes += _write(files[rank, image], said, data)
            case ImageFile(rank, image, whole) if (rank, image) not in files:
                if (file := self._opened(said)) is None:
                    raise LinkError(f"{said!r:.200} makes no sense here.")
                files[rank, image] = _Opened(file, whole)
                os.ftruncate(file, whole)
            case Whole():
                return True
            case _:
                raise LinkError(f"{said!r:.200} makes no sense here.")
        return False


def _write(to: _Opened, said: ImagePiece, data: bytes | memoryview) -> int:
    if said.packed:
        data = packing.unpack(data, said.packed)
    if said.sum != checksum(data) or said.at + len(data) > to.size:
        raise LinkError("A piece of an image came damaged.")
    size = os.pwrite(to.file, data, said.at)
    if size < len(data):
        raise OSError(f"only {size} of {len(data)} bytes of an image could be written: the memory is full")
    return size


def _copy(origin: _Opened, to: _Opened, said: SamePiece) -> int:
    """Have the system copy what has come before: none of it comes here."""
    if said.of_at + said.size > origin.size or said.at + said.size > to.size:
        raise LinkError("A piece of an image is to be the same as what has not come.")
    os.lseek(to.file, said.at, os.SEEK_SET)
    size = 0
    while size < said.size:
        size += (copied := os.sendfile(to.file, origin.file, said.of_at + size, said.size - size))
        if not copied:
            raise OSError(f"only {size} of {said.size} bytes could be copied")
    return size
