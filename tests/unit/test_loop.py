"""Loops that go on where they were: batches and all generators as in a run that nothing disturbs."""

import _thread
import contextlib
import gc
import itertools
import multiprocessing
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from jitckpt._seen import Seen
from jitckpt.data import chosen_samples, loop, made_in_loop, reading_again
from jitckpt.data.between_loops import MOST_DRAWN, PASSED_BY, TOO_MANY, Stretch
from jitckpt.data.data_pass import PassState
from jitckpt.data.dataset_generators import places_of
from jitckpt.data.loop import TOLD_BEFORE, Loop
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import JitckptError

EPOCHS = 2
WATCH = made_in_loop.watch
pytestmark = pytest.mark.usefixtures("nothing_is_watched")


class Squares(Dataset[Any]):
    """Augments by all three generators, and notes, where nobody keeps it, what was read in this process."""

    def __init__(self, length: int = 22) -> None:
        self.length, self.read = length, array("q")

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

    num_workers = 0

    def __init__(self) -> None:
        self.position = self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        random.random()
        return self._give()

    def _give(self) -> Iterator[Tensor]:
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


def weighted_anew(training: "Training", loader: Any, plain: bool) -> None:
    """Changes after each epoch how the next one's sampler draws."""
    loop, sampler = training.loop, loader.sampler
    for epoch in range(3) if plain else loop.epochs(3):
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
        sampler.weights = sampler.weights * torch.tensor([1.0, 0.2, 3.0])
        sampler.weights[epoch] += 2


def by_difficulty(training: "Training", loader: Any, plain: bool) -> None:
    """The same in the places of a list and an array."""
    loop, sampler = training.loop, loader.sampler
    for epoch in range(3) if plain else loop.epochs(3):
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch)))
            training.optimize()
        sampler.order.reverse()
        sampler.left_out[epoch] = True


class Curriculum(Sampler[int]):
    def __init__(self) -> None:
        self.order, self.left_out = [*range(9)], numpy.zeros(9, dtype=bool)
        self.names = object()

    def __iter__(self) -> Iterator[int]:
        return (one for one in self.order if not self.left_out[one])


class Levelled(Sampler[int]):
    """Draws by what the script sets, and by what it has drawn before."""

    def __init__(self) -> None:
        self.level, self.weights, self.passes = 0, torch.ones(6), 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = [(one * 5 + self.level + self.passes) % 6 for one in range(6)]
        return iter(sorted(order, key=lambda one: float(self.weights[one])))


def set_before_another_pass(training: "Training", loaders: Any, plain: bool) -> None:
    """A sampler is set as an epoch begins, and its pass comes later in it."""
    loop = training.loop
    sampler = loaders[1].sampler
    for epoch in range(3) if plain else loop.epochs(3):
        sampler.level = epoch * 2
        sampler.weights = torch.arange(6.0).roll(epoch)
        for loader in loaders:
            for batch in loader if plain else loop.batches(loader):
                training.told.append((epoch, listed(batch)))
                training.optimize()


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
# With persistent workers these have all there is of kinds.
CASES = [(kind, workers) for kind in LOADERS for workers in ("0", "2")]
CASES += [(kind, "3 persistent") for kind in ("shuffled", "own generator", "init", "iterable")]


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
        self.restored_told: list[Any] = []
        self.captured, self.look = Encoded(None, {}), Seen()
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
        self.restored, self.restored_told = generators, told
        self.random.restore(decoded(generators))
        self.loop.restore(decoded(loop), decoded(loop), step)

    def _state(self) -> tuple[Any, ...]:
        return self.step, [*self.told], self.scheduled, self.random.capture(), self._capture()

    def _capture(self) -> Encoded:
        """Capture the loop; of what looks as it did nothing but the numbers may be new."""
        captured = self.loop.capture()
        assert bytes_of(captured)[loop.NUMBERS] == self.loop.numbers()
        if self.captured.tensors and self.look.is_same():
            numbers = {loop.NUMBERS: self.loop.numbers()}
            assert captured.tree == self.captured.tree
            assert bytes_of(captured) == bytes_of(self.captured) | numbers
        else:
            self.captured, self.look = captured, self.loop.look()
        return captured

    def _begins(self) -> None:
        self.scheduled_as_loop_began = self.scheduled

    def _boundary(self, frame: FrameType | None) -> bool:
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
            self.told[:] = self.restored_told


def decoded(encoded: Encoded) -> Any:
    return tree_codec.decode(encoded.tree, encoded.tensors)


def bytes_of(encoded: Encoded) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in encoded.tensors.items()}


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def generators() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def listed(batch: Any) -> Any:
    if isinstance(batch, str | int):
        return batch
    return batch.tolist() if isinstance(batch, Tensor) else [listed(one) for one in batch]


Script = Callable[[Training, Any, bool], None]


def tell(loader: Any, epoch: int) -> None:
    """As the job's loop does where the script does not."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        loader.sampler.set_epoch(epoch)


def usual(training: Training, loader: Any, plain: bool) -> None:
    """The loop of every tutorial: draws in the head, in the iterations and at the end of each epoch."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        generators()
        if plain:
            tell(loader, epoch)
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
    training.loop.close()
    return training


def resumed(script: Script, build: Callable[[], Any], state: tuple[Any, ...]) -> Training:
    seed(99)
    loader = build()
    training = Training()
    training.restore(state)
    script(training, loader, False)
    training.told.append(generators())
    training.loop.close()
    return training


def check_all(script: Script, build: Callable[[], Any], steps: Iterable[int] | None = None) -> Training:
    """Go on from each step, as the script left it, and compare with the run that nothing disturbs."""
    undisturbed = run(script, build)
    for step in undisturbed.boundary if steps is None else steps:
        for state in (undisturbed.step_ended[step], undisturbed.boundary[step]):
            again = resumed(script, build, state)
            assert again.told == undisturbed.told, step
    return undisturbed


