"""How a DistributedSampler deals the samples of a pass to the ranks, and what is left of it to other ranks.

It deals them in turn: of its order the first goes to rank 0, the next to rank 1 and so on. So once each rank
has had k batches, what all have had together is the beginning of the order, however many ranks there are.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

NOBODY = (0, 0)


def dealt_by(loader: Iterable[Any]) -> tuple[int, int]:
    """Return to how many ranks a loader's samples are dealt, and how many of each a rank gets at once.

    NOBODY where that is not known: then its order is the rank's own affair.
    """
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, DistributedSampler):
        return NOBODY
    if type(batches.sampler).__iter__ is not DistributedSampler.__iter__:
        return NOBODY
    return batches.sampler.num_replicas, batches.batch_size


def rest(batches: BatchSampler, before: int) -> BatchSampler:
    """Return what gives this rank its share of the order behind the first `before` samples."""
    assert isinstance(batches.sampler, DistributedSampler)
    return BatchSampler(_Rest(batches.sampler, before), batches.batch_size, batches.drop_last)


class _Rest(Sampler[int]):
    def __init__(self, sampler: DistributedSampler[Any], before: int) -> None:
        self._sampler, self._before = sampler, before

    def __iter__(self) -> Iterator[int]:
        return iter(self._share())

    def __len__(self) -> int:
        return len(self._share())

    def _share(self) -> list[int]:
        sampler = self._sampler
        whole = copy.copy(sampler)
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
        order = list(whole)[self._before :]
        beyond = len(order) % sampler.num_replicas
        if beyond and sampler.drop_last:
            del order[-beyond:]
        elif beyond:  # as the sampler itself does, some come twice so that all ranks get equally many
            order += (order * sampler.num_replicas)[: sampler.num_replicas - beyond]
        return order[sampler.rank :: sampler.num_replicas]
