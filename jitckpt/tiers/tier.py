"""What every tier can do that keeps whole shards of past steps beside the devices and the files."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from jitckpt.tiers.chunks import Window
from jitckpt.tiers.shard import Index, Seal
from jitckpt.wire.visits import HeldShard


@dataclass(frozen=True)
class Shard:
    """A whole shard on its way from one tier to another.

    slot: which of a rank's two places it has; it has the same everywhere. window: its data, unchecked.
    """

    rank: int
    slot: int
    seal: Seal
    index: bytes = field(repr=False)
    window: Window = field(repr=False)


class Taker(Protocol):
    """What a tier brings a shard into: memory of this host."""

    def coming(
        self, rank: int, slot: int, seal: Seal, index: bytes
    ) -> AbstractContextManager[tuple[Index, Window]]:
        """Give the slot up, and return where the data are to be put; the context's end seals them.

        Raises SaveError if there is no room, or the index is not the seal's.
        """


class Tier(ABC):
    """Keeps up to two whole shards of each rank. Safe for several threads, one a rank."""

    @abstractmethod
    def put(self, shard: Shard) -> None:
        """Take a shard in, in the place of what was in its slot, which is given up as this begins.

        Only who knows that the rank's other slot is whole wherever it is needed may call this. Until it has
        returned `has` does not tell of the shard; nobody but the tier writes to it then or later. Raises
        SaveError if the shard is damaged, or there is no room; then its slot is empty.
        """

    @abstractmethod
    def has(self) -> Sequence[HeldShard]:
        """Return what is whole here, as far as seals and indexes tell; chunks are not read."""

    @abstractmethod
    def get(self, rank: int, step: int, timeline: str, into: Taker) -> int:
        """Bring a shard that `has` told of into this host's memory; return its bytes.

        It may be given up meanwhile, which the check of its chunks finds. Raises SaveError if it is not
        there, or is damaged.
        """

    @abstractmethod
    def drop(self, rank: int, step: int) -> None:
        """Give a shard up, if it is there: `has` tells of it no more."""