def build_of(kind: str, workers: str) -> Callable[[], Any]:
    return lambda: LOADERS[kind](**WORKERS[workers])


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_a_run_that_is_taken_up_again_is_as_one_that_nothing_disturbs(kind: str, workers: str) -> None:
    build = build_of(kind, workers)
    plain = run(usual, build, plain=True)
    assert run(usual, build).told == plain.told, "the loop alone changes nothing"
    last = plain.step
    first_epoch = last // EPOCHS
    # The middle of the first epoch, its end and the middle of the last one.
    few = (first_epoch // 2 + 1, first_epoch, first_epoch + 2)
    check_all(usual, build, few if WORKERS[workers] else range(1, last + 1))


def test_in_most_iterations_nothing_but_the_numbers_is_new() -> None:
    training = Training()
    changes = []
    for number, _ in enumerate(training.loop.batches(LOADERS["shuffled"]())):
        if number > 0:
            assert training.look.is_same()
            changes.append(training.loop.numbers())
        training.optimize()
    assert len({*changes}) == len(changes) > 2


CHANGES_OF_A_LOOP: list[Callable[[Loop], object]] = [
    lambda loop: loop._passes.append(PassState()),
    lambda loop: loop._previous.clear(),
    lambda loop: loop._between.ended.append(Stretch()),
    lambda loop: loop._between.begin_epoch(),
    lambda loop: setattr(loop._between.ended[0], "drawn_from", b"drawn"),
    lambda loop: setattr(loop._between.ended[0], "said", b"said"),
    lambda loop: loop._passes[0].forget(),
    lambda loop: loop._passes[0].now.update({0: b"other"}),
    lambda loop: loop._passes[0].at_start.update({1: b"new"}),
    *[
        partial(lambda name, value, loop: setattr(loop._previous[0], name, value), name, value)
        for name, value in {
            "begun": b"a",
            "seed": 5,
            "at_start": {0: b"c"},
            "now": {2: b"d"},
            "own": b"e",
            "ahead": b"f",
            "dealt": (2, 1),
            "before": 3,
            "chosen": b"g",
        }.items()
    ],
]


@pytest.mark.parametrize("change", CHANGES_OF_A_LOOP)
def test_whatever_else_is_new_in_a_loop_is_seen(change: Callable[[Loop], object]) -> None:
    loop = Training().loop
    loop._passes.append(PassState(begun=b"b", now={0: b"now"}))
    loop._previous.append(PassState())
    loop._between.ended.append(Stretch(b"before"))
    before, look = loop.capture(), loop.look()
    assert look.is_same()
    change(loop)
    now = loop.capture()
    assert (now.tree, bytes_of(now)) != (before.tree, bytes_of(before)), "it is told"
    assert not look.is_same()


def test_skipped_data_are_not_read_again() -> None:
    build = build_of("shuffled", "0")
    undisturbed = run(usual, build)
    seed(99)
    loader: Any = build()
    training = Training()
    training.restore(undisturbed.boundary[4])
    usual(training, loader, False)
    of_an_epoch = len(loader.dataset)
    assert len(loader.dataset.read) == EPOCHS * of_an_epoch - 4 * loader.batch_size
    assert training.warnings == []


def test_of_iterable_data_one_line_says_that_they_are_read_again() -> None:
    build = build_of("iterable", "0")
    again = Training()
    again.restore(run(usual, build).boundary[2])
    usual(again, build(), False)
    (warning,) = again.warnings
    assert "2 batches that a DataLoader gave before the failure are read again" in warning


def test_what_reading_again_would_take_is_named_before_and_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = build_of("iterable", "0")
    monkeypatch.setattr(reading_again, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(reading_again, "TELL_AFTER", 0.0)
    first = run(usual, build)
    assert "the 1 batches that this DataLoader has given by now would be read again" in first.warnings[0]
    again = Training()
    again.restore(first.boundary[2])
    usual(again, build(), False)
    assert again.warnings[1].startswith(
        "1 of the 2 batches that a DataLoader gave before the failure are read"
    )
    ready = run(usual, build_of("shuffled", "0"))
    assert ready.warnings == [], "a map dataset's are left out"


@pytest.mark.parametrize("build", [Stateful, lambda: [torch.tensor([one]) for one in range(5)]])
def test_other_loaders_go_on_by_their_own_state_or_are_read_again(build: Callable[[], Any]) -> None:
    assert run(usual, build, plain=True).told == check_all(usual, build).told


def test_that_a_loaders_own_state_has_no_random_numbers_of_workers_is_said_once() -> None:
    loader = Stateful()
    loader.num_workers = 2
    (warning,) = run(usual, lambda: loader).warnings
    assert "does not hold its workers' random numbers" in warning


def test_a_sampler_that_gives_another_order_is_named() -> None:
    orders = iter([[3, 1, 2, 0], [0, 1, 2, 3]])

    def build() -> Any:
        return DataLoader(Squares(4), sampler=next(orders))

    again = resumed(usual, build, run(usual, build).boundary[2])
    (warning,) = [text for text in again.warnings if "order" in text]
    assert warning.startswith("The BatchSampler gives another order than before the failure")


def zipped(training: Training, loaders: Any, plain: bool) -> None:
    """Two loaders at once, of which the second is the shorter; then a third one."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        first, second, third = loaders if plain else map(loop.batches, loaders)
        for one, other in zip(first, second, strict=False):
            training.told.append((epoch, listed(one), listed(other), generators()))
            training.optimize()
        training.told.append(generators())
        for number, batch in enumerate(third, 0 if plain else third.first):
            training.told.append((number, listed(batch)))
            training.optimize()
        training.told.append(("evaluated", generators()))


def left_early(training: Training, loader: Any, plain: bool) -> None:
    """Leaves each epoch with break, after the step or before it."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        batches = loader if plain else loop.batches(loader)
        for number, batch in enumerate(batches, 0 if plain else batches.first):
            if epoch == 1 and number == 2:
                break
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
            if number == 3:
                break
        training.told.append(("evaluated", epoch, generators()))


def by_steps(training: Training, loader: Any, plain: bool) -> None:
    """Draws batches for ever; makes no optimizer step in every third iteration, and more in others."""

    def forever() -> Iterator[Any]:
        while True:
            yield from loader if plain else training.loop.batches(loader)

    batches = forever()
    for step in range(14) if plain else training.loop.steps(14):
        training.told.append((step, listed(next(batches)), generators()))
        if step % 3 != 1:
            training.optimize()
        training.told.append(generators())


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("script", [zipped, left_early, by_steps])
def test_other_loops_are_exact_too(script: Script, workers: str) -> None:
    def build() -> Any:
        options = WORKERS[workers]
        one = LOADERS["shuffled"](**options)
        return one if script is not zipped else (one, LOADERS["in order"](), LOADERS["own generator"]())

    undisturbed = run(script, build)
    assert undisturbed.told == run(script, build, plain=True).told
    steps = range(1, undisturbed.step + 1) if workers == "0" else (3, 4, 5)
    for step in steps:
        assert resumed(script, build, undisturbed.boundary[step]).told == undisturbed.told, step


def test_workers_of_a_loader_that_the_script_let_go_end() -> None:
    training = Training()
    before = len(multiprocessing.active_children())
    for _ in training.loop.epochs(4):
        loader = LOADERS["shuffled"](num_workers=1, persistent_workers=True)
        for _ in training.loop.batches(loader):
            training.optimize()
        del loader
    assert len(training.loop._loaders) == 1
    until = time.monotonic() + 60
    gc.collect()  # a pass and its workers know each other
    while len(multiprocessing.active_children()) > before + 1:
        assert time.monotonic() < until, "the newest loader's worker is not the only one"
        time.sleep(0.1)
    training.loop.close()


def test_persistent_workers_of_a_loop_that_was_left_have_made_more_batches() -> None:
    build = build_of("shuffled", "3 persistent")
    undisturbed = run(left_early, build)
    assert undisturbed.told == run(left_early, build, plain=True).told
    for step in (3, 4, 5):
        assert resumed(left_early, build, undisturbed.boundary[step]).told == undisturbed.told, step


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 12),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    share=st.floats(0, 1),
)
def test_any_position_of_any_plain_loader(
    length: int, size: int, drop_last: bool, shuffle: bool, share: float
) -> None:
    def build() -> Any:
        return DataLoader(Squares(length), batch_size=size, shuffle=shuffle, drop_last=drop_last)

    steps = run(usual, build).step
    if steps:
        check_all(usual, build, [max(1, round(share * steps))])


