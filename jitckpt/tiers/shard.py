"""One rank's whole state after a step as bytes: what memory holds of it, and what is sent to other hosts.

Data: the tensors, one after another, in chunks of CHUNK bytes (the last one is shorter). Index: a JSON
document with the chunks' checksums, where each tensor lies, and the host's part of the state. Seal: step,
sizes and checksums of the index and of itself; it is written last. What has a seal that fits is whole.
Nothing of it is unpickled.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import xxhash
from torch import Tensor

from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import SaveError
from jitckpt.saves import layout
from jitckpt.saves.folders import SavedState
from jitckpt.saves.layout import Identity
from jitckpt.tiers import optimizer_step
from jitckpt.tiers.optimizer_step import OptimizerStep, Place

CHUNK = 4 << 20  # bytes
DIGEST_BYTES = 16
ALIGNMENT = 16
MOST_DATA = 1 << 41  # bytes of one shard
MOST_INDEX = 128 << 20
_SEAL = struct.Struct(
    "<16s16sQQQ"
)  # checksums of the rest and of the index; step, bytes of data and of index
SEAL_BYTES = _SEAL.size


@dataclass(frozen=True)
class Seal:
    """What is known of a whole shard without reading it."""

    step: int
    data_bytes: int
    index_bytes: int
    index_checksum: bytes

    @property
    def size(self) -> int:
        return self.data_bytes + self.index_bytes

    def encode(self) -> bytes:
        rest = _SEAL.pack(bytes(16), self.index_checksum, self.step, self.data_bytes, self.index_bytes)[16:]
        return xxhash.xxh3_128_digest(rest) + rest


def parse_seal(data: bytes) -> Seal | None:
    """Return the seal that these bytes are; None if they are none: the shard is not whole, or damaged."""
    if len(data) != SEAL_BYTES:
        return None
    checksum, index_checksum, step, data_bytes, index_bytes = _SEAL.unpack(data)
    whole = xxhash.xxh3_128_digest(data[16:]) == checksum
    if not whole or step == 0 or data_bytes > MOST_DATA or index_bytes > MOST_INDEX:
        return None
    return Seal(step, data_bytes, index_bytes, index_checksum)


@dataclass(frozen=True)
class Cut:
    """Of what its replicas hold alike a shard has a part alone.

    members: these ranks, and the shard's own. parts: of each tensor that is not all here, by name, its whole
    shape, and which element its part begins with.
    """

    members: Sequence[int]
    parts: Mapping[str, tuple[Sequence[int], int]]


@dataclass(frozen=True)
class ShardPart:
    """What is here are chunks of a shard alone, from the first one on. seal, index: the shard's.

    The first in hexadecimal; they belong together, which is checked before they are used.
    """

    first: int
    seal: str
    index: str

    def whole(self) -> tuple[Seal, bytes]:
        """Return the shard's seal and index. Raises SaveError if they make no sense."""
        try:
            found = parse_seal(bytes.fromhex(self.seal))
        except ValueError:
            found = None
        if found is None:
            raise SaveError("A part of a shard has a damaged seal of the shard.")
        return found, checked(self.index.encode(), found)


@dataclass(frozen=True)
class Index:
    """What a shard's index says. timeline: of the start of the job in which the step was made.

    checksums: xxh3_128 of each chunk, in hexadecimal. tensors: type, shape and offset by name.
    host_from: the offset from which on tensors were on the host. time: when it was whole. made_by: the step
    that made it of the one before, where a host may make that again. part: it is no whole shard. replicas:
    ranks on other hosts that hold the same, but for what a rank alone knows; where copies go beside them.
    """

    identity: Identity
    step: int
    timeline: str
    time: float
    checksums: Sequence[str]
    tensors: Mapping[str, tuple[str, Sequence[int], int]]
    host_from: int
    document: dict[str, Json]
    cut: Cut | None = None
    made_by: OptimizerStep | None = None
    part: ShardPart | None = None
    replicas: Sequence[int] = ()

    @property
    def digests(self) -> list[bytes]:
        return [bytes.fromhex(one) for one in self.checksums]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False).encode()


def seal_of(index: bytes, step: int, data_bytes: int) -> Seal:
    """Return what makes this index and its data whole."""
    if len(index) > MOST_INDEX or data_bytes > MOST_DATA:
        raise SaveError(
            f"A shard of {data_bytes} bytes, with an index of {len(index)}, is too large to keep."
        )
    return Seal(step, data_bytes, len(index), xxhash.xxh3_128_digest(index))


