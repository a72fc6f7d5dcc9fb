"""Which ranks hold the same part of the state: decided from what each rank says of its tensors.

Ranks that hold the same are replicas and have the same shard number; shards are numbered by their lowest
rank. In doubt two ranks are taken for different shards: that costs a second copy, while the opposite would
mix up states.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Protocol

import xxhash

from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import JitckptError
from jitckpt.wire import environment

REPLICATE = "Replicate()"
LONGEST_TEXT = 300  # characters of a layout's description


@dataclass(frozen=True)
class Mesh:
    """An array of ranks, in row-major order; `names`: of its dimensions, or empty."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if prod(self.sizes) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"A mesh of the sizes {self.sizes} can't be of the ranks {self.ranks}.")

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where `rank` stands."""
        index, found = self.ranks.index(rank), []
        for size in reversed(self.sizes):
            index, place = divmod(index, size)
            found.append(place)
        return tuple(reversed(found))


@dataclass(frozen=True)
class Part:
    """A tensor of which a rank holds a part: one placement for each dimension of the mesh.

    placements: "Replicate()", or any other text for what parts the tensor along that dimension.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    mesh: Mesh | None = None
    placements: tuple[str, ...] = ()

    def piece(self, rank: int) -> Json:
        """Return what tells the part that `rank` holds from the others."""
        cuts = [] if self.mesh is None else self._cuts(self.mesh, self.mesh.coordinate(rank))
        return [self.name, list(self.shape), self.dtype, cuts]

    def peers(self, rank: int) -> frozenset[int]:
        """Return the ranks of the mesh that hold the same part as `rank`, itself included."""
        if self.mesh is None:
            return frozenset([rank])
        own = self._cuts(self.mesh, self.mesh.coordinate(rank))
        return frozenset(
            other for other in self.mesh.ranks if self._cuts(self.mesh, self.mesh.coordinate(other)) == own
        )

    def cut_by(self) -> str:
        """Return how the tensor is cut, in words; "" if every rank of the mesh has the whole."""
        if self.mesh is None:
            return ""
        names = self.mesh.names or tuple(map(str, range(len(self.mesh.sizes))))
        dimensions = list(zip(names, self.mesh.sizes, self.placements, strict=True))
        cut = any(placement != REPLICATE and size > 1 for _, size, placement in dimensions)
        return ", ".join(f"{name}={size} {placement}" for name, size, placement in dimensions) if cut else ""

    def _cuts(self, mesh: Mesh, coordinate: tuple[int, ...]) -> list[Json]:
        return [
            [placement, size, place]
            for placement, size, place in zip(self.placements, mesh.sizes, coordinate, strict=True)
            if placement != REPLICATE
        ]


@dataclass(frozen=True)
class Holding:
    """What one rank says of what it holds.

    pieces: a digest of all its parts. replicas: groups of ranks that its wrappers (DDP, FSDP, a mesh) declare
    to be replicas, as far as they hold the same pieces. values: where nothing is declared, a digest of some
    of the parameters' values: replicas agree on them. text: how the state is cut, in words; "" if it is not.
    own: a digest of the values of those parameters of the optimizers that are not the model's.
    """

    pieces: str
    replicas: tuple[tuple[int, ...], ...] = ()
    values: str = ""
    text: str = ""
    own: str = ""


@dataclass(frozen=True)
class Layout:
    """`shards`: the shard of each rank. `text`: the layout in words, the same on all ranks."""

    shards: tuple[int, ...]
    text: str

    @property
    def count(self) -> int:
        return max(self.shards) + 1

    def is_first(self, rank: int) -> bool:
        """Return whether the rank is the first of those that hold its shard."""
        return self.shards.index(self.shards[rank]) == rank

    def alone(self) -> list[int]:
        """Return the ranks that have no replica."""
        return [rank for rank, shard in enumerate(self.shards) if self.shards.count(shard) == 1]


