"""Generators of random numbers that a dataset keeps itself, as for its augmentation."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from jitckpt.data.generators import GENERATORS, put_state, state_of
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import packed, tree_codec
from jitckpt.encoding.tree_codec import Encoded

DEPTH = 4  # to which objects in a dataset's attributes are looked into: transforms, datasets inside
MOST_OBJECTS = 1000
OPAQUE = (str, bytes, int, float, type(None), type)


class DatasetGenerators:
    """Takes and puts back their states, in this process."""

    def __init__(self, dataset: object) -> None:
        self._found = [*_generators_in(dataset)]

    def __bool__(self) -> bool:
        return bool(self._found)

    def capture(self) -> Encoded:
        return tree_codec.encode([state_of(one) for one in self._found], "dataset")

    def restore(self, states: list[Any]) -> None:
        for one, saved in zip(self._found, states, strict=True):
            put_state(one, saved)


class WorkerGenerators:
    """In a loader's worker: of its process, and of its own copy of the dataset."""

    def __init__(self) -> None:
        worker = get_worker_info()
        self._of_process = RandomState(None)
        self._of_dataset = DatasetGenerators(None if worker is None else worker.dataset)

    def capture(self) -> Encoded:
        """Return the states; where the dataset has none, the same object while no generator is used."""
        of_process = self._of_process.capture()
        if not self._of_dataset:
            return of_process
        own = self._of_dataset.capture()
        tree = {"process": of_process.tree, "dataset": own.tree}
        return Encoded(tree, of_process.tensors | own.tensors)

    def restore(self, states: bytes) -> None:
        """Put back what `capture` returned, packed."""
        saved = packed.unpack(states)
        if "dataset" in saved:
            self._of_dataset.restore(saved["dataset"])
        self._of_process.restore(saved.get("process", saved))


def _generators_in(dataset: object) -> Iterator[Any]:
    """Yield the generators in a dataset's attributes, each once, in an order that a restart finds again."""
    waiting = [(dataset, DEPTH)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        one, depth = waiting.pop(0)
        if id(one) in seen or isinstance(one, OPAQUE):
            continue
        seen.add(id(one))
        if isinstance(one, GENERATORS):
            yield one
        elif depth and isinstance(one, list | tuple | dict):
            parts = one.values() if isinstance(one, dict) else one
            waiting += [(part, depth - 1) for part in parts] if len(one) < MOST_OBJECTS else []
        elif depth and isinstance(getattr(one, "__dict__", None), dict):
            waiting += [(part, depth - 1) for part in vars(one).values()]
