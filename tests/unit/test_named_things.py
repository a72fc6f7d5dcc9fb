"""Which optimizer, module, loader or function a variable has comes back by name; what has none is said."""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from test_variable_keeper import Boundary, Keeper
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, Dataset

from jitckpt.encoding import packed
from jitckpt.state.earlier_loops import TOP
from jitckpt.state.named_things import NamedThings
from jitckpt.worker.script_variables import ScriptVariables


class Phase:
    def __init__(self, rate: float, model: nn.Module) -> None:
        self.rate, self.model = rate, model

    def first(self) -> str:
        return f"first {self.rate}"

    def second(self) -> str:
        return f"second {self.rate}"


def easy(value: float) -> float:
    return value


def hard(value: float) -> float:
    return 2 * value


def at_each(keeper: Keeper, names: str, steps: list[dict[str, dict[str, Any]]]) -> Boundary:
    def boundary(frame: FrameType, step: int) -> int:
        if step == 0:
            keeper.outermost_loop_begins(frame)
            keeper.follow(frame, names.split())
        else:
            keeper.take(frame)
        steps.append(keeper.saved())
        return step

    return boundary


def going_on(keeper: Keeper, names: str, at: int, saved: dict[str, dict[str, Any]]) -> Boundary:
    def boundary(frame: FrameType, step: int) -> int:
        if step == 0:
            keeper.outermost_loop_begins(frame)
            keeper.follow(frame, names.split())
            keeper.kept.restore(saved)
            keeper.put_back(frame)
            return at
        keeper.take(frame)
        return step

    return boundary


def equal_from_each_step(training: Callable[[Boundary], Any], names: str, steps: int) -> None:
    saves: list[dict[str, dict[str, Any]]] = []
    keeper = Keeper()
    undisturbed = training(at_each(keeper, names, saves))
    assert keeper.warned == []
    for at in range(steps):
        keeper = Keeper()
        assert training(going_on(keeper, names, at, saves[at])) == undisturbed, at
        assert (keeper.warned, keeper.lacking()) == ([], "")


def test_what_a_loop_chooses_late_goes_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        optimizer: Any
        phase: Any
        model, average = nn.Linear(2, 2), nn.Linear(2, 2)
        adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
        schedules = {"warm": LambdaLR(adam, lambda step: 0.5), "late": StepLR(adam, 2)}
        loaders: list[Any] = [DataLoader(Dataset()), DataLoader(Dataset())]
        phases = Phase(0.1, model), Phase(0.1, average)
        noises = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
        optimizer, used, schedule, loader, noise = adam, model, schedules["warm"], loaders[0], noises[0]
        loss, transform, phase, act, waiting = mse_loss, easy, phases[0].first, torch.relu, [adam, sgd]
        current = phases[0]
        step = boundary(sys._getframe(), 0)
        while step < 5:
            if step == 2:
                optimizer, used, schedule, loader = sgd, average, schedules["late"], loaders[1]
                loss, transform, phase, act = l1_loss, hard, phases[1].second, torch.tanh
                noise, current = noises[1], phases[1]
            if step == 3:
                current.rate = 0.3
                waiting.pop(0)
            step = boundary(sys._getframe(), step + 1)
        assert current in phases
        return [
            *(optimizer is sgd, used is average, schedule is schedules["late"], loader is loaders[1]),
            *(loss is l1_loss, transform is hard, phase(), phase.__self__ is phases[1], act is torch.tanh),
            *(noise is noises[1], current is phases[1], len(waiting), waiting[0] is sgd),
        ]

    names = "optimizer used schedule loader loss transform phase act waiting noise current"
    equal_from_each_step(training, names, 5)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.adam = torch.optim.Adam(self.model.parameters(), 0.1)
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.1)
        self.optimizer: torch.optim.Optimizer = self.adam
        self.head = self.model[0]


def test_what_an_object_refers_to_goes_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        trainer = Trainer()
        step = boundary(sys._getframe(), 0)
        while step < 5:
            if step == 3:
                trainer.optimizer, trainer.head = trainer.sgd, trainer.model[1]
            step = boundary(sys._getframe(), step + 1)
        return [trainer.optimizer is trainer.sgd, trainer.head is trainer.model[1]]

    equal_from_each_step(training, "trainer.optimizer trainer.head", 5)


