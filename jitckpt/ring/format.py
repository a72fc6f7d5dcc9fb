"""How the rank-local states of the last few steps lie in a ring: memory that outlives the rank.

Page 0 says whose ring it is, in its last word after which step the agent wants a save, in the one before
whether the rank may end, before that how far a rank is that writes no state any more, and before that
whether a periodic save was whole.

Then, for each slot (step modulo slots), two areas for the host part, which the writes of a step take in turn,
so that one is whole once the first write is done; their checksum tells. Then, for each slot, a page of words
and two areas for tensors copied off the device: one provisional (from the forward pass on), one final (after
the optimizer step). The device writes a word before it begins to write an area and one after it has ended; an
area is whole if both words are made of the step and the number that the host part names. So a process may be
killed at any moment.
"""

import functools
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import xxhash
from torch import Tensor

from jitckpt.encoding import tensor_file
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import JitckptError, SaveError
from jitckpt.saves import layout
from jitckpt.saves.layout import Identity

PAGE = 4096
MAGIC = b"JITCKPT2"
FILE_HEADER = struct.Struct("<8sQQI")  # magic, slots, bytes of an area, length of the identity
BLOB_HEADER = struct.Struct("<16sQQQ")  # checksum of what follows it: sequence, step, length, content
CHECKSUM = 16  # bytes
WORD = struct.Struct("<Q")
PART = struct.Struct("<I")
WANTED = PAGE - WORD.size
MAY_END = WANTED - WORD.size
BEGUN = MAY_END - WORD.size
SAVED_WHOLE = BEGUN - WORD.size
FIRST_WORD = SAVED_WHOLE
FIRST = 1  # number of a step's writes of an area
NUMBERS = 0xFFFF
LAST_STEP = 1 << 63
JSON = {True: "true", False: "false"}

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
_OF_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def damage_is_said(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Have it raise SaveError whatever lies in a ring: checksums tell that a worker wrote it, not what."""

    @functools.wraps(read)
    def checked(*arguments: Arguments.args, **named: Arguments.kwargs) -> Value:
        try:
            return read(*arguments, **named)
        except SaveError:
            raise
        except (*_OF_NONSENSE, JitckptError, MemoryError, RuntimeError, struct.error) as error:
            raise SaveError(f"The memory of a rank's local state is damaged: {error!r:.200}.") from error

    return checked


class Region(NamedTuple):
    """What an area holds after one of a step's writes, and that write's number."""

    number: int
    entries: str  # JSON: of each device tensor, by name, its type, shape and offset


def area_bytes(limit: int, slots: int) -> int:
    """Return how large each part of a state may be, in a ring of so many slots and at most `limit` bytes."""
    return ((limit - PAGE) // slots - PAGE) // 4 // PAGE * PAGE


def limit_for(part: int, slots: int) -> int:
    """Return the least limit of a ring with so many slots in which a part may be of so many bytes."""
    return PAGE + slots * (PAGE + 4 * -(-part // PAGE) * PAGE)


def read_header(descriptor: int) -> tuple[Identity, int, int] | None:
    data = os.pread(descriptor, PAGE, 0)
    if not data[:FIRST_WORD].strip(b"\0"):
        return None
    if len(data) < FILE_HEADER.size:
        raise SaveError("The memory of a rank's local state is damaged: it is too short.")
    magic, slots, area_bytes, length = FILE_HEADER.unpack_from(data)
    end = FILE_HEADER.size + length
    size = os.fstat(descriptor).st_size
    if (
        magic != MAGIC
        or end + 16 > FIRST_WORD
        or digest(data[:end]) != data[end : end + 16]
        or size != PAGE + slots * (4 * area_bytes + PAGE)
    ):
        raise SaveError("The memory of a rank's local state is damaged: its first page is not valid.")
    return (
        Identity(**layout.parse_object(data[FILE_HEADER.size : end], "The ring's identity")),
        slots,
        area_bytes,
    )


def read_blob(descriptor: int, start: int, area_bytes: int) -> tuple[int, int, bytes] | None:
    data = os.pread(descriptor, BLOB_HEADER.size, start)
    checksum, sequence, step, length = BLOB_HEADER.unpack(data)
    if sequence == 0 or length > area_bytes - BLOB_HEADER.size:
        return None
    content = os.pread(descriptor, length, start + BLOB_HEADER.size)
    return (sequence, step, content) if digest(data[CHECKSUM:], content) == checksum else None


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (length,) = PART.unpack_from(content)
    document = layout.parse_object(content[PART.size : PART.size + length], "A rank's local state")
    return document, tensor_file.read(content[PART.size + length :])


def used_bytes(region: Json) -> int:
    """Return how many bytes of its area a region takes."""
    return max(
        (
            offset + torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for dtype, shape, offset in region["entries"].values()
        ),
        default=0,
    )


def word_of(step: int, number: int) -> int:
    """Return what the device writes around one of a step's writes of an area."""
    return (step << 16) | number


def seal(blob: bytearray, sequence: int, step: int) -> None:
    """Fill the header in."""
    BLOB_HEADER.pack_into(blob, 0, b"", sequence, step, len(blob) - BLOB_HEADER.size)
    blob[:CHECKSUM] = xxhash.xxh3_128_digest(memoryview(blob)[CHECKSUM:])


def digest(*parts: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def aligned(size: int) -> int:
    return -(-size // 16) * 16


def staged_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def host_area(slot: int, version: int, slots: int, area_bytes: int) -> int:
    return PAGE + (2 * slot + version) * area_bytes


def device_base(slots: int, area_bytes: int) -> int:
    return PAGE + 2 * slots * area_bytes


def device_area(slot: int, final: bool, slots: int, area_bytes: int) -> tuple[int, int]:
    """Return the offsets of the area's two words and of the area."""
    start = device_base(slots, area_bytes) + slot * (PAGE + 2 * area_bytes)
    return start + 16 * final, start + PAGE + final * area_bytes