def checked(index: bytes, seal: Seal) -> bytes:
    """Return the bytes of an index. Raises SaveError if they are not this seal's."""
    if len(index) != seal.index_bytes or xxhash.xxh3_128_digest(index) != seal.index_checksum:
        raise SaveError(f"The index of step {seal.step} in memory is damaged: its checksum is another.")
    return index


def parse_index(data: bytes, seal: Seal) -> Index:
    """Return the index that belongs to this seal. Raises SaveError for any other bytes."""
    try:
        content = layout.parse_object(checked(data, seal), "A shard's index")
        identity = content.pop("identity")
        cut = content.pop("cut", None)
        made_by = content.pop("made_by", None)
        part = content.pop("part", None)
        index = Index(
            identity=Identity(**identity),
            cut=None if cut is None else Cut(**cut),
            made_by=None if made_by is None else optimizer_step.parse(made_by),
            part=None if part is None else _part(**part),
            **content,
        )
        problem = _problem(index, seal)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SaveError(f"The index of step {seal.step} in memory makes no sense: {error!r:.200}.") from error
    if problem:
        raise SaveError(f"The index of step {seal.step} in memory makes no sense: {problem}.")
    return index


def _part(first: int, seal: str, index: str) -> ShardPart:
    if type(first) is not int or first < 0:
        raise ValueError(f"a part would begin with chunk {first!r:.80}")
    return ShardPart(first, seal, index)


def _problem(index: Index, seal: Seal) -> str | None:
    identity = index.identity
    if index.step != seal.step or len(index.checksums) != chunks_in(seal.data_bytes):
        return "it is of another step, or of other data"
    if any(len(one) != DIGEST_BYTES for one in index.digests):
        return f"a checksum has not {DIGEST_BYTES} bytes"
    ranks = [identity.rank, *index.replicas]
    is_one = all(type(rank) is int and 0 <= rank < identity.world_size for rank in ranks)
    if not is_one or not 0 <= identity.shard < identity.shards:
        return f"one of the ranks {ranks!r:.80} of {identity.world_size} is none"
    for name, place in index.tensors.items():
        if not 0 <= place[2] <= seal.data_bytes - size_of(place) or place[2] % ALIGNMENT:
            return f"{name:.80} would lie outside of the data"
    if index.made_by is not None and (problem := _problem_of_step(index.made_by, index)):
        return problem
    return None if index.cut is None else _problem_of_cut(index.cut, index)


def _problem_of_step(step: OptimizerStep, index: Index) -> str | None:
    if not 0 <= step.sent <= index.host_from:
        return f"what its step does not make has {step.sent} bytes"
    for name in [*step.elsewhere, *(one.tensor for one in step.parameters())]:
        if name not in index.tensors:
            return f"its step makes {name:.80}, which it has not"
    for place in step.gradients():
        if not 0 <= place[2] <= step.sent - size_of(place) or place[2] % ALIGNMENT:
            return "a gradient would lie outside of the data"
    return None


def _problem_of_cut(cut: Cut, index: Index) -> str | None:
    ranks, world = list(cut.members), index.identity.world_size
    if index.identity.rank not in ranks or len(set(ranks)) != len(ranks):
        return f"it is cut among ranks {ranks!r:.80}"
    if not all(type(rank) is int and 0 <= rank < world for rank in ranks):
        return f"it is cut among ranks {ranks!r:.80}"
    for name, (shape, begin) in cut.parts.items():
        if name not in index.tensors:
            return f"of {name:.80} it has no part"
        _, part, _ = index.tensors[name]
        size = torch.Size(shape).numel() if min(shape, default=0) >= 0 else -1
        if len(part) != 1 or not 0 <= begin <= size - part[0]:
            return f"the part of {name:.80} would lie outside of it"
    return None


def chunks_in(size: int) -> int:
    """Return how many chunks so many bytes have."""
    return -(-size // CHUNK)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def state_of(index: Index, data: Tensor) -> SavedState:
    """Return the state in a shard's data, a tensor of bytes on the host that the state's tensors share.

    What was on the host before gets memory of its own: it is small, and stays.
    """
    tensors: dict[str, Tensor] = {}
    for name, place in index.tensors.items():
        tensor = tensor_in(data, place)
        tensors[name] = tensor.clone() if place[2] >= index.host_from else tensor
    return SavedState(index.document, tensors)


def tensor_in(data: Tensor, place: Place) -> Tensor:
    """Return a tensor in a shard's data, whose memory it shares."""
    kind, shape, offset = place
    return data[offset : offset + size_of(place)].view(_dtype(kind)).view(torch.Size(shape))


def size_of(place: Place) -> int:
    """Return the bytes of a tensor in a shard's data."""
    kind, shape, _ = place
    return torch.Size(shape).numel() * _dtype(kind).itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch knows no type {name!r:.40}")
    return found
