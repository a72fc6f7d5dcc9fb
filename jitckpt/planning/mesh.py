"""Where ranks sit: a (pipeline, data, tensor) mesh on machines and racks."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, whole


@dataclass(frozen=True)
class PlannedMesh:
    """Megatron's order unless told otherwise: tensor varies fastest, then data, then pipeline.

    shard_group: neighbours along data that share one copy of the state (FSDP, ZeRO); 1 when each has its own.
    """

    pipeline: int
    data: int
    tensor: int
    shard_group: int = 1
    order: tuple[str, str, str] = ("tensor", "data", "pipeline")  # fastest first

    def __post_init__(self) -> None:
        for axis in ("pipeline", "data", "tensor", "shard_group"):
            whole(axis, getattr(self, axis), low=1)
        if self.data % self.shard_group:
            raise InvalidInput(
                f"shard_group is {self.shard_group}: it must divide data, which is {self.data}"
            )
        if sorted(self.order) != ["data", "pipeline", "tensor"]:
            raise InvalidInput(f"order is {self.order!r}: it must name tensor, data and pipeline once each")

    @property
    def gpus(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return self.data // self.shard_group

    @property
    def shards(self) -> int:
        """Different pieces of the state; each rank holds one."""
        return self.gpus // self.replicas

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) of a rank."""
        at = {}
        for axis in self.order:
            rank, at[axis] = divmod(rank, int(getattr(self, axis)))
        return at["pipeline"], at["data"], at["tensor"]

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        at = {"pipeline": pipeline, "data": data, "tensor": tensor}
        rank = 0
        for axis in reversed(self.order):
            rank = rank * int(getattr(self, axis)) + at[axis]
        return rank

    def shard(self, rank: int) -> int:
        """Which piece of the state a rank holds."""
        pipeline, data, tensor = self.coordinates(rank)
        return (pipeline * self.tensor + tensor) * self.shard_group + data % self.shard_group


def loses_a_shard(mesh: PlannedMesh, lost_ranks: Collection[int], survives_losses: int | None = None) -> bool:
    """Whether more than `survives_losses` ranks that hold one shard are lost (by default: all of them)."""
    limit = mesh.replicas - 1 if survives_losses is None else survives_losses
    if len(lost_ranks) <= limit:
        return False
    return max(Counter(mesh.shard(rank) for rank in lost_ranks).values()) > limit
