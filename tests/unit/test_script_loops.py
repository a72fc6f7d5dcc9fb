"""Which loops over a loader a restart can go on with: those that the loader itself counts."""

import itertools
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from jitckpt.data import progress_bars
from jitckpt.data.loop import OF_COMPREHENSION, Loop
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.frameworks import protection, script_loops
from jitckpt.frameworks.script_loops import why_not
from jitckpt.frameworks.script_pass import ScriptPass


@pytest.fixture
def new_loop() -> Loop:
    return made_loop()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(protection, "tell", found.append)
    return found


def made_loop() -> Loop:
    return Loop(
        begins=lambda: None,
        boundary=lambda frame: True,
        write_again=lambda: None,
        put_back=lambda: None,
        warn=fail,
    )


def fail(warning: str) -> None:
    if warning != OF_COMPREHENSION:  # here they collect what is given
        pytest.fail(warning)


class Loader:
    frame: FrameType

    def __iter__(self) -> Iterator[int]:
        self.frame = sys._getframe(1)
        self.refusal = why_not(self.frame)
        return iter([1, 2])


def test_a_for_statement_can_go_on() -> None:
    loader = Loader()
    for _ in loader:
        pass
    assert loader.refusal is None


def test_counting_it_can_go_on() -> None:
    loader = Loader()
    for _ in enumerate(loader):
        pass
    assert loader.refusal is None


def test_batches_drawn_by_hand_can_not() -> None:
    loader = Loader()
    next(iter(loader))
    assert loader.refusal is not None
    assert "for batch in loader" in loader.refusal


def test_however_often_that_was_done() -> None:
    loader = Loader()
    refusals = []
    for _ in range(50):
        iter(loader)
        refusals.append(loader.refusal)
    assert None not in refusals


def test_batches_over_and_over_can_not() -> None:
    loader = Loader()
    next(itertools.cycle(loader))
    assert loader.refusal is not None


def bar(loader: Any) -> Any:
    """Return a progress bar as tqdm.auto's: it asks for an iterator as it is made, and draws from another."""
    text = """
class Bar:
    def __init__(self, iterable):
        self.iterable, self.asked = iterable, iter(iterable)

    def __iter__(self):
        yield from self.iterable
"""
    names = {"__name__": "tqdm.asyncio"}
    exec(text, names)
    return names["Bar"](loader)  # type: ignore[operator]


class Counting:
    """A loader that notes which of its passes are begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += not progress_bars.makes_one(sys._getframe(1))
        return iter([1, 2])


def test_a_progress_bar_that_is_only_made_begins_no_pass() -> None:
    loader = Counting()
    assert [*bar(loader)] == [1, 2]
    assert loader.begun == 1


def test_a_progress_bar_around_batches_begins_one_pass(new_loop: Loop) -> None:
    batches = new_loop.batches(DataLoader([1, 2, 3, 4]))  # type: ignore[arg-type]
    for _ in range(2):
        assert len([*bar(batches)]) == 4
    assert new_loop.round[2] == 2


def test_a_generator_of_the_scripts_can_not() -> None:
    loader = Loader()

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    next(forever())
    assert loader.refusal is not None


def iterated(loader: object, module: str) -> object:
    """Return what a loop over the loader in this module gets."""
    scope: dict[str, Any] = {"__name__": module, "loader": loader}
    exec("found = [*loader]", scope)
    return scope["found"]


def test_torchdatas_loader_is_asked_for_too_but_not_by_the_pass_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StatefulDataLoader(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["the loader's own"])

    torchdatas = ModuleType("torchdata of this test")
    torchdatas.StatefulDataLoader = StatefulDataLoader  # type: ignore[attr-defined]
    monkeypatch.setattr(script_loops, "_begin_pass", [lambda loader, frame: iter(["the pass's"])])
    script_loops.install(torchdatas)
    loader = StatefulDataLoader([1])  # type: ignore[arg-type]
    assert iterated(loader, "__main__") == ["the pass's"]
    assert iterated(loader, "jitckpt.hooks.torch_loaders") == ["the pass's"]  # around the script's
    assert iterated(loader, "jitckpt.data.data_pass") == ["the loader's own"]


def saved_after(number: int) -> tuple[Any, list[int]]:
    """Return what a loop tells of itself after so many batches of a loader of eight."""
    loop = made_loop()
    iteration = ScriptPass(job_of(loop), numbers(), sys._getframe())
    given = [next(iteration) for _ in range(number)]
    return decoded(loop.capture()), given


def job_of(loop: Loop) -> Any:
    return SimpleNamespace(loop=loop)


def numbers() -> Any:
    return DataLoader([*range(8)], batch_size=None)  # type: ignore[arg-type]


def decoded(encoded: Encoded) -> Any:
    return tree_codec.decode(encoded.tree, encoded.tensors)


def goes_on_after(number: int) -> Loop:
    saved, _ = saved_after(number)
    loop = made_loop()
    loop.restore(saved, None, 1)
    return loop


class Passes:
    """In the place of a loader that a framework has prepared."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._loader = loop, numbers()

    def __iter__(self) -> Iterator[int]:
        frame = sys._getframe(1)
        return (
            iter([])
            if progress_bars.makes_one(frame)
            else ScriptPass(job_of(self._loop), self._loader, frame)
        )