class Strategy:
    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.count = loss, 0


class Strategies:
    def __init__(self) -> None:
        self.plain, self.other = Strategy(mse_loss), Strategy(l1_loss)
        self.used = self.plain


def test_what_an_object_counts_is_not_put_into_the_one_before_it() -> None:
    def training(boundary: Boundary) -> list[Any]:
        of = Strategies()
        plain, other = Strategy(mse_loss), Strategy(l1_loss)
        used = plain
        step = boundary(sys._getframe(), 0)
        while step < 6:
            if step == 2:
                of.used, used = of.other, other
            if step == 4:
                used = plain
            of.used.count += 1
            used.count += 1
            step = boundary(sys._getframe(), step + 1)
        counts = [one.count for one in (of.plain, of.other, plain, other)]
        return [*counts, of.used is of.other, used is plain, of.used.loss is l1_loss]

    of_objects = "of.plain.count of.other.count of.used.count plain.count other.count used.count"
    equal_from_each_step(training, f"of.plain of.other of.used plain other used {of_objects}", 6)


def test_arguments_of_another_partial_function_are_its_own() -> None:
    def training(boundary: Boundary) -> list[Any]:
        plain, smooth = partial(mse_loss), partial(mse_loss, reduction="sum")
        used = plain
        step = boundary(sys._getframe(), 0)
        while step < 4:
            if step == 2:
                used = smooth
            step = boundary(sys._getframe(), step + 1)
        return [used is smooth, plain.keywords, smooth.keywords]

    equal_from_each_step(training, "used used.reduction smooth.reduction", 4)


@pytest.mark.parametrize(
    "names", [*itertools.permutations(["of.used", "of.plain", "of.other", "of.used.count"])]
)
@pytest.mark.parametrize("follows_first", [True, False])
def test_objects_that_part_after_a_restart_are_as_they_were_in_the_next_one(
    names: list[str], *, follows_first: bool
) -> None:
    def training(saved: Any, begin: int, end: int) -> tuple[list[Any], Any]:
        keeper, of, frame = Keeper(), Strategies(), sys._getframe()
        keeper.outermost_loop_begins(frame)
        if saved is None or follows_first:
            keeper.follow(frame, names)
        if saved is not None:
            keeper.kept.restore(saved)
            keeper.put_back(frame)
        for step in range(begin, end):
            if step == 4:
                of.used = of.other
            of.used.count += 1
            keeper.follow(frame, names)
            keeper.take(frame)
        assert keeper.warned == []
        return [of.plain.count, of.other.count, of.used is of.other], keeper.saved()

    undisturbed, _ = training(None, 0, 8)
    assert undisturbed == [4, 4, True]
    for first in range(1, 7):
        for second in range(first + 1, 8):
            if not follows_first and 4 in (first, second):
                continue  # what parts in the first iteration is followed before that
            _, saved = training(None, 0, first)
            _, saved = training(saved, first, second)
            assert training(saved, second, 8)[0] == undisturbed, (first, second)


def test_an_epochs_top_finds_what_an_object_counts_in_its_own() -> None:
    def epoch(keeper: Keeper, *, goes_on: bool) -> list[Any]:
        plain, other = Strategy(mse_loss), Strategy(l1_loss)
        one, more = partial(mse_loss), partial(mse_loss, reduction="sum")
        used, loss = plain, one
        frame = sys._getframe()
        keeper.outermost_loop_begins(frame)
        keeper.follow(frame, ["plain", "other", "used", "loss", "used.count", "loss.reduction"])
        if goes_on:
            keeper.put_behind(frame, TOP)
        else:
            keeper.take(frame)
            used, loss = other, more
            used.count += 2
            keeper.take(frame)
            keeper.note_at(frame, TOP)
        return [plain.count, other.count, used is other, loss is more, one.keywords]

    undisturbed, again = Keeper(), Keeper()
    ended = epoch(undisturbed, goes_on=False)
    assert ended == [0, 2, True, True, {}]
    again.kept.earlier.restore(packed.unpack(packed.pack(undisturbed.kept.earlier.capture())))
    assert epoch(again, goes_on=True) == ended
    assert undisturbed.warned == again.warned == []


