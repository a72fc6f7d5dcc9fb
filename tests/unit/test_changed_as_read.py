"""What a dataset changes of itself as it is read goes on after a failure, but for caches that fill again."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_loop import Training, check_all, listed, run, usual
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from jitckpt.data import changed_as_read

pytestmark = pytest.mark.usefixtures("nothing_is_watched")


class Cached(Dataset[Any]):
    """Makes each sample once, with random numbers."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.cache = length, dict[int, Tensor]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.tensor([index, random.random(), float(torch.rand(()))])
        return self.cache[index]


class CachedInAList(Dataset[Any]):
    """With a generator of its own."""

    def __init__(self) -> None:
        self.random = numpy.random.default_rng(4)
        self.cache: list[Tensor | None] = [None] * 10

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        found = self.cache[index]
        if found is None:
            found = self.cache[index] = torch.tensor([index, self.random.random()])
        return found


class Counting(Dataset[Any]):
    """Each reading makes the samples harder."""

    def __init__(self) -> None:
        self.reads, self.level, self.of_each = 0, 1.0, numpy.zeros(10)
        self.by_kind, self.last, self.seen = Counter[int](), deque[int](maxlen=3), set[int]()
        self.counts: dict[int, int] = defaultdict(int)
        self.mean = torch.zeros(2)
        self.made: list[int] | None = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        self.level *= 1.01
        self.of_each[index] += 1
        self.by_kind[index % 3] += 1
        self.last.append(index)
        self.seen.add(index)
        self.counts[index] += 1
        self.mean += index
        if self.made is None:
            self.made = []
        self.made.append(index)
        numbers = [
            self.reads,
            self.level,
            self.of_each.sum(),
            self.by_kind[1],
            sum(self.last),
            len(self.seen),
        ]
        return torch.tensor([*numbers, self.counts[index], float(self.mean[0]), sum(self.made)])


class Noise:
    """A transform that remembers."""

    def __init__(self) -> None:
        self.drawn: dict[int, float] = {}

    def __call__(self, index: int) -> float:
        if index not in self.drawn:
            self.drawn[index] = random.random()
        return self.drawn[index]