class SharedStore(Protocol):
    """What is needed of torch's store: `get` waits for the key."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


def lay_out(holdings: Sequence[Holding]) -> Layout:
    """Return the layout of a job whose rank r says holdings[r]. A pure function.

    Two ranks are replicas if they hold the same pieces and a chain of declarations joins them; or if neither
    has declared anything, and the values are the same. In any case the optimizers' own parameters are.
    """
    parent = list(range(len(holdings)))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    undeclared: dict[tuple[str, str], int] = {}
    for rank, holding in enumerate(holdings):
        others = [other for group in holding.replicas for other in group]
        if not holding.replicas:
            others.append(undeclared.setdefault((holding.pieces, holding.values + holding.own), rank))
        for other in others:
            if (holdings[other].pieces, holdings[other].own) == (holding.pieces, holding.own):
                low, high = sorted((root(rank), root(other)))
                parent[high] = low
    numbers: dict[int, int] = {}
    shards = tuple(numbers.setdefault(root(rank), len(numbers)) for rank in range(len(holdings)))
    return Layout(shards, _text(holdings, shards))


def agree(store: SharedStore, rank: int, world_size: int, holding: Holding) -> Layout:
    """Tell all ranks what this one holds, hear of the others; return the layout. Every rank has to call it.

    It uses torch's store alone, so no communicator is made and no device waits. Raises JitckptError if a rank
    does not come.
    """

    def decide(told: list[str]) -> str:
        return json.dumps(asdict(lay_out([_holding(json.loads(one)) for one in told])))

    try:
        agreed = json.loads(
            through_first(store, "shards", rank, world_size, value=json.dumps(asdict(holding)), decide=decide)
        )
    except RuntimeError as error:  # torch's DistStoreError, which names no class of ours
        raise JitckptError(
            f"Rank {rank} could not learn from the others which part of the state each holds: {error}. Call "
            "jitckpt.init on every rank, with shard and shards on all of them or on none."
        ) from error
    return Layout(tuple(agreed["shards"]), agreed["text"])


def hear_first(store: SharedStore, what: str, rank: int, value: str) -> str:
    """Return what rank 0 gives as `value`. Every rank has to call it; JitckptError if rank 0 does not."""
    _Agreements.made += 1
    key = f"jitckpt/{environment.RESTART.get()}/{what}-{_Agreements.made}"
    try:
        if rank == 0:
            store.set(key, value)
        return store.get(key).decode()
    except RuntimeError as error:
        raise JitckptError(f"Rank {rank} did not hear from rank 0 which {what} it is: {error}.") from error


def any_rank(store: SharedStore, what: str, rank: int, world_size: int, value: bool) -> bool:
    """Return whether `value` is true on some rank. All have to call it; JitckptError if one does not."""
    try:
        found = through_first(
            store, what, rank, world_size, value=str(value), decide=lambda told: str("True" in told)
        )
    except RuntimeError as error:
        raise JitckptError(f"Rank {rank} did not hear from the others whether {what}: {error}.") from error
    return found == "True"


def through_first(
    store: SharedStore,
    what: str,
    rank: int,
    world_size: int,
    *,
    value: str,
    decide: Callable[[list[str]], str],
) -> str:
    """Tell rank 0 a value; return what it decides from all of them, by rank. Every rank has to call it.

    Each rank hears one answer, so that is as many messages as there are ranks, and not their square.
    Raises RuntimeError, which is torch's, if a rank does not come.
    """
    _Agreements.made += 1
    prefix = f"jitckpt/{environment.RESTART.get()}/{what}-{_Agreements.made}"
    if rank > 0:
        store.set(f"{prefix}/{rank}", value)
    else:
        told = [value, *(store.get(f"{prefix}/{other}").decode() for other in range(1, world_size))]
        store.set(f"{prefix}/decided", decide(told))
    return store.get(f"{prefix}/decided").decode()


class _Agreements:
    made = 0  # all ranks agree equally often, so this numbers the keys alike on all of them


def _holding(told: dict[str, Any]) -> Holding:
    return Holding(
        told["pieces"],
        tuple(tuple(group) for group in told["replicas"]),
        told["values"],
        told["text"],
        told["own"],
    )


def _text(holdings: Sequence[Holding], shards: Sequence[int]) -> str:
    cuts = " / ".join(dict.fromkeys(holding.text for holding in holdings if holding.text))
    if not cuts and max(shards) == 0:
        return "replicated"
    text = f"{cuts or 'different tensors'}; replicas {' | '.join(_groups(shards))}"
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT - 40]} ... ({xxhash.xxh3_64_hexdigest(text.encode())})"


def _groups(shards: Sequence[int]) -> Iterator[str]:
    members: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        members.setdefault(shard, []).append(rank)
    for ranks in members.values():
        yield " ".join(map(str, ranks))