def test_two_that_change_their_places_go_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        one, other = nn.Linear(2, 2), nn.Linear(3, 3)
        first, last = one, other
        step = boundary(sys._getframe(), 0)
        while step < 5:
            first, last = last, first
            one, other = other, one
            step = boundary(sys._getframe(), step + 1)
        return [first.in_features, last.in_features, one is first, other is last]

    equal_from_each_step(training, "first last one other", 5)


def test_what_is_made_in_the_loop_is_said_as_it_comes() -> None:
    keeper = Keeper()
    model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
    chosen: Any = easy
    frame = sys._getframe()
    keeper.outermost_loop_begins(frame)
    keeper.follow(frame, ["model", "loss", "chosen"])
    keeper.take(frame)
    assert (keeper.warned, keeper.saved()) == ([], {})
    assert not keeper.will_name(frame, "loss")
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    chosen = partial(hard, 1.0)
    assert keeper.will_name(frame, "loss")
    keeper.take(frame)
    keeper.take(frame)
    assert [text.partition(",")[0] for text in keeper.warned] == [
        f"A save lacks the variable {name!r} of {frame.f_code.co_name}" for name in ("chosen", "loss")
    ]
    assert all("make all that it may become before the loop" in text for text in keeper.warned)
    assert [type(one) for one in (model, loss, chosen)] == [nn.Linear, nn.CrossEntropyLoss, partial]


def test_a_name_that_a_restart_has_not_is_said() -> None:
    model, keeper = nn.Linear(2, 2), Keeper()
    place = f"{__name__}:{sys._getframe().f_code.co_qualname}"
    keeper.outermost_loop_begins(sys._getframe())
    keeper.kept.restore({place: {"model": {"*same": ["*thing", "name", place, "average"]}}})
    keeper.put_back(sys._getframe())
    keeper.take(sys._getframe())
    assert type(model) is nn.Linear
    assert [text.partition(",")[0] for text in keeper.warned] == [
        f"The save has the variable 'model' of {sys._getframe().f_code.co_name}"
    ]


def test_names_of_things() -> None:
    things, lists = NamedThings(), [nn.Linear(2, 2), easy]
    model = nn.Sequential(nn.Linear(2, 2))
    closures = [lambda: 1, lambda: 2]
    scope = {"a": model, "b": model, "lists": lists, "closures": closures, "more": model, "__doc__": easy}
    things.note({"m:f": scope}, {"m:f": ["a"]})
    assert things.name_of(model) == ("name", "m:f", "b")
    assert things.name_of(lists[0]) == ("name", "m:f", "lists", 0)
    assert things.name_of(model[0]) == ("name", "m:f", "b", "0")
    assert things.name_of(easy) == ("module", __name__, "easy")
    assert things.name_of(torch.relu) == ("module", "torch", "relu")
    assert things.name_of(closures[1]) == ("name", "m:f", "closures", 1)
    assert things.name_of(model.train) == ("method", "train", "name", "m:f", "b")
    for value in (*closures, *lists, model.train, model[0], torch.relu, nn.Linear):
        assert things.thing_of(*(things.name_of(value) or ())) == value
    others = [1, "a", torch.zeros(1), numpy.zeros(1), [], nn.Linear(1, 1), iter([])]
    assert [things.name_of(one) for one in others] == [None] * len(others)
    closures.pop()
    with pytest.raises(LookupError):
        things.thing_of("name", "m:f", "closures", 1)


def test_what_becomes_another_is_named_where_nothing_is_kept() -> None:
    said: list[str] = []
    variables = ScriptVariables([], None, lambda: 0, said.append, of_epochs=True)

    def epochs() -> Iterator[int]:
        for epoch in range(4):
            variables.look(sys._getframe(1))
            yield epoch

    model, loss, snapshots = nn.Linear(2, 2), nn.CrossEntropyLoss(), [nn.Linear(1, 1)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in epochs():
        if epoch == 2:
            loss = nn.CrossEntropyLoss(label_smoothing=0.1)
            optimizer = torch.optim.Adam(model.parameters())
            model = nn.Linear(2, 2)
            snapshots.append(nn.Linear(1, 1))
        assert len([model, loss, optimizer, *snapshots]) > 3
    (named,) = said
    listed = named.partition("holds: ")[2].partition(". ")[0].split(", ")
    assert {*listed} >= {"loss", "optimizer", "model", "snapshots"}