def test_a_loop_in_a_loop_over_batches_is_refused_at_its_second_step() -> None:
    training = Training()
    outer, inner = LOADERS["in order"](), LOADERS["shuffled"]()
    with pytest.raises(JitckptError, match="begun in another one, and makes optimizer steps"):  # noqa: PT012
        for _ in training.loop.epochs(1):
            for _ in training.loop.batches(outer):
                for _ in training.loop.batches(inner):
                    training.optimize()
    assert training.step == 1


def test_loops_of_which_only_one_can_go_on_are_refused() -> None:
    training = Training()
    outer = training.loop.epochs(2)
    next(outer)
    with pytest.raises(JitckptError, match="must be the outermost"):
        next(training.loop.epochs(2))
    inner = training.loop.steps(2)
    next(inner)
    with pytest.raises(JitckptError, match="only one of them can go on"):
        next(training.loop.steps(2))


def test_an_exception_in_a_loop_does_not_end_it() -> None:
    training = Training()

    def train() -> None:
        for _ in training.loop.epochs(1):
            for number, _ in enumerate(training.loop.batches(LOADERS["in order"]())):
                training.optimize()
                if number == 1:
                    raise ValueError("as if something had failed")

    with pytest.raises(ValueError, match="as if"):
        train()
    assert not training.loop._passes[0].ended


def test_a_count_beside_the_batches_is_named() -> None:
    training = Training()
    for _ in training.loop.epochs(1):
        for _ in itertools.islice(training.loop.batches(LOADERS["in order"]()), 2):
            training.optimize()
    (warning,) = training.warnings
    assert "islice(batches, n - batches.first)" in warning


def bar(loader: Any) -> Any:
    """Return a progress bar: a generator of a module that is known as one."""
    names: dict[str, Any] = {"__name__": "tqdm.std"}
    exec("def bar(loader):\n    yield from loader\n", names)
    return names["bar"](loader)


def numbered(training: Training, loaders: Any, plain: bool) -> None:
    """Counts its batches, in all ways that a restart can go on with."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        one, other = loaders if plain else map(loop.batches, loaders)
        for number, batch in enumerate(one, 1):
            training.told.append((epoch, number, listed(batch), generators()))
            training.optimize()
        for number, (first, second) in enumerate(zip(other, iter(range(99)), strict=False)):
            training.told.append((epoch, number, listed(first), second * 0))
            training.optimize()
        for number, batch in enumerate(bar(other)):
            training.told.append((epoch, number, listed(batch)))
            training.optimize()


def test_a_later_loader_of_an_epoch_is_not_taken_for_another_than_it_was_in_the_one_before() -> None:
    """A sampler that is told the epoch gives this one's order, where the one before is gone through."""

    def tasks(training: Training, loaders: Any, plain: bool) -> None:
        for epoch in training.loop.epochs(3):
            for loader in loaders:
                for batch in training.loop.batches(loader):
                    training.told.append((epoch, listed(batch)))
                    training.optimize()

    def build() -> Any:
        return [LOADERS["distributed"]() for _ in range(2)]

    undisturbed = run(tasks, build)
    for state in undisturbed.boundary.values():
        again = resumed(tasks, build, state)
        assert (again.told, again.warnings) == (undisturbed.told, [])


def test_a_number_beside_the_batches_goes_on() -> None:
    def build() -> Any:
        return LOADERS["shuffled"](), LOADERS["in order"]()

    assert run(numbered, build, plain=True).told == check_all(numbered, build).told


def test_what_keeps_batches_for_later_rounds_is_named() -> None:
    training = Training()
    many, few = LOADERS["in order"](), LOADERS["single"]()
    for _ in training.loop.epochs(1):
        batches = training.loop.batches(few)
        for _ in zip(training.loop.batches(many), itertools.cycle(batches), strict=False):
            training.optimize()
    (warning,) = training.warnings
    assert "while True: yield from job.batches(loader)" in warning


def test_what_a_comprehension_collects_is_named_if_steps_are_made_in_it() -> None:
    """Its list is in no variable before it is whole. An evaluation is made again from its beginning."""

    def collected(*, trains: bool) -> list[str]:
        training = Training()
        for _ in training.loop.epochs(1):
            batches = training.loop.batches(LOADERS["in order"]())
            act = training.optimize if trains else training.random.capture
            assert sum(len(batch) for batch in batches if [act()])
            for _ in (batch for batch in training.loop.batches(LOADERS["single"]())):
                training.optimize()
        return training.warnings

    assert collected(trains=False) == []
    (warning,) = collected(trains=True)
    assert "Write a for statement that appends to a list" in warning


def test_a_save_of_a_loop_over_range_gives_the_step_to_go_on_from() -> None:
    training = Training()
    training.loop.count_from(3)
    assert [*training.loop.steps(5)] == [3, 4]
    assert len(training.loop.batches(LOADERS["shuffled"]())) == 6


def test_what_a_replica_saw_of_a_loops_end_counts() -> None:
    """This rank was killed between its last step and the break that its replica came to."""
    build = build_of("shuffled", "0")
    undisturbed = run(left_early, build)
    _, told, scheduled, generators_then, loop = undisturbed.step_ended[4]
    again = Training()
    again.restore((4, told, scheduled, generators_then, loop))
    own, of_replica = decoded(loop), decoded(undisturbed.boundary[4][4])
    assert own["numbers"].tolist() != of_replica["numbers"].tolist()
    again.loop.restore(own, of_replica, 4)
    left_early(again, build(), False)
    again.told.append(generators())
    assert again.told == undisturbed.told


def steps_before(training: Training, loader: Any, plain: bool) -> None:
    for step in range(3) if plain else training.loop.steps(3):
        training.told.append((step, generators()))
        training.optimize()
    usual(training, loader, plain)


def batches_before(training: Training, loader: Any, plain: bool) -> None:
    for batch in loader if plain else training.loop.batches(loader):
        training.told.append((listed(batch), generators()))
        training.optimize()
    usual(training, loader, plain)


def between_epochs(training: Training, loader: Any, plain: bool) -> None:
    """And behind them all."""
    usual(training, loader, plain)
    batches_before(training, loader, plain)
    steps_before(training, loader, plain)
    for _ in range(2):
        for batch in loader if plain else training.loop.batches(loader):
            training.told.append((listed(batch), generators()))
            training.optimize()


@pytest.mark.parametrize("script", [steps_before, batches_before, between_epochs])
def test_loops_that_no_loop_over_epochs_is_around_are_passed_by_in_later_ones(script: Script) -> None:
    """In a later epoch a restart went through them again, or took one for a pass of that epoch."""
    build = build_of("shuffled", "0")
    assert run(script, build).told == run(script, build, plain=True).told
    assert check_all(script, build).warnings == []


class Enough(Exception):
    """Raised by a script, and caught there."""


