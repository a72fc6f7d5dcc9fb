"""Packs what goes to another host with zstd, where the link is slower than the compressor.

A piece is packed while the one before is on its way, so it pays if that takes no longer than the way would,
and takes something off. Both are measured as the pieces go. It is an extra: the package zstandard.
"""

import importlib.util
import os
import time
from dataclasses import dataclass, field
from types import ModuleType

from jitckpt.hosts.link import LinkError

LEVEL = 1  # of zstd
WORTH = 0.9  # of the bytes at most are left where it pays
FASTEST = 1e9  # bytes a second that no core packs
KNOWN = 32 << 20  # bytes until a link's speed is known: the system's buffers take the first at once
FADES = 0.9  # what was measured counts less with each piece


def can_pack() -> bool:
    return importlib.util.find_spec("zstandard") is not None


def unpack(data: bytes | memoryview, size: int) -> bytes:
    """Return what was packed, of so many bytes. Raises LinkError if it is not that."""
    if not can_pack():
        raise LinkError("A piece came packed, and the package zstandard is not here.")
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(data) == size:  # so much is allocated
            content: bytes = zstandard.ZstdDecompressor().decompress(data)
            return content
    except zstandard.ZstdError as error:
        raise LinkError(f"A piece that was packed came damaged: {error}.") from error
    raise LinkError(f"A piece that was packed does not say that it has {size} bytes.")


@dataclass
class Rate:
    """Bytes a second, mostly of late."""

    size: float = 0.0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        self.size, self.seconds = FADES * self.size + size, FADES * self.seconds + seconds

    @property
    def value(self) -> float:
        return self.size / self.seconds if self.seconds else float("inf")


@dataclass
class Worth:
    """Whether to pack the next piece: where it pays, and ever less often to see whether it does."""

    link: Rate = field(default_factory=Rate)
    packer: Rate = field(default_factory=Rate)
    left: Rate = field(default_factory=Rate)  # bytes that are left of one
    went: int = 0  # bytes
    _pause: int = 1  # pieces
    _since: int = 0

    def is_due(self) -> bool:
        if self.went < KNOWN or self.link.value >= FASTEST:
            return False
        self._since += 1
        if not self.pays and self._since < self._pause:
            return False
        self._since = 0
        return True

    @property
    def pays(self) -> bool:
        return self.packer.size > 0 and self.link.value < self.packer.value and self.left.value < WORTH

    def was_sent(self, size: int, seconds: float) -> None:
        self.went += size
        self.link.add(size, seconds)

    def was_packed(self, size: int, left: int, seconds: float) -> None:
        self.packer.add(size, seconds)
        self.left.size, self.left.seconds = FADES * self.left.size + left, FADES * self.left.seconds + size
        self._pause = 1 if self.pays else 2 * self._pause


class Packer:
    """Of one way. can_pack: both sides have the package."""

    def __init__(self, can_pack: bool) -> None:
        self.worth = Worth()
        self.saved = 0  # bytes that did not have to go
        self._compressor = _zstandard().ZstdCompressor(level=LEVEL) if can_pack else None

    def pack(self, file: int, at: int, size: int) -> bytes | None:
        """Return a piece of a file as it goes; None: as it is. Raises OSError."""
        if self._compressor is None or not self.worth.is_due():
            return None
        data, begun = os.pread(file, size, at), time.monotonic()
        packed: bytes = self._compressor.compress(data)
        self.worth.was_packed(size, len(packed), time.monotonic() - begun)
        if not self.worth.pays or len(packed) >= size:
            return None
        self.saved += size - len(packed)
        return packed


def _zstandard() -> ModuleType:
    import zstandard

    return zstandard
