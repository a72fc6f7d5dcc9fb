"""What every tier can do that keeps whole shards of past steps beside the devices and the files."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jitckpt.tiers.shard import Seal


@dataclass(frozen=True)
class Held:
    """A whole shard that a tier has: whose, of which step, and of which start's minibatches."""

    rank: int
    step: int
    timeline: str
    bytes: int
    job: str
    world_size: int


@dataclass(frozen=True)
class Shard:
    """A whole shard on its way from one tier to another.

    slot: which of a rank's two places it has; it has the same everywhere. chunks: read one by one; each is
    checked where it is read and where it is written, and SaveError raised if it is damaged.
    """

    rank: int
    slot: int
    seal: Seal
    index: bytes = field(repr=False)
    chunks: Iterable[bytes] = field(repr=False)  # Python may show it when it is in its way


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
    def has(self) -> Sequence[Held]:
        """Return what is whole here, as far as seals and indexes tell; chunks are not read."""

    @abstractmethod
    def get(self, rank: int, step: int, timeline: str) -> Shard:
        """Return a shard that `has` told of; it may be given up while it is read, which the check of its
        chunks finds. Raises SaveError if it is not there, or is damaged."""

    @abstractmethod
    def drop(self, rank: int, step: int) -> None:
        """Give a shard up, if it is there: `has` tells of it no more."""