def in_two_phases(training: Training, loader: Any) -> None:
    """The first phase is left by an exception behind its fourth step."""

    def phase(name: str, most: int) -> None:
        for epoch in training.loop.epochs(EPOCHS):
            for batch in training.loop.batches(loader):
                training.told.append((name, epoch, listed(batch)))
                training.optimize()
                if training.step == most:
                    raise Enough

    with contextlib.suppress(Enough):
        phase("first", 4)
    phase("second", 0)


def test_ranks_agree_which_phase_goes_on_where_an_exception_has_ended_one() -> None:
    """A replica may have gone on to the next phase while this rank was killed on its way there."""
    build = build_of("shuffled", "0")
    seed(1)
    undisturbed = Training()
    in_two_phases(undisturbed, build())
    state, replicas = undisturbed.step_ended[4], undisturbed.boundary[4]
    own, other = decoded(state[4]), decoded(replicas[4])
    phases = []
    for states in [(own, other), (other, own)]:
        again = Training()
        again.restore(state)
        again.loop.restore(*states, 4)
        in_two_phases(again, build())
        phases.append([told[0] for told in again.told if told[0] != "step"])
    assert phases[0] == phases[1]
    assert any(loop.DROPPED in warning for warning in undisturbed.warnings)


def accumulating(training: Training, loader: Any, plain: bool) -> None:
    """Makes a step after each third batch; what an epoch's last batches have given goes on into the next."""
    loop = training.loop
    gathered: list[Any] = []
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        batches = loader if plain else loop.batches(loader)
        for number, batch in enumerate(batches, 0 if plain else batches.first):
            gathered.append((listed(batch), generators()))
            if number % 4 == 3:
                training.told.append([*gathered])
                training.optimize()
                gathered.clear()
        training.told.append(("evaluated", epoch, generators(), training.scheduled))
        training.scheduled += 1


def validating(training: Training, loaders: Any, plain: bool) -> None:
    """Iterates the data of its validation by the loop, too."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        first, second = loaders if plain else map(loop.batches, loaders)
        for batch in first:
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
        training.told.append([(listed(batch), generators()) for batch in second])
        training.told.append(("evaluated", epoch, generators(), training.scheduled))
        training.scheduled += 1


class Augmented(Dataset[Any]):
    """Draws from generators of its own, one of them in a transform."""

    def __init__(self) -> None:
        class Noise:
            def __init__(self) -> None:
                self.random, self.torch = random.Random(3), torch.Generator().manual_seed(4)

        self.numpy, self.transforms = numpy.random.default_rng(5), [Noise()]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        noise = self.transforms[0]
        drawn = [float(self.numpy.random()), noise.random.random()]
        return torch.tensor([index, *drawn, float(torch.rand((), generator=noise.torch))])


class AugmentedStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.numpy = numpy.random.RandomState(5)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number, float(self.numpy.rand())]) for number in range(10))


@pytest.mark.parametrize("workers", ["0", "2", "3 persistent"])
@pytest.mark.parametrize("dataset", [Augmented, AugmentedStream])
def test_generators_of_the_datasets_own_go_on(dataset: Callable[[], Any], workers: str) -> None:
    def build() -> Any:
        return DataLoader(dataset(), batch_size=3, **WORKERS[workers])

    assert run(usual, build).told == run(usual, build, plain=True).told
    check_all(usual, build, None if workers == "0" else (2, 4, 5))


class Mixing:
    """Draws from generators of its own as it makes a batch."""

    def __init__(self) -> None:
        self.numpy, self.torch = numpy.random.RandomState(5), torch.Generator().manual_seed(4)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        drawn = [float(self.numpy.uniform()), float(torch.rand((), generator=self.torch))]
        return torch.cat([torch.stack(samples).flatten().double(), torch.tensor(drawn).double()])

    def collate(self, samples: list[Tensor]) -> Tensor:
        return self(samples)


def mixed(mixing: Mixing, samples: list[Tensor]) -> Tensor:
    return mixing(samples)


def closing_over(mixing: Mixing) -> Callable[[list[Tensor]], Tensor]:
    def collate(samples: list[Tensor]) -> Tensor:
        return mixing(samples)

    return collate


@pytest.mark.parametrize("workers", ["0", "2", "3 persistent"])
@pytest.mark.parametrize("how", ["object", "method", "partial", "closure"])
def test_generators_of_what_makes_batches_go_on(how: str, workers: str) -> None:
    def build() -> Any:
        mixing = Mixing()
        ways: dict[str, Any] = {"object": mixing, "method": mixing.collate, "partial": partial(mixed, mixing)}
        collate = ways.get(how) or closing_over(mixing)
        return DataLoader(Squares(), batch_size=3, collate_fn=collate, **WORKERS[workers])

    assert run(usual, build).told == run(usual, build, plain=True).told
    check_all(usual, build, None if workers == "0" else (2, 4))


def test_what_a_script_changes_of_a_sampler_comes_back() -> None:
    build = build_of("weighted", "0")
    assert run(weighted_anew, build).told == run(weighted_anew, build, plain=True).told
    check_all(weighted_anew, build)

    def curriculum() -> Any:
        return DataLoader(Squares(), batch_size=2, sampler=Curriculum())

    check_all(by_difficulty, curriculum)

    def levelled() -> Any:
        return LOADERS["shuffled"](), DataLoader(Squares(6), batch_size=2, sampler=Levelled())

    assert (
        run(set_before_another_pass, levelled).told == run(set_before_another_pass, levelled, plain=True).told
    )
    check_all(set_before_another_pass, levelled)


@pytest.mark.parametrize("script", [accumulating, validating])
def test_batches_without_a_step_belong_to_the_next_one(script: Script) -> None:
    def build() -> Any:
        one = LOADERS["shuffled"]()
        return one if script is accumulating else (one, LOADERS["shuffled"]())

    assert run(script, build).told == run(script, build, plain=True).told
    check_all(script, build)


def test_a_loop_that_nothing_drops_but_the_interpreters_end_was_not_left_by_the_script() -> None:
    """There is no frame then below the iterator's own."""
    told: list[bool] = []

    def outermost() -> None:
        told.append(loop._who_leaves() is not None)

    _thread.start_new_thread(outermost, ())
    end = time.monotonic() + 60
    while not told:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert told == [False]


class GoingOn(IterableDataset[Any]):
    """Gives four numbers in a pass, from where the pass before has ended; `count` is of each pass alone."""

    def __init__(self, rank: int = 7) -> None:
        self.rank, self.place, self.count = rank, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.count = 0
        while self.count < 4:
            yield torch.tensor([self.place, self.count, self.rank])
            self._advance()

    def _advance(self) -> None:
        self.place += 1
        self.count += 1


