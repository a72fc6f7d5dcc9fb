"""Loops that go on where they were: batches and all generators as in a run that nothing disturbs."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from jitckpt import tree_codec
from jitckpt.errors import JitckptError
from jitckpt.loop import Loop
from jitckpt.random_state import RandomState
from jitckpt.tree_codec import Encoded

EPOCHS = 3


class Squares(Dataset[Any]):
    """Augments by all three generators, and notes which data were read in this process."""

    def __init__(self, length: int = 22) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        worker = get_worker_info()
        return torch.tensor([index * index, *drawn, 0 if worker is None else worker.id], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """Of unequal lengths in the workers; augments by the worker's generator."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first = 0 if worker is None else worker.id
        for number in range(first, 17 + 4 * first, 1 if worker is None else worker.num_workers):
            yield torch.tensor([number, random.random()], dtype=torch.float64)


class Shuffling(Sampler[int]):
    """Keeps a generator and a count of its own from epoch to epoch, and draws eagerly."""

    def __init__(self, length: int) -> None:
        self.length, self.random, self.times = length, random.Random(7), 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        order = [*range(self.length), self.times]
        self.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length + 1


class Eager(Sampler[list[int]]):
    """A batch sampler that draws from the process's generators when it is iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(20).tolist()
        random.shuffle(order)
        return iter([order[begin : begin + 3] for begin in range(0, 20, 3)])

    def __len__(self) -> int:
        return 7


class Stateful:
    """A loader with a state of its own, which is what torchdata's has to offer."""

    def __init__(self) -> None:
        self.position = self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        random.random()
        self.epoch += self.position == 0
        while self.position < 7:
            self.position += 1
            yield torch.tensor([self.epoch, self.position, random.random()])
        self.position = 0

    def __len__(self) -> int:
        return 7

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epoch = state["position"], state["epoch"]


def reseed(worker: int) -> None:
    numpy.random.seed(worker + torch.initial_seed() % 1000)


def with_own_generator(**options: Any) -> DataLoader[Any]:
    return DataLoader(
        Squares(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3), **options
    )


LOADERS: dict[str, Callable[..., Iterable[Any]]] = {
    "shuffled": lambda **o: DataLoader(Squares(), batch_size=4, shuffle=True, **o),
    "in order": lambda **o: DataLoader(Squares(), batch_size=5, drop_last=True, **o),
    "single": lambda **o: DataLoader(Squares(7), batch_size=None, shuffle=True, **o),
    "own generator": with_own_generator,
    "distributed": lambda **o: DataLoader(
        Squares(), batch_size=3, sampler=DistributedSampler(Squares(), 2, 1, seed=5), **o
    ),
    "replacement": lambda **o: DataLoader(
        Squares(),
        batch_size=4,
        sampler=RandomSampler(Squares(), replacement=True, num_samples=30),
        **o,
    ),
    "weighted": lambda **o: DataLoader(
        Squares(3), batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0], 9), **o
    ),
    "batch sampler": lambda **o: DataLoader(
        Squares(), batch_sampler=BatchSampler(RandomSampler(Squares()), 4, drop_last=False), **o
    ),
    "eager": lambda **o: DataLoader(Squares(), batch_sampler=Eager(), **o),
    "own sampler": lambda **o: DataLoader(Squares(), batch_size=4, sampler=Shuffling(21), **o),
    "init": lambda **o: DataLoader(
        Squares(), batch_size=4, shuffle=True, worker_init_fn=reseed if o else None, **o
    ),
    "iterable": lambda **o: DataLoader(Stream(), batch_size=3, **o),
}
WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "3 persistent": {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 1},
}


@dataclass
class Training:
    """Stands for a process: what it has drawn, and the states after its steps as a job would keep them."""

    told: list[Any] = field(default_factory=list)
    step_ended: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # states
    boundary: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    scheduled: int = 0

    def __post_init__(self) -> None:
        self.step = 0
        self.base = 0
        self.random = RandomState(None)
        self.turns = 0
        self.restored: Encoded | None = None
        self.scheduled_as_loop_began = 0
        self.loop = Loop(
            begins=self._begins,
            boundary=self._boundary,
            write_again=self._write_again,
            put_back=self._put_back,
            warn=self.warnings.append,
        )

    def optimize(self) -> None:
        self.step, self.turns = self.step + 1, self.turns + 1
        self.told.append(("step", self.step))
        self.step_ended[self.step] = self._state()
        self.boundary[self.step] = self._state()

    def restore(self, state: tuple[Any, ...]) -> None:
        step, told, scheduled, generators, loop = state
        self.step, self.base, self.told, self.scheduled = step, step, [*told], scheduled
        self.restored = generators
        self.random.restore(decoded(generators))
        self.loop.restore(decoded(loop), decoded(loop), step)

    def _state(self) -> tuple[Any, ...]:
        return self.step, [*self.told], self.scheduled, self.random.capture(), self.loop.capture()

    def _begins(self) -> None:
        self.scheduled_as_loop_began = self.scheduled

    def _boundary(self) -> bool:
        made, self.turns = self.turns > 0, 0
        if made:
            self.boundary[self.step] = self._state()
        return made

    def _write_again(self) -> None:
        if self.step > self.base:
            self.boundary[self.step] = self._state()

    def _put_back(self) -> None:
        if self.restored is not None:
            self.random.restore(decoded(self.restored))
            self.scheduled = self.scheduled_as_loop_began


def decoded(encoded: Encoded) -> Any:
    return tree_codec.decode(encoded.tree, encoded.tensors)


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def generators() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, Tensor) else [listed(one) for one in batch]


Script = Callable[[Training, Any, bool], None]


def usual(training: Training, loader: Any, plain: bool) -> None:
    """The loop of every tutorial: draws in the head, in the iterations and at the end of each epoch."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        generators()
        if plain and isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
        training.told.append(("evaluated", epoch, generators(), training.scheduled))
        training.scheduled += 1


def run(script: Script, build: Callable[[], Any], plain: bool = False) -> Training:
    seed(1)
    training = Training()
    script(training, build(), plain)
    training.told.append(generators())
    return training


def resumed(script: Script, build: Callable[[], Any], state: tuple[Any, ...]) -> Training:
    seed(99)
    loader = build()
    training = Training()
    training.restore(state)
    script(training, loader, False)
    training.told.append(generators())
    return training


def check_all(script: Script, build: Callable[[], Any], steps: Iterable[int] | None = None) -> Training:
    """Go on from each step, as the script left it, and compare with the run that nothing disturbs."""
    undisturbed = run(script, build)
    for step in undisturbed.boundary if steps is None else steps:
        for state in (undisturbed.step_ended[step], undisturbed.boundary[step]):
            again = resumed(script, build, state)
            assert again.told == undisturbed.told, step
    return undisturbed


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_that_is_taken_up_again_is_as_one_that_nothing_disturbs(kind: str, workers: str) -> None:
    def build() -> Any:
        return LOADERS[kind](**WORKERS[workers])

    plain = run(usual, build, plain=True)
    undisturbed = run(usual, build)
    assert undisturbed.told == plain.told, "the loop alone changes nothing"
    last = undisturbed.step
    every = {1, 2, last // 3, last // 3 + 1, last // 2, last - 1, last}
    check_all(usual, build, range(1, last + 1) if workers == "0" else sorted(every))