LAST = [(5, 5), (6, 6), (7, 7)]


def test_enumerate_counts_on_in_the_middle_of_a_pass() -> None:
    assert [*enumerate(Passes(goes_on_after(5)))] == LAST


def test_enumerate_counts_on_from_where_it_began() -> None:
    assert [*enumerate(Passes(goes_on_after(5)), 1)] == [(6, 5), (7, 6), (8, 7)]


def test_enumerate_counts_on_around_and_inside_of_a_progress_bar() -> None:
    assert [*enumerate(bar(Passes(goes_on_after(5))))] == LAST
    assert [*bar(enumerate(Passes(goes_on_after(5))))] == LAST


def test_enumerate_counts_on_around_a_loader_of_the_frameworks() -> None:
    text = """
class Loader:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.data = (one for one in self.loader)
        return self

    def __next__(self):
        return next(self.data)
"""
    names: dict[str, Any] = {"__name__": "deepspeed.runtime.dataloader"}
    exec(text, names)
    assert [*enumerate(names["Loader"](Passes(goes_on_after(5))))] == LAST


def test_enumerate_counts_on_around_two_loaders() -> None:
    loop, other = goes_on_after(5), goes_on_after(5)
    assert [*enumerate(zip(Passes(loop), Passes(other), strict=True))] == [(n, (n, n)) for n in (5, 6, 7)]


def test_enumerate_counts_on_around_what_a_function_makes_of_batches() -> None:
    def twice(batch: int, *_: int) -> int:
        return 2 * batch

    assert [*enumerate(map(twice, Passes(goes_on_after(5))))] == [(5, 10), (6, 12), (7, 14)]
    both = map(twice, Passes(goes_on_after(5)), Passes(goes_on_after(5)))
    assert [*enumerate(both)] == [(5, 10), (6, 12), (7, 14)]


def test_a_pass_that_begins_anew_is_counted_anew() -> None:
    passes = Passes(goes_on_after(5))
    assert [*enumerate(passes)] == LAST
    assert [*enumerate(passes)] == [(number, number) for number in range(8)]


def test_an_enumerate_of_something_else_is_left_alone() -> None:
    letters = enumerate("abcd")
    assert next(letters) == (0, "a")
    assert [*enumerate(Passes(goes_on_after(5)))] == LAST
    assert next(letters) == (1, "b")


def test_other_counts_beside_the_batches_are_named(told: list[str]) -> None:
    passes = Passes(made_loop())
    for _ in zip(range(2), passes, strict=False):
        pass
    for _ in enumerate(itertools.islice(passes, 2)):
        pass
    for _ in enumerate(filter(None, passes)):
        pass
    assert [text.partition("(")[0] for text in told] == ["range", "islice", "enumerate"]
    told.clear()
    for _ in enumerate(zip(passes, passes, strict=True)):
        pass
    for _, _ in enumerate(passes, 1):
        pass
    assert told == []