class Inside(IterableDataset[Any]):
    def __init__(self, inner: IterableDataset[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.inner)


@pytest.mark.parametrize("script", [usual, left_early])
@pytest.mark.parametrize("dataset", [GoingOn, lambda: Inside(GoingOn())])
def test_a_stream_goes_on_where_it_was(dataset: Callable[[], Any], script: Script) -> None:
    def build() -> Any:
        return DataLoader(dataset(), batch_size=2)

    assert run(script, build).told == run(script, build, plain=True).told
    check_all(script, build)


def test_what_a_stream_begins_anew_and_what_it_never_sets_is_no_place_of_it() -> None:
    assert places_of(GoingOn) == {"place"}


class ByIterator(IterableDataset[Any]):
    """Goes on by an iterator, or has one of each pass alone."""

    def __init__(self, afresh: bool) -> None:
        self.afresh, self.numbers = afresh, iter(range(100))

    def __iter__(self) -> Iterator[int]:
        if self.afresh:
            self.numbers = iter(range(4))
        return itertools.islice(self.numbers, 4)


class Reader:
    """Of a stream: counts what it has read, and all that is read in one pass."""

    def __init__(self) -> None:
        self.offset, self.of_pass, self.path = 0, 0, "there"
        self.numbers = iter(range(100))

    def begin(self) -> None:
        self.of_pass = 0

    def read(self) -> int:
        self.offset += 1
        self.of_pass += 1
        return self.offset


class Handed:
    """A reader of each pass alone, which numbers come from."""

    def __init__(self) -> None:
        self.numbers: Iterator[int] = iter(())
        self.times = 0

    def begin(self) -> None:
        self.numbers, self.times = iter(range(4)), 0

    def read(self) -> int:
        self.times += 1
        return next(self.numbers)


class ByReader(IterableDataset[Any]):
    def __init__(self, reader: Any) -> None:
        self.readers = [reader]

    def __iter__(self) -> Iterator[int]:
        (reader,) = self.readers
        reader.begin()
        for _ in range(4):
            yield reader.read()


@pytest.mark.parametrize(
    ("dataset", "workers", "named"),
    [
        (lambda: ByIterator(False), "0", "ByIterator.numbers"),
        (lambda: ByIterator(True), "0", None),
        (lambda: ByReader(Reader()), "0", "Reader.numbers, Reader.offset"),
        (lambda: ByReader(Handed()), "0", None),
        (GoingOn, "0", None),
        (GoingOn, "2", None),
        (GoingOn, "3 persistent", "GoingOn.place"),
        (Stream, "3 persistent", None),
    ],
)
def test_a_place_that_no_save_holds_is_named_as_the_second_pass_begins(
    dataset: Callable[[], Any], workers: str, named: str | None
) -> None:
    training = Training()
    batches = training.loop.batches(DataLoader(dataset(), batch_size=2, **WORKERS[workers]))
    for number in range(3):
        assert [*batches]
        said = [text for text in training.warnings if "goes on in each pass" in text]
        assert len(said) == (number > 0 and named is not None)
    assert all(f"({named})" in text for text in said)
    training.loop.close()


def choosing(training: Training, kinds: Any, plain: bool) -> None:
    """Chooses each epoch's samples by what it has come to, and another number of them, as it begins."""
    kind, numbers = kinds
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        hardest = [number for number in range(40) if (number + training.step) ** 2 % 7 > training.step % 4]
        samples = Subset(numbers, kind(hardest))
        loader = DataLoader(samples, batch_size=4, shuffle=True)
        if kind is numpy.array:
            dealt: DistributedSampler[Any] = DistributedSampler(samples, 2, 0)
            loader = DataLoader(samples, batch_size=4, sampler=dealt)
            dealt.set_epoch(epoch)
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()


@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor])
def test_samples_that_are_chosen_as_an_epoch_begins_are_chosen_again(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def build() -> Any:
        return kind, Squares(40)

    assert run(choosing, build).told == run(choosing, build, plain=True).told
    check_all(choosing, build, (2, 6) if kind is torch.tensor else (2, 5, 6, 8))


def in_an_order_of_its_own(training: Training, count: int, plain: bool) -> None:
    """Draws the order as the epoch begins, by all generators, and reads no loader; then evaluates."""
    loop = training.loop
    for epoch in range(3) if plain else loop.epochs(3):
        order = torch.randperm(count).tolist() if epoch < 2 else [*range(count)]
        noise = generators() if epoch < 2 else []
        for number in range(count) if plain else loop.batches(range(count)):
            training.told.append((epoch, order[number], noise, generators()))
            training.optimize()
        training.told.append(generators())


def test_what_is_drawn_before_an_epochs_batches_is_drawn_again() -> None:
    assert run(in_an_order_of_its_own, lambda: 4).told == run(in_an_order_of_its_own, lambda: 4, True).told
    undisturbed = check_all(in_an_order_of_its_own, lambda: 4)
    kept = [len(decoded(state[-1])["between"][0]["drawn"]) for state in undisturbed.step_ended.values()]
    assert [size > 0 for size in kept] == [True] * 8 + [False] * 4, "where nothing is drawn nothing is kept"


def of_a_version_before(loop: Encoded) -> Encoded:
    """What it told of a loop: in the place of stretches an epoch's head, as its first pass had begun."""
    (head,) = loop.tree["between"] or [{name: {"$tensor": "loop.nothing"} for name in ("drawn", "said")}]
    tree = {name: one for name, one in loop.tree.items() if name != "between"}
    nothing = {"loop.nothing": torch.zeros(0, dtype=torch.uint8)}
    return Encoded({**tree, "epoch": head["drawn"], "head": head["said"]}, {**loop.tensors, **nothing})


def test_what_a_version_before_kept_of_an_epochs_head_is_drawn_again() -> None:
    undisturbed = run(in_an_order_of_its_own, lambda: 4)
    for step in (2, 4, 7):
        for *state, saved in (undisturbed.step_ended[step], undisturbed.boundary[step]):
            again = resumed(in_an_order_of_its_own, lambda: 4, (*state, of_a_version_before(saved)))
            assert again.told == undisturbed.told, step


def between_two_loops(training: Training, counts: tuple[int, int], plain: bool) -> None:
    """Two passes in an epoch, the first of which is left at times; and then one behind the epochs."""
    loop, told = training.loop, training.told
    for epoch in range(3) if plain else loop.epochs(3):
        for count in counts:
            order, noise = torch.randperm(count).tolist(), generators()
            for number in range(count) if plain else loop.batches(range(count)):
                if epoch == 1 and number == 2:
                    break
                told.append((epoch, count, order[number], noise, generators()))
                training.optimize()
            told.append(generators())
    noise = generators()
    for number in range(3) if plain else loop.batches(range(3)):
        told.append((number, noise))
        training.optimize()


def in_steps(training: Training, counts: tuple[int, int], plain: bool) -> None:
    """Loops over steps, whose order is drawn before them, in epochs and behind them."""
    loop, told = training.loop, training.told
    for epoch in range(3) if plain else loop.epochs(3):
        for count in counts:
            order, noise = torch.randperm(count).tolist(), generators()
            for step in range(count) if plain else loop.steps(count):
                if epoch == 1 and step == 2:
                    break
                told.append((epoch, order[step], noise, generators()))
                training.optimize()
    noise = generators()
    for step in range(3) if plain else loop.steps(3):
        told.append((step, noise))
        training.optimize()


def in_plain_epochs(training: Training, counts: tuple[int, int], plain: bool) -> None:
    """Epochs by range(): a restart goes through them all again."""
    loop, told = training.loop, training.told
    noise = [0.0]  # what is drawn before the first loop every start draws alike
    for epoch in range(4):
        for count in counts:
            for number in range(count) if plain else loop.batches(range(count)):
                told.append((epoch, number, noise, generators()))
                training.optimize()
            noise = generators()


@pytest.mark.parametrize("script", [between_two_loops, in_steps, in_plain_epochs])
def test_what_is_drawn_between_two_loops_is_drawn_again(script: Script) -> None:
    assert run(script, lambda: (4, 3)).told == run(script, lambda: (4, 3), True).told
    check_all(script, lambda: (4, 3))


def test_of_epochs_without_an_end_only_the_newest_random_numbers_are_kept() -> None:
    undisturbed = run(in_plain_epochs, lambda: (1,) * 10)
    kept = [len(one["drawn"]) for one in decoded(undisturbed.boundary[40][-1])["between"]]
    assert [size > 0 for size in kept] == [False] * (39 - MOST_DRAWN) + [True] * MOST_DRAWN
    assert undisturbed.warnings == [TOO_MANY]
    assert run(in_plain_epochs, lambda: (1,) * 4).warnings == []


class Labelled(Dataset[Any]):
    """Of the script's own: an array and a rank."""

    def __init__(self, numbers: Any) -> None:
        self.numbers, self.rank, self.names = numpy.array(numbers), len(numbers), [[one] for one in numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return int(self.numbers[index]) + self.names[index][0]


class Wrapped(Dataset[Any]):
    """The usual one around a Subset, under a name of its own."""

    def __init__(self, subset: Subset[Any]) -> None:
        self.subset = subset

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        return 2 * self.subset[index]


class Table:
    """No dataset of torch's, but samples by their numbers; others of it can be selected."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def select(self, indices: Iterable[int]) -> "Table":
        return Table([self.numbers[one] for one in indices])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


TABLE = Table([*range(40)])
MADE: dict[str, Callable[[list[int]], Any]] = {
    "Subset in a dataset": lambda found: DataLoader(
        Wrapped(Subset(Squares(40), found)), batch_size=4, shuffle=True
    ),
    "list of names": lambda found: [f"{number}.bin" for number in found],
    "list of numpy's numbers": lambda found: DataLoader(
        [*numpy.array(found)],  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
    ),
    "TensorDataset": lambda found: DataLoader(TensorDataset(torch.tensor(found)), batch_size=4),
    "weights": lambda found: DataLoader(
        Squares(40), batch_size=4, sampler=WeightedRandomSampler([one + 0.5 for one in found], len(found))
    ),
    "tensor": lambda found: DataLoader(torch.tensor(found), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "rows of a table": lambda found: DataLoader(TABLE.select(found), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "tuple of tensors": lambda found: torch.tensor(found[:8]).split(1),
    "sampler alone": lambda found: BatchSampler(SubsetRandomSampler(found), 4, drop_last=False),
    "count": lambda found: DataLoader(
        Squares(40), batch_size=4, sampler=RandomSampler(Squares(40), num_samples=len(found))
    ),
    "SubsetRandomSampler": lambda found: DataLoader(
        Squares(40), batch_size=4, sampler=SubsetRandomSampler(found)
    ),
    "batch size": lambda found: DataLoader(Squares(40), batch_size=1 + found[1] % 5),
    "list": lambda found: DataLoader(found, batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "list of tensors": lambda found: DataLoader([torch.ones(2) * one for one in found], batch_size=4),  # type: ignore[arg-type]
    "batches": lambda found: [torch.tensor(found[begin : begin + 4]) for begin in range(0, len(found), 4)],
    "ConcatDataset": lambda found: DataLoader(
        ConcatDataset([Subset(Squares(40), found[:6]), Subset(Squares(40), found[6:])]), batch_size=4
    ),
    "a class of the script's": lambda found: DataLoader(Labelled(found), batch_size=4),
    "seeded": lambda found: DataLoader(
        Squares(40), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "generator": lambda found: (torch.tensor([one]) for one in range(9)),
    "DistributedSampler": lambda found: DataLoader(
        subset := TensorDataset(torch.tensor(found)), batch_size=4, sampler=DistributedSampler(subset, 2, 0)
    ),
}


def made_anew(training: Training, kind: Any, plain: bool) -> None:
    """By what it has come to as each epoch begins."""
    loop = training.loop
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        loader = MADE[kind](
            [number for number in range(40) if (number + training.step) ** 2 % 7 > training.step % 4]
        )
        if kind == "DistributedSampler":
            loader.sampler.set_epoch(epoch)
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()


@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_of_samples_as_an_epoch_begins_is_made_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)
    assert run(made_anew, lambda: kind).told == run(made_anew, lambda: kind, plain=True).told
    check_all(made_anew, lambda: kind, (2, 6) if kind == "DistributedSampler" else (2, 6, 9, 10))


def test_a_zip_that_is_being_made_is_no_list_of_samples() -> None:
    # In a process of its own, which would end.
    text = """
from torch.utils.data import DataLoader
from jitckpt.data.loop import TOLD_BEFORE, Loop

nothing = lambda: None
loop = Loop(begins=nothing, boundary=lambda _: False, write_again=nothing, put_back=nothing, warn=print)
loader = DataLoader([1, 2], batch_size=None)
print([*zip(loop.batches(loader), loop.batches(loader))])
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stdout == "[(1, 1), (2, 2)]\n"


def test_loaders_in_turn_give_what_they_give_alone() -> None:
    def in_turn(training: Training, loaders: Any, plain: bool) -> None:
        loop = training.loop
        for epoch in range(4) if plain else loop.epochs(4):
            for batch in loaders[epoch % 2] if plain else loop.batches(loaders[epoch % 2]):
                training.told.append((epoch, listed(batch), generators()))
                training.optimize()

    def build() -> Any:
        return [
            DataLoader(
                Squares(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(number)
            )
            for number in range(2)
        ]

    assert run(in_turn, build).told == run(in_turn, build, plain=True).told


class Seeded:
    """Goes on by its own state, which does not hold the seed that it was made with."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.place = seed, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(9, generator=torch.Generator().manual_seed(10 * self.seed + self.epoch))
        while self.place < 3:
            self.place += 1
            yield order[3 * self.place - 3 : 3 * self.place]
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def with_one_made_anew(training: Training, data: Any, plain: bool) -> None:
    loop = training.loop
    for epoch in range(3) if plain else loop.epochs(3):
        for loader in (data, Seeded(epoch)):
            for batch in loader if plain else loop.batches(loader):
                training.told.append((epoch, listed(batch), generators()))
                training.optimize()


def test_one_that_has_a_state_and_is_made_in_each_epoch_goes_on_from_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def build() -> Any:
        return DataLoader(Squares(6), batch_size=2, shuffle=True)

    assert run(with_one_made_anew, build).told == run(with_one_made_anew, build, plain=True).told
    check_all(with_one_made_anew, build, (2, 5, 8, 10))


def epochs_after_epochs(training: Training, loader: Any, plain: bool) -> None:
    """Pretraining and fine-tuning, say."""
    for part, count in (("first", 2), ("second", 3)):
        for epoch in range(count) if plain else training.loop.epochs(count):
            for batch in loader if plain else training.loop.batches(loader):
                training.told.append((part, epoch, listed(batch), generators()))
                training.optimize()


def steps_after_steps(training: Training, epochs: int, plain: bool) -> None:
    loop = training.loop
    for epoch in range(epochs) if plain else loop.epochs(epochs):
        for part, count in (("first", 2), ("second", 3)):
            for step in range(count) if plain else loop.steps(count):
                training.told.append((epoch, part, step, generators()))
                training.optimize()


def steps_alone(training: Training, count: int, plain: bool) -> None:
    for part in range(count):
        for step in range(part + 2) if plain else training.loop.steps(part + 2):
            training.told.append((part, step, generators()))
            training.optimize()


@pytest.mark.parametrize(
    ("program", "build"),
    [
        (epochs_after_epochs, lambda: DataLoader(Squares(6), batch_size=2, shuffle=True)),
        (steps_after_steps, lambda: 2),
        (steps_alone, lambda: 3),
    ],
)
def test_loops_one_after_the_other_are_each_gone_through(program: Any, build: Callable[[], Any]) -> None:
    assert run(program, build).told == run(program, build, plain=True).told
    assert not run(program, build).warnings
    check_all(program, build)


def steps_with_each_batch(training: Training, loader: Any, plain: bool) -> None:
    for batch in loader if plain else training.loop.batches(loader):
        for step in range(2) if plain else training.loop.steps(2):
            training.told.append((step, listed(batch), generators()))
            training.optimize()


def test_a_loop_over_steps_in_one_over_batches_is_named_and_not_cut_short() -> None:
    def build() -> Any:
        return DataLoader(Squares(6), batch_size=2, shuffle=True)

    here = run(steps_with_each_batch, build)
    assert here.told == run(steps_with_each_batch, build, plain=True).told
    assert here.warnings[0].startswith("A loop over job.steps is begun in one over job.batches")


def begun_and_dropped(training: Training, loader: Any, plain: bool) -> None:
    """A loop that an exception leaves, and then the loop."""
    for epoch in range(3) if plain else training.loop.epochs(3):
        try:
            for batch in loader if plain else training.loop.batches(loader):
                training.told.append((epoch, listed(batch), generators()))
                training.optimize()
                if training.step % 5 == 2:
                    raise Enough
        except Enough:
            training.told.append("enough")
        for batch in loader if plain else training.loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()


def test_what_is_begun_and_dropped_is_no_outer_loop() -> None:
    def build() -> Any:
        return DataLoader(Squares(6), batch_size=2, shuffle=True)

    here = run(begun_and_dropped, build)
    assert here.told == run(begun_and_dropped, build, plain=True).told
    assert here.warnings == []
    check_all(begun_and_dropped, build, (1, 3, 4, 5, 6))  # not where it is raised: nobody knows that then
    assert resumed(begun_and_dropped, build, here.boundary[2]).told == here.told  # but once it is


def looked_at_first(training: Training, loader: Any, plain: bool) -> None:
    for _ in range(2):
        training.told.append(listed(next(iter(loader if plain else training.loop.batches(loader)))))
        for batch in loader if plain else training.loop.batches(loader):
            training.told.append((listed(batch), generators()))
            training.optimize()


def test_a_batch_that_is_looked_at_ends_no_healthy_training() -> None:
    def build() -> Any:
        return DataLoader(Squares(6), batch_size=2, shuffle=True)

    here = run(looked_at_first, build)
    assert here.told == run(looked_at_first, build, plain=True).told
    assert "To look at a batch, take it of the loader: next(iter(loader))" in here.warnings[0]


def told_other_epochs(training: Training, loader: Any, plain: bool) -> None:
    for epoch in range(3) if plain else training.loop.epochs(3):
        loader.sampler.set_epoch(100 + epoch)
        for batch in loader if plain else training.loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()


def in_folds(training: Training, samples: Any, plain: bool) -> None:
    """Tells the sampler of each fold that it is in its first epoch, which is what it begins with."""
    for fold in range(3) if plain else training.loop.epochs(3):
        sampler: DistributedSampler[Any] = DistributedSampler(samples, 2, 1, seed=fold)
        loader = DataLoader(samples, batch_size=3, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader if plain else training.loop.batches(loader):
                training.told.append((fold, epoch, listed(batch), generators()))
                training.optimize()


def once_more_behind(training: Training, loader: Any, plain: bool) -> None:
    for _ in range(2) if plain else training.loop.epochs(2):
        for batch in loader if plain else training.loop.batches(loader):
            training.told.append((listed(batch), generators()))
            training.optimize()
    for batch in loader if plain else training.loop.batches(loader):
        training.told.append((listed(batch), generators()))
        training.optimize()


def test_a_pass_behind_epochs_that_were_told_a_sampler_is_named() -> None:
    """A restart in it could not tell the sampler the epoch that it was in."""

    def build() -> Any:
        return DataLoader(Squares(), batch_size=3, sampler=DistributedSampler(Squares(), 2, 1, seed=5))

    assert run(once_more_behind, build).warnings == [TOLD_BEFORE]
    random = partial(DataLoader, Squares(), batch_size=3, shuffle=True)
    assert run(once_more_behind, random).warnings == []


def test_a_sampler_that_is_told_what_it_begins_with_is_left() -> None:
    assert run(in_folds, Squares).told == run(in_folds, Squares, plain=True).told
    check_all(in_folds, Squares)


def test_a_restart_that_does_not_come_to_its_loop_says_so() -> None:
    def script(training: Training, loader: Any, plain: bool) -> None:
        for _ in training.loop.epochs(2):
            for number in range(2):
                for _ in training.loop.batches(loader):
                    training.optimize()
                if number == 0 and training.base:
                    break  # what it has come to by now is another result

    build = build_of("shuffled", "0")
    undisturbed = run(script, build)
    each_pass = undisturbed.step // 4
    assert PASSED_BY in resumed(script, build, undisturbed.boundary[each_pass + 1]).warnings
    assert undisturbed.warnings == []


def test_epochs_that_the_script_tells_a_sampler_are_left() -> None:
    def build() -> Any:
        return DataLoader(Squares(), batch_size=3, sampler=DistributedSampler(Squares(), 2, 1, seed=5))

    assert run(told_other_epochs, build).told == run(told_other_epochs, build, plain=True).told
    check_all(told_other_epochs, build)


def changed_in_its_place(training: Training, data: Any, plain: bool) -> None:
    """A dataset from before the loop: by its own name, through a variable of the script's, and anew."""
    loop, (loader, values, labels, numbers) = training.loop, data
    for epoch in range(EPOCHS) if plain else loop.epochs(EPOCHS):
        values.mul_(training.step + 2)
        numbers[epoch] = training.step
        loader.dataset.datasets[1].indices = [training.step % 7, *range(training.step % 4)]
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
        assert labels.sum() == 8


@pytest.mark.filterwarnings("ignore:jitckpt")
def test_what_is_changed_of_a_dataset_as_an_epoch_begins_is_changed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def build() -> Any:
        values, labels, numbers = torch.ones(8), torch.ones(8), [*range(4)]
        whole = TensorDataset(values, labels)
        parts: Any = ConcatDataset([whole, Subset(whole, [1, 2]), Subset(whole, numbers)])
        parts.cumulative_sizes = [8, 9, 13]
        return DataLoader(parts, batch_size=2), values, labels, numbers

    assert run(changed_in_its_place, build).told == run(changed_in_its_place, build, plain=True).told
    check_all(changed_in_its_place, build, (2, 6, 8))


class Relabelled(Dataset[Any]):
    """Of the script's own; counts and keeps what it has read, as datasets do, a copy of more than is kept."""

    def __init__(self) -> None:
        self.labels, self.weights = numpy.ones(8), torch.ones(8)
        self.difficulty, self.order = 1, [*range(8)]
        self.read, self.cache = 0, numpy.zeros(1 << 17)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        self.cache[index] = self.read
        number = self.order[index]
        return float(self.labels[number] + self.difficulty), self.weights[number]


def relabelled(training: Training, loader: Any, plain: bool) -> None:
    """Each epoch's labels follow from those of the one before and from what the training has come to."""
    loop, dataset = training.loop, loader.dataset
    for epoch in range(3) if plain else loop.epochs(3):
        dataset.labels *= training.step + 2
        dataset.order[epoch], dataset.order[-1] = dataset.order[-1], dataset.order[epoch]
        for batch in loader if plain else loop.batches(loader):
            training.told.append((epoch, listed(batch), generators()))
            training.optimize()
        if epoch == 0:
            dataset.weights.add_(training.step)
            dataset.difficulty += training.step


def test_what_a_script_changes_of_its_own_dataset_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def build() -> Any:
        return DataLoader(Relabelled(), batch_size=3, shuffle=True)

    assert run(relabelled, build).told == run(relabelled, build, plain=True).told
    undisturbed = check_all(relabelled, build)
    assert not undisturbed.warnings, "what it changes of itself is not the script's"


def test_what_is_lost_of_a_changed_dataset_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def in_the_second_pass(training: Training, loaders: Any, plain: bool) -> None:
        first, second = loaders
        for epoch in range(3) if plain else training.loop.epochs(3):
            for loader in (first, second):
                if loader is second:
                    second.dataset.labels *= training.step + 2
                for batch in training.loop.batches(loader):
                    training.told.append((epoch, listed(batch)))
                    training.optimize()

    def build() -> Any:
        return DataLoader(Squares(4), batch_size=2), DataLoader(Relabelled(), batch_size=4)

    undisturbed = run(in_the_second_pass, build)
    assert not undisturbed.warnings
    again = resumed(in_the_second_pass, build, undisturbed.boundary[7])
    assert again.told == undisturbed.told, "in the pass over it, it comes back"
    (said,) = resumed(in_the_second_pass, build, undisturbed.boundary[5]).warnings
    assert said.startswith("Relabelled.labels: the script has changed it in its loop")


class Queue:
    """Gives what it has, once."""

    def __init__(self, number: int) -> None:
        self.waiting = [number, number + 1]

    def __iter__(self) -> Iterator[int]:
        while self.waiting:
            yield self.waiting.pop()


def test_one_that_can_be_iterated_once_is_not_spent_by_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_in_loop, "watch", WATCH)

    def with_a_queue(training: Training, data: Any, plain: bool) -> None:
        for epoch in range(3) if plain else training.loop.epochs(3):
            for one in (data, Queue(epoch)):
                for batch in one if plain else training.loop.batches(one):
                    training.told.append((epoch, str(batch), generators()))
                    training.optimize()

    def build() -> Any:
        return DataLoader(Squares(4), batch_size=2, shuffle=True)

    assert run(with_a_queue, build).told == run(with_a_queue, build, plain=True).told
    check_all(with_a_queue, build)


def test_a_list_with_the_id_of_one_that_is_gone_is_made_in_the_loop() -> None:
    def of_tensors() -> list[Tensor]:
        return [torch.ones(1), torch.ones(1)]

    before = of_tensors()
    WATCH()
    assert not made_in_loop.is_made_in_loop(before)
    old, others = id(before), [before]
    del before
    others.clear()
    while id(new := of_tensors()) != old and len(others) < 10000:
        others.append(new)
    assert id(new) == old
    assert made_in_loop.is_made_in_loop(new)


def test_a_tuple_that_comes_out_in_other_shapes_is_named() -> None:
    said: list[str] = []
    WATCH()
    kept = chosen_samples.chosen(torch.ones(6).split(3), said.append)
    other = torch.zeros(6).split(2)
    chosen_samples.choose_again(other, kept, said.append)
    assert "A tuple that the script makes in its loop has batches of other shapes" in said.pop()
    assert not said


def test_that_a_library_selects_other_rows_is_named() -> None:
    said: list[str] = []
    kept: list[tuple[Any, bytes]] = []
    WATCH()
    for print_of_rows in ("a", "a", "b"):
        table = Table([3, 5])
        vars(table)["_fingerprint"] = print_of_rows
        kept.append((DataLoader(table), chosen_samples.chosen(DataLoader(table), said.append)))  # type: ignore[arg-type]
    (_, before), (same, _), (other, _) = kept
    chosen_samples.choose_again(same, before, said.append)
    assert not said
    chosen_samples.choose_again(other, before, said.append)
    assert "The Table that the script makes in its loop has another fingerprint" in said.pop()


def test_what_was_there_before_the_loop_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    split, said, samples = Subset(Squares(), [1, 2]), list[str](), [torch.ones(1), torch.ones(1)]
    monkeypatch.setattr(made_in_loop, "_known", None)
    assert chosen_samples.chosen(DataLoader(Subset(Squares(), [1])), said.append) == b"", "no loop has begun"
    loader = DataLoader(split, shuffle=True)
    WATCH()
    assert chosen_samples.chosen(loader, said.append) == b""
    assert chosen_samples.chosen(samples, said.append) == b""
    kept = chosen_samples.chosen(DataLoader(Subset(Squares(), [3, 5]), shuffle=True), said.append)
    chosen_samples.choose_again(loader, kept, said.append)
    assert split.indices == [3, 5]
    assert not said
    chosen_samples.choose_again(DataLoader(Squares(), shuffle=True), kept, said.append)
    assert "(Squares, BatchSampler, RandomSampler, not Subset, Squares, BatchSampler" in said.pop()


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: DataLoader(Subset(Squares(), range(131073))), "Subset.indices: "),
        (lambda: DataLoader(TensorDataset(torch.ones(1 << 18))), "TensorDataset.tensors: "),
        (lambda: [torch.ones(1), object()], "list: "),
        (lambda: (torch.ones(1), 2), "tuple: "),
        (lambda: [1, Squares()], "list: "),
        (lambda: [torch.ones(1 << 18), torch.ones(2)], "list: "),
    ],
)
def test_what_is_too_much_to_be_kept_is_named(made: Callable[[], Any], names: str) -> None:
    said: list[str] = []
    WATCH()
    chosen_samples.chosen(made(), said.append)
    assert said[0].startswith(names)