class Transformed(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = Noise()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return self.transform(index)


class Loaded(Dataset[Any]):
    """Keeps what it loads, and makes of it another sample each time."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.images, self.loads = size, dict[int, Tensor](), 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.images:
            self.loads += 1
            self.images[index] = torch.arange(self.size) * index
        return self.images[index][:2] + torch.rand(2)


def loaded_by(dataset: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), batch_size=3, shuffle=True, **options)


@pytest.mark.parametrize(
    "dataset",
    [
        *(Cached, CachedInAList, Counting, Transformed, Loaded),
        lambda: Subset(Cached(), range(1, 8)),
        lambda: ConcatDataset([Cached(4), Cached(6)]),
    ],
)
def test_a_dataset_goes_on_as_it_was(dataset: Callable[[], Any]) -> None:
    assert run(usual, loaded_by(dataset)).told == run(usual, loaded_by(dataset), plain=True).told
    assert check_all(usual, loaded_by(dataset)).warnings == []


@pytest.mark.parametrize("dataset", [Cached, Counting])
def test_so_do_its_copies_in_workers_that_stay(dataset: Callable[[], Any]) -> None:
    build = loaded_by(dataset, num_workers=2, persistent_workers=True)
    assert check_all(usual, build, (2, 4, 6)).warnings == []


def test_in_a_loader_that_each_epoch_makes_anew_too() -> None:
    def anew(training: Training, dataset: Any, plain: bool) -> None:
        for epoch in training.loop.epochs(3):
            for batch in training.loop.batches(DataLoader(dataset, 4)):
                training.told.append((epoch, listed(batch), random.random()))
                training.optimize()
            random.random()

    check_all(anew, Counting)
    check_all(anew, Cached)


class Named(Cached):
    """Has what no save takes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[int, object] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.notes[index] = object()
        return super().__getitem__(index)


class Large(Cached):
    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.rand(1 << 14)
        return self.cache[index]


def test_what_no_save_holds_is_named_once() -> None:
    for build in (loaded_by(Large), loaded_by(Large, num_workers=1, persistent_workers=True)):
        assert run(usual, build).warnings == [changed_as_read.TOO_MUCH.format(names="Large.cache")]
    said = run(usual, loaded_by(Named)).warnings
    assert said == [changed_as_read.TOO_MUCH.format(names="Named.notes")]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_cache_of_what_is_loaded_is_not_kept_and_not_named(options: dict[str, Any]) -> None:
    assert run(usual, loaded_by(lambda: Loaded(1 << 15), **options)).warnings == []


class Lists(Dataset[Any]):
    """Changes what lies in what it keeps, and that alone once all is there."""

    def __init__(self) -> None:
        self.by_kind: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.by_kind.setdefault(index % 2, []).append(index)
        return torch.tensor([sum(self.by_kind.get(kind, ())) for kind in range(2)])


class Means(Lists):
    def __init__(self) -> None:
        self.means: list[Any] = []

    def __getitem__(self, index: int) -> Tensor:
        if not self.means:
            self.means += [torch.zeros(2), numpy.zeros(2)]
        self.means[0].mul_(0.9).add_(index)
        self.means[1] += index
        return torch.tensor([*self.means[0], *self.means[1]])


class Counted(Lists):
    """A number comes to lie where the one before the last has lain."""

    def __init__(self) -> None:
        self.counts = {"reads": 1000}

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(2):
            self.counts["reads"] += 1
        return torch.tensor(self.counts["reads"])


@pytest.mark.parametrize("dataset", [Lists, Means, Counted])
def test_what_changes_inside_of_a_container_is_seen(dataset: Callable[[], Any]) -> None:
    assert check_all(usual, loaded_by(dataset)).warnings == []


class OneInAnother(Dataset[Any]):
    def __init__(self) -> None:
        self.reads: list[Any] = [self]
        self.reads[0] = self.reads

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


def test_a_list_that_is_in_itself_harms_nothing() -> None:
    said = run(usual, loaded_by(OneInAnother)).warnings
    assert said == [changed_as_read.TOO_MUCH.format(names="OneInAnother.reads")]


class Noting(Dataset[Any]):
    """A large cache, and a list of what was read."""

    def __init__(self) -> None:
        self.cache, self.order = dict[int, Tensor](), list[int]()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.order.append(index)
        if index not in self.cache:
            self.cache[index] = torch.rand(1 << 14)
        return torch.tensor([len(self.order)])


def test_no_sample_is_read_twice_where_that_leaves_something() -> None:
    training, plain = run(usual, loaded_by(Noting)), run(usual, loaded_by(Noting), plain=True)
    assert training.told == plain.told
    assert training.warnings == [changed_as_read.TOO_MUCH.format(names="Noting.cache")]


GLOBAL = numpy.random.default_rng(7)


class DrawnElsewhere(Large):
    """Of a generator that is none of its own."""

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.from_numpy(GLOBAL.random(1 << 14))
        return self.cache[index]


def test_a_large_cache_that_is_drawn_from_a_global_generator_is_named() -> None:
    GLOBAL.bit_generator.state = numpy.random.default_rng(7).bit_generator.state
    plain = run(usual, loaded_by(DrawnElsewhere), plain=True)
    GLOBAL.bit_generator.state = numpy.random.default_rng(7).bit_generator.state
    training = run(usual, loaded_by(DrawnElsewhere))
    assert training.told == plain.told
    assert training.warnings == [changed_as_read.TOO_MUCH.format(names="DrawnElsewhere.cache")]


class Reset(Dataset[Any]):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.tensor([index, self.reads])


def test_what_the_loop_changes_as_well_is_not_said_to_be_looked_after() -> None:
    def resets(training: Training, dataset: Any, plain: bool) -> None:
        loader = DataLoader(dataset, 2)
        for batch in training.loop.batches(loader):
            training.told.append(listed(batch))
            training.optimize()
            dataset.reads = 0

    dataset = Reset()
    run(resets, lambda: dataset)
    assert (id(dataset), "reads") not in changed_as_read.looked_after()
