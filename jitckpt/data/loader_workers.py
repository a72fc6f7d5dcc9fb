"""A DataLoader's workers whose random numbers go on where they were: their states come with each batch.

Each worker process takes the states of its generators behind every batch that it makes, and sends them along
if they have changed; so the main process knows those that belong to the batches it has handed out, however
many more the workers have made. New workers are seeded as those before, run the script's worker_init_fn, and
then get the states.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from jitckpt.data.dataset_generators import WorkerGenerators
from jitckpt.encoding import packed
from jitckpt.encoding.tree_codec import Encoded

_random: WorkerGenerators | None = None  # in a worker: its own
_sent: Encoded | None = None
INDEX = "possibly_batched_index"  # how torch calls the indices of a batch where it collates


def last_of(indices: Any) -> Any:
    """Return the last index of a batch; of one that is none, that."""
    return indices[-1] if isinstance(indices, list | tuple) and indices else indices


class CarriedBatch:
    """A batch, by which worker, and that worker's states behind it; None if they are as before.

    lost: what that worker's dataset has changed and no state holds, by names.
    """

    def __init__(self, batch: Any, worker: int, states: bytes | None, lost: Sequence[str] = ()) -> None:
        self.batch, self.worker, self.states, self.lost = batch, worker, states, lost

    def pin_memory(self) -> "CarriedBatch":
        return CarriedBatch(pin_memory(self.batch), self.worker, self.states, self.lost)


class WithStates:
    """The loader's collate_fn, which is the last that a worker calls for a batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> CarriedBatch:
        global _sent  # noqa: PLW0603
        batch = self.collate(samples)
        worker = get_worker_info()
        assert _random is not None
        assert worker is not None
        lost = _random.has_read(last_of(sys._getframe(1).f_locals.get(INDEX)))
        states = _random.capture()
        if states is _sent:
            return CarriedBatch(batch, worker.id, None, lost)
        _sent = states
        return CarriedBatch(batch, worker.id, packed.pack(states), lost)


class Beginning:
    """The loader's worker_init_fn; then a worker that goes on for another one gets that one's states."""

    def __init__(
        self, begin: Callable[[int], Any] | None, states: Mapping[int, bytes], collate: object
    ) -> None:
        self.begin, self.states, self.collate = begin, dict(states), collate

    def __call__(self, worker: int) -> None:
        global _random, _sent  # noqa: PLW0603
        if self.begin is not None:
            self.begin(worker)
        _random = WorkerGenerators(self.collate)
        _sent = _random.capture()
        if worker in self.states:
            _random.restore(self.states[worker])


class Workers(_MultiProcessingDataLoaderIter):
    """Torch's iterator, but the workers' seed can be given, and which of them gets the first batch."""

    def __init__(self, loader: DataLoader[Any], seed: int | None, first: int) -> None:
        self._given, self._first = seed, first
        self._drains = False
        self.drained: dict[int, bytes] = {}  # states behind batches that nobody took
        super().__init__(loader)

    def begin_again(self, loader: DataLoader[Any]) -> None:
        """Begin the next pass, where workers are persistent."""
        came_early = [info for info in self._task_info.values() if len(info) == 2]
        self.drained, self._drains = {}, True
        for _, data in came_early:
            self._drain(data)
        self._reset(loader)
        self._drains = False

    def _get_data(self) -> Any:
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if self._drains:
            self._drain(data)
        return index, data

    def _drain(self, data: Any) -> None:
        if isinstance(data, CarriedBatch) and data.states is not None:
            self.drained[data.worker] = data.states

    @property
    def _base_seed(self) -> int:
        return self.seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self.seed = drawn if self._given is None else self._given

    def _try_put_index(self) -> None:
        for _ in range(self._first):
            next(self._worker_queue_idx_cycle)
        self._first = 0
        super()._try_put_index()
