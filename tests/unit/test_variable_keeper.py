"""What a loop changes in variables of functions, modules and objects comes back where a restart goes on."""

import copy
import enum
import gc
import importlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jitckpt.bindings.frame_variables import own_variables, set_variables
from jitckpt.encoding import packed
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state import counters, plain_values
from jitckpt.state.counters import LEAST_RAISED
from jitckpt.state.kept_variables import PART, KeptVariables
from jitckpt.worker import restoring
from jitckpt.worker.variable_keeper import VariableKeeper

count = 0


class Keeper(VariableKeeper):
    """With what a job has around it."""

    def __init__(self) -> None:
        self.kept, self.round = KeptVariables(), 0
        self.said: list[str] = []
        self.warned: list[str] = []
        self.saves: list[dict[str, dict[str, Any]]] = []
        super().__init__(self.kept, lambda: (0, 0, self.round), say=self.said.append, warn=self.warned.append)

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return what a save of the newest step has, as it comes back."""
        found: dict[str, dict[str, Any]] = packed.unpack(packed.pack(self.kept.capture()))
        return found


# `boundary(frame, step)` is called as each iteration begins.
Boundary = Callable[[FrameType, int], int]


def at_each(keeper: Keeper, names: str, steps: list[dict[str, dict[str, Any]]]) -> Boundary:
    """Return a boundary of a run that keeps what it saves after each step."""

    def boundary(frame: FrameType, step: int) -> int:
        if step == 0:
            keeper.follow(frame, names.split())
        else:
            keeper.take(frame)
        steps.append(keeper.saved())
        return step

    return boundary


def going_on(keeper: Keeper, names: str, at: int, saved: dict[str, dict[str, Any]]) -> Boundary:
    """Return a boundary of a run that goes on behind step `at`."""

    def boundary(frame: FrameType, step: int) -> int:
        if step == 0:
            keeper.follow(frame, names.split())
            keeper.kept.restore(saved)
            keeper.put_back(frame)
            return at
        keeper.take(frame)
        return step

    return boundary


def equal_from_each_step(training: Callable[[Boundary], Any], names: str, steps: int) -> None:
    """Run it once, and then from each of its steps on."""
    saves: list[dict[str, dict[str, Any]]] = []
    undisturbed = training(at_each(Keeper(), names, saves))
    for at in range(steps):
        keeper = Keeper()
        assert training(going_on(keeper, names, at, saves[at])) == undisturbed, at
        assert (keeper.warned, keeper.lacking()) == ([], "")


class Opaque:
    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle = object()


class Meter:
    def __init__(self, limit: int = 0) -> None:
        self.limit, self.total, self.values = limit, 0.0, [0.0]

    def add(self, value: float) -> None:
        self.total += value
        self.values.append(value)


def test_all_kinds_of_values_go_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        total, best, pair = 0.0, None, (0, "")
        losses, recent, meters = [], deque([0], 2), [Meter(), Meter()]
        kinds: dict[int, int] = {}
        mean, array = torch.zeros(2), numpy.zeros(2)
        step = boundary(sys._getframe(), 0)
        while step < 6:
            total += 1.5 * step
            best = step if best is None or step % 3 == 0 else best
            pair = (step, pair[1] + "x")
            losses.append(total)
            recent.append(step)
            kinds[step % 2] = kinds.get(step % 2, 0) + 1
            meters[step % 2].add(step)
            mean = 0.5 * mean + step
            array += step
            step = boundary(sys._getframe(), step + 1)
        said = [(one.total, one.values) for one in meters]
        return [total, best, pair, losses, recent, kinds, said, mean.tolist(), array.tolist()]

    equal_from_each_step(training, "total best pair losses recent kinds meters mean array", 6)


@pytest.mark.parametrize(
    "built",
    [[0.0] * 40, [float("inf"), -0.0] * 20, [1] * 40, [True] * 40, [1 << 70] * 40, [0.5] * 39 + [1]],
    ids=["floats", "odd floats", "ints", "bools", "large ints", "mixed"],
)
def test_long_lists_of_numbers(built: list[Any]) -> None:
    def training(boundary: Boundary) -> list[str]:
        history = [*built]
        step = boundary(sys._getframe(), 0)
        while step < 3:
            history.append(built[step])
            step = boundary(sys._getframe(), step + 1)
        return [repr(one) for one in history]

    equal_from_each_step(training, "history", 3)


Middle = Callable[[FrameType, int], None]


def counting(boundary: Boundary, middle: Middle) -> list[Any]:
    begun, done, history, smooth, best, parts = 0, 10, [], [1.0], 0, {"seen": {0}}
    step = boundary(sys._getframe(), 0)
    while step < 12:
        begun += 1
        history.append(begun * done)
        smooth = [0.5 * smooth[0] + step]
        parts["seen"].add(step)
        if step % 5 == 0:
            best = step
        middle(sys._getframe(), step)
        done += 1
        step = boundary(sys._getframe(), step + 1)
    return [begun, done, history, smooth, best, parts]


COUNTED = "begun done history smooth best parts"


def as_it_comes_back(parts: dict[str, Encoded]) -> dict[str, dict[str, Any]]:
    """Return what a restart makes of the parts of a rank that has not come to the end of its iteration."""
    loaded = {name: packed.unpack(packed.pack(part)) for name, part in parts.items()}
    found: dict[str, dict[str, Any]] = restoring.iteration_made_up(loaded).get(PART, loaded[PART])
    return found


def test_a_training_that_stands_in_its_iteration_goes_on_behind_it() -> None:
    keeper, saves = Keeper(), [dict[str, dict[str, Any]]()]
    stood: list[dict[str, dict[str, Any]]] = []

    def evaluation(frame: FrameType, step: int) -> None:
        now = keeper.as_it_stands(sys._getframe())
        if step == 0:
            assert now is None, "nothing was looked at yet"
            return
        assert now is not None
        assert now.at.startswith(f"{__file__}:")
        assert now.at.endswith(".<locals>.evaluation")
        stood.append(as_it_comes_back(now.parts))
        if step == 6:
            assert now.unchanged == ["the variable 'best' of counting"]

    undisturbed = counting(at_each(Keeper(), COUNTED, []), lambda frame, step: None)
    assert counting(at_each(keeper, COUNTED, saves), evaluation) == undisturbed, "it does no harm"
    for step in range(LEAST_RAISED + 1, 12):
        going = going_on(Keeper(), COUNTED, step + 1, stood[step - 1])
        assert counting(going, lambda frame, step: None) == undisturbed, step


def test_a_rank_that_was_killed_takes_the_flags_of_one_that_has_left_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one goes on with the next epoch, and the other is behind the loops: they wait for each other."""
    monkeypatch.setattr(
        restoring, "left_by_replica", lambda own, of_saver: own == "in" and of_saver == "left"
    )
    own = {
        "loop": "in",
        PART: {"here": {"best": 3.0, "bad": 4, "step": 7}},
        counters.PART: {"here": ["step"]},
    }
    saver = {"loop": "left", PART: {"here": {"best": 2.0, "bad": 5, "stop": True}, "there": {"goes": False}}}
    found = restoring.behind_iteration(own, saver)[PART]
    assert found == {"here": {"best": 3.0, "bad": 4, "step": 8, "stop": True}, "there": {"goes": False}}
    assert restoring.behind_iteration(own, saver | {"loop": "in"})[PART]["here"].keys() == {
        "best",
        "bad",
        "step",
    }
    assert restoring.behind_iteration({}, {}) == {}


def test_a_counter_of_a_rank_that_was_killed_in_its_iteration_is_not_one_behind() -> None:
    keeper = Keeper()
    killed: list[dict[str, dict[str, Any]]] = []

    def evaluation(frame: FrameType, step: int) -> None:
        parts = {PART: keeper.kept.capture(), counters.PART: keeper.kept.capture_counters()}
        killed.append(as_it_comes_back(parts))

    undisturbed = counting(at_each(keeper, COUNTED, []), evaluation)
    for step in range(LEAST_RAISED + 1, 12):
        going = going_on(Keeper(), COUNTED, step + 1, killed[step])
        assert counting(going, lambda frame, step: None)[:2] == undisturbed[:2], step


def test_a_failure_in_the_first_iteration_behind_a_restart_finds_all() -> None:
    first, again = Keeper(), Keeper()
    saves: list[dict[str, dict[str, Any]]] = []
    undisturbed = counting(at_each(first, COUNTED, saves), lambda frame, step: None)
    again.kept.restore({}, first.kept.capture_counters().tree)
    found: list[dict[str, dict[str, Any]]] = []

    def evaluation(frame: FrameType, step: int) -> None:
        if step == 9:
            now = again.as_it_stands(sys._getframe())
            assert now is not None
            found.extend([again.saved(), as_it_comes_back(now.parts)])

    counting(going_on(again, COUNTED, 9, saves[9]), evaluation)
    for step, saved in zip((9, 10), found, strict=True):
        going = going_on(Keeper(), COUNTED, step, saved)
        assert counting(going, lambda frame, step: None) == undisturbed


def test_where_the_loops_function_calls_itself_the_outer_ones_variables_count() -> None:
    keeper = Keeper()

    def run(step: int, *, trains: bool) -> int:
        total = 5 if trains else 100
        if not trains:
            now = keeper.as_it_stands(sys._getframe())
            assert now is not None
            ((_, told),) = now.parts[PART].tree.items()
            assert told == {"total": 7}
            return total
        while step < 2:
            if step == 0:
                keeper.follow(sys._getframe(), ["total"])
            else:
                keeper.take(sys._getframe())
            total += 1
            if step:
                run(step, trains=False)
            step += 1
        return total

    assert run(0, trains=True) == 7


def test_nothing_is_told_of_a_training_that_is_just_looked_at() -> None:
    keeper = Keeper()
    told: list[object] = []
    total = 0
    keeper.follow(sys._getframe(), ["total"])

    def of_round() -> tuple[int, ...]:
        told.append(keeper.as_it_stands(sys._getframe()))
        return 0, 0, 0

    keeper._of_round = of_round
    total += 1
    keeper.take(sys._getframe())
    assert told == [None]


def test_a_variable_of_a_module() -> None:
    def training(boundary: Boundary) -> int:
        global count  # noqa: PLW0603
        count = 0
        step = boundary(sys._getframe(), 0)
        while step < 4:
            count += step + 1
            step = boundary(sys._getframe(), step + 1)
        return count

    equal_from_each_step(training, "count", 4)


def test_a_setting_in_another_module_of_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_of_mine.py").write_text("noise = 0.0")
    monkeypatch.syspath_prepend(tmp_path)
    settings: Any = importlib.import_module("settings_of_mine")

    def training(boundary: Boundary) -> float:
        settings.noise = 0.0
        step = boundary(sys._getframe(), 0)
        while step < 4:
            settings.noise += step + 0.5
            step = boundary(sys._getframe(), step + 1)
        return float(settings.noise)

    equal_from_each_step(training, "settings.noise", 4)


def test_a_variable_that_an_inner_function_sets() -> None:
    def training(boundary: Boundary) -> int:
        seen = 0

        def add(number: int) -> None:
            nonlocal seen
            seen += number

        step = boundary(sys._getframe(), 0)
        while step < 4:
            add(step)
            step = boundary(sys._getframe(), step + 1)
        return seen

    equal_from_each_step(training, "seen", 4)


def test_a_variable_that_the_loop_makes() -> None:
    def training(boundary: Boundary) -> int:
        step = boundary(sys._getframe(), 0)
        while step < 4:
            if step == 1:
                first = 10
            step = boundary(sys._getframe(), step + 1)
        return first

    saves: list[dict[str, dict[str, Any]]] = []
    keeper = Keeper()
    each = at_each(keeper, "", saves)

    def boundary(frame: FrameType, step: int) -> int:
        if step == 2:
            keeper.follow(frame, ["first"], have_changed=True)
        return each(frame, step)

    assert training(boundary) == 10
    assert training(going_on(Keeper(), "", 3, saves[3])) == 10


def test_what_the_loop_does_not_change_is_as_the_new_start_has_it() -> None:
    def training(boundary: Boundary, limit: int) -> list[Any]:
        meter, settings = Meter(limit), {"steps": limit}
        step = boundary(sys._getframe(), 0)
        while step < 3:
            meter.add(1.0)
            step = boundary(sys._getframe(), step + 1)
        return [meter.limit, settings, meter.total, meter.values]

    names = "meter.total meter.values meter.limit settings"
    saves: list[dict[str, dict[str, Any]]] = []
    training(at_each(Keeper(), names, saves), 5)
    result = training(going_on(Keeper(), names, 2, saves[2]), 7)
    assert result == [7, {"steps": 7}, 3.0, [0.0, 1.0, 1.0, 1.0]]


def test_who_else_knows_a_list_sees_the_one_that_comes_back() -> None:
    def training(boundary: Boundary) -> list[Any]:
        known = history = [0]
        fresh = old = [0]
        step = boundary(sys._getframe(), 0)
        while step < 3:
            history.append(step)
            fresh = [*fresh, step]
            step = boundary(sys._getframe(), step + 1)
        return [known, history, fresh, old]

    equal_from_each_step(training, "history fresh", 3)


def test_one_value_under_two_names_stays_one() -> None:
    """A state that the loop writes to in its place, and an early stopper that notes which one is best."""

    def training(boundary: Boundary) -> list[Any]:
        state = best = tops = None
        other = before = torch.zeros(2)
        seen = numpy.zeros(2)
        losses: list[float] = []
        step = boundary(sys._getframe(), 0)
        while step < 8:
            if state is None or step % 3 == 0:
                state = torch.full((2,), float(step))
            if step % 4 == 1:
                best, tops = state, losses
                before, other = other, torch.ones(2)
            state.mul_(0.5)
            losses.append(step)
            other += 1
            seen = numpy.zeros(2) if step == 5 else seen
            kept = seen
            kept += 1
            step = boundary(sys._getframe(), step + 1)
        values: list[Any] = [state, best, other, before, seen, kept]
        return [one.tolist() for one in values] + [tops]

    equal_from_each_step(training, "best kept losses other before seen state tops", 8)


def test_what_is_begun_anew_in_each_round_is_put_back_in_its_place() -> None:
    saves: list[dict[str, dict[str, Any]]] = []
    keeper = Keeper()

    def training(boundary: Boundary, rounds: Iterator[int], keeper: Keeper) -> list[Any]:
        for keeper.round in rounds:
            known = losses = [keeper.round]
            step = boundary(sys._getframe(), 0)
            while step < 3:
                losses.append(step)
                step = boundary(sys._getframe(), step + 1)
        return [known, losses]

    undisturbed = training(at_each(keeper, "losses", saves), iter(range(2)), keeper)
    again = Keeper()
    saved = saves[-2]
    assert training(going_on(again, "losses", 2, saved), iter([1]), again) == undisturbed


def test_what_epochs_without_batches_have_changed_is_as_it_was_at_first() -> None:
    """A loop over epochs that is the script's own begins with the first one again."""
    saves: list[dict[str, dict[str, Any]]] = []

    def training(boundary: Boundary) -> list[Any]:
        best, ends = None, [0]
        for epoch in range(2):
            total = 0.0
            step = boundary(sys._getframe(), 3 * epoch)
            while step < 3 * (epoch + 1):
                total += 1.0
                step = boundary(sys._getframe(), step + 1)
            if total < 3.0:
                best = total
                ends.append(epoch)
        return [best, ends, total]

    keeper, names = Keeper(), "best ends total"
    first = at_each(keeper, names, saves)
    undisturbed = training(lambda frame, step: first(frame, step) if step % 3 else step)
    assert undisturbed == [None, [0], 3.0]
    keeper = Keeper()

    def restarted(frame: FrameType, step: int) -> int:
        if step == 0:
            keeper.follow(frame, names.split())
            return 3
        if step == 3:
            keeper.kept.restore({"m:": {}})
            keeper.put_back(frame)
        return step

    assert training(restarted) == undisturbed
    assert keeper.warned == []


def test_what_can_not_be_kept_is_said() -> None:
    keeper = Keeper()

    def training() -> None:
        handle, big, grows, meter = object(), [0] * 2000, [0] * 990, Meter()
        meter.open = handle  # type: ignore[attr-defined]
        inside = SimpleNamespace(handle=handle)
        assert len(big) > len(vars(inside))
        frame = sys._getframe()
        names = ["handle", "big", "grows", "meter.total", "meter.open", "inside", "missing", "nothing.inside"]
        keeper.follow(frame, names)
        assert [name for name in names if keeper.keeps(frame, name)] == ["grows", "meter.total"]
        grows += [0] * 20
        keeper.take(frame)
        assert not keeper.keeps(frame, "grows")

    training()
    (warned,) = keeper.warned
    assert "'grows' of test_what_can_not_be_kept_is_said.<locals>.training, which has grown beyond" in warned


def test_objects_of_a_class_that_a_restart_does_not_find_are_said() -> None:
    class Inside(Meter):
        pass

    keeper = Keeper()
    made, listed, same = None, [], [Inside()]
    frame = sys._getframe()
    keeper.follow(frame, ["made", "listed", "same"])
    keeper.take(frame)
    assert keeper.warned == []
    made = Inside()
    listed.append(Inside())
    same[0].add(1.0)
    keeper.take(frame)
    assert [text.split(",")[0] for text in keeper.warned] == [
        f"A save lacks the variable {name!r} of {frame.f_code.co_name}" for name in ("listed", "made")
    ]
    (told,) = keeper.saved().values()
    assert [*told] == ["same"]
    assert made.total == 0.0


def test_nothing_is_kept_alive_that_the_script_lets_go() -> None:
    keeper = Keeper()
    small, large, odd = torch.zeros(2), None, None
    frame = sys._getframe()
    keeper.follow(frame, ["small", "large", "odd"])
    for _ in range(3):
        small, large, odd = small + 1, torch.zeros(100_000), Opaque()
        held = weakref.ref(small), weakref.ref(large), weakref.ref(odd)
        keeper.take(frame)
        assert keeper.kept.capture().tree == {f"{__name__}:{frame.f_code.co_qualname}": {"small": ANY}}
        small, large, odd = small.clone(), None, None
        assert [one() for one in held] == [None] * 3
    assert not keeper.keeps(frame, "odd")


def test_a_name_that_is_gone_is_said_once() -> None:
    keeper = Keeper()
    keeper.kept.restore({"m:train": {"total": 1.0}, "m:train:meter": {"count": 2}})
    keeper.put_back(sys._getframe())
    said = keeper.lacking()
    assert "the variable 'total' of train, the attribute 'count' of 'meter' of train" in said
    assert keeper.lacking() == ""


def test_nothing_new_is_told_while_nothing_changes() -> None:
    keeper = Keeper()
    total, losses = 1.0, [1.0]
    frame = sys._getframe()
    keeper.follow(frame, ["total", "losses"])
    keeper.take(frame)
    assert keeper.kept.capture().tree == {}
    losses.append(total)
    keeper.take(frame)
    assert not keeper.kept.is_same()
    first = keeper.kept.capture()
    assert keeper.kept.is_same()
    keeper.take(frame)
    assert keeper.kept.is_same()
    assert keeper.kept.capture() is first


def test_a_failure_in_it_ends_it_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    total = 1.0
    frame = sys._getframe()
    keeper.follow(frame, ["total"])

    def fail(*_: object, **__: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(keeper.kept, "take", fail)
    keeper.take(frame)
    keeper.take(frame)
    assert keeper.warned == [
        "No variables of the script are kept from here on: ValueError: odd. After a failure they are as it "
        "sets them."
    ]
    assert not keeper.keeps(frame, "total")
    assert keeper.kept.capture().tree == {}
    assert total == 1.0


class Raising:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("not for you")


def test_what_a_variable_raises_is_not_the_trainings_affair() -> None:
    keeper, raising, total = Keeper(), Raising(), 1.0
    frame = sys._getframe()
    for have_changed in (False, True):
        keeper.follow(frame, ["raising", "raising.value", "total"], have_changed=have_changed)
        assert not keeper.keeps(frame, "raising")
    total += 1
    keeper.take(frame)
    assert [*keeper.saved().values()] == [{"total": total}]
    assert (keeper.warned, type(raising)) == ([], Raising)


def test_each_name_is_said_once() -> None:
    keeper = Keeper()
    keeper.say_kept(["a", "b", "a"])
    keeper.say_kept(["b", "c"])
    assert [text.split(". ")[0] for text in keeper.said] == [
        "The loop changes variables of the script: a, b",
        "The loop changes variables of the script: c",
    ]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(PLAIN, min_size=1, max_size=5), st.data())
def test_any_plain_value_comes_back(values: list[Any], data: st.DataObject) -> None:
    """A variable has one of the values after the other; a restart goes on from any of them."""

    def training(boundary: Boundary) -> list[Any]:
        value: Any = "as built"
        seen: list[Any] = []
        step = boundary(sys._getframe(), 0)
        while step < len(values):
            seen.append(value)
            value = values[step]
            step = boundary(sys._getframe(), step + 1)
        return [value, seen]

    saves: list[dict[str, dict[str, Any]]] = []
    undisturbed = training(at_each(Keeper(), "value seen", saves))
    at = data.draw(st.integers(0, len(values) - 1))
    assert training(going_on(Keeper(), "value seen", at, saves[at])) == undisturbed


def test_variables_are_set_from_outside() -> None:
    def inner(frame: FrameType) -> None:
        set_variables(frame, {"number": 5, "shared": 6, "later": 7})

    def generator() -> Iterator[int]:
        inside = 1
        yield inside
        yield inside

    number, shared = 1, 2

    def read() -> int:
        return shared

    inner(sys._getframe())
    assert (number, shared, read()) == (5, 6, 6)
    later: int
    assert later == 7  # noqa: F821
    one = generator()
    assert next(one) == 1
    set_variables(one.gi_frame, {"inside": 8})  # type: ignore[attr-defined]
    assert next(one) == 8


def test_what_the_script_has_got_from_locals_stays_as_it_is() -> None:
    def training(rate: float, look: Callable[[FrameType], object]) -> dict[str, Any]:
        config = locals()
        outputs = Opaque()
        look(sys._getframe())
        assert (rate, type(outputs)) == (0.2, Opaque)
        return config

    def look(frame: FrameType) -> None:
        assert own_variables(frame)["rate"] == 0.1
        set_variables(frame, {"rate": 0.2})
        assert own_variables(frame)["rate"] == 0.2

    assert training(0.1, look) == {"rate": 0.1, "look": look}


class Phase(enum.Enum):
    WARM, HOT = 1, 2


@pytest.mark.parametrize("first", [(), (0, 1), Phase.WARM, frozenset(), [0]], ids=str)
def test_two_variables_that_begin_as_one_object_and_part(first: Any) -> None:
    def training(boundary: Boundary) -> list[Any]:
        one = other = first
        step = boundary(sys._getframe(), 0)
        while step < 6:
            one = step
            if step == 4:
                other = "parted"
            step = boundary(sys._getframe(), step + 1)
        return [one, other]

    equal_from_each_step(training, "one other", 6)


def test_the_first_name_of_one_object_gets_another() -> None:
    def training(boundary: Boundary) -> list[Any]:
        one = other = [0]
        step = boundary(sys._getframe(), 0)
        while step < 5:
            one.append(step)
            if step == 2:
                one = [7]
            step = boundary(sys._getframe(), step + 1)
        return [one, other]

    equal_from_each_step(training, "one other", 5)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (0.0, -0.0),
        ([0, 1], [False, 1]),
        ([0.0], [-0.0]),
        ({"a": [1]}, {"a": [1.0]}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}),
        ({1: 2}, {True: 2}),
    ],
    ids=repr,
)
def test_what_is_equal_and_not_the_same_comes_back(first: Any, then: Any) -> None:
    def training(boundary: Boundary) -> str:
        value = first
        step = boundary(sys._getframe(), 0)
        while step < 3:
            if step == 1:
                value = then
            step = boundary(sys._getframe(), step + 1)
        return repr(value)

    equal_from_each_step(training, "value", 3)


class Holder:
    """Has a value, as an object of the script's own."""

    value: Any = None


def test_what_the_script_lets_go_of_is_not_held() -> None:
    """A tensor that one minibatch leaves to the next may be as large as the device has room for."""
    keeper, holder = Keeper(), Holder()
    carried: Any = torch.zeros(plain_values.MOST_BYTES)
    small: Any = torch.zeros(2)
    caches: Any = {"a": torch.zeros(2), "b": 0}
    holder.value = torch.zeros(2)

    def all_of_them() -> list[weakref.ref[Any]]:
        return [weakref.ref(one) for one in (carried, small, caches["a"], holder.value)]

    frame = sys._getframe()
    keeper.follow(frame, ["carried", "small", "caches", "holder"])
    for step in range(4):
        before = all_of_them()
        carried = small = None
        caches["a"] = holder.value = None
        assert [one() for one in before] == [None] * 4, step
        carried, small = torch.ones(plain_values.MOST_BYTES), torch.ones(2)
        caches, holder.value = {"a": torch.ones(2), "b": step}, torch.ones(2)
        keeper.take(frame)
    assert [*keeper.saved().values()]


def test_variables_of_a_function_that_has_returned_are_not_held_and_go_on() -> None:
    keeper = Keeper()
    held: list[weakref.ref[Any]] = []

    def epoch(total: float) -> float:
        mean = torch.zeros(2)
        frame = sys._getframe()
        keeper.follow(frame, ["total", "mean"])
        for step in range(2):
            total += step
            mean = mean + 1
            keeper.take(frame)
        held.append(weakref.ref(mean))
        return total

    outside = epoch(0.0)
    keeper.follow(sys._getframe(), ["outside"])
    outside += 1.0
    keeper.take(sys._getframe())
    gc.collect()  # the frame has itself among its variables
    assert held[0]() is None
    (saved,) = keeper.saved().values()
    assert saved == {"outside": outside}
    outside = epoch(outside)
    assert outside == 3.0
    inner = next(told for place, told in keeper.saved().items() if "epoch" in place)
    assert (inner["total"], inner["mean"]["*new"].tolist()) == (3.0, [2.0, 2.0])


def test_objects_and_members_that_the_loop_makes_come_back() -> None:
    def training(boundary: Boundary) -> list[Any]:
        best: Any = None
        phase: Any = None
        meters: dict[int, Meter] = {}
        phases: list[Phase] = []
        step = boundary(sys._getframe(), 0)
        while step < 5:
            if step % 2:
                best, phase = Meter(step), Phase.HOT
                best.add(step)
            meters.setdefault(step % 3, Meter()).add(step)
            phases.append(Phase.HOT if step % 2 else Phase.WARM)
            step = boundary(sys._getframe(), step + 1)
        return [vars(best), phase, [(key, vars(one)) for key, one in meters.items()], phases]

    equal_from_each_step(training, "best phase meters phases", 5)


class Parts(enum.Flag):
    HEAD, BODY = 1, 2


def test_flags_of_several_members_and_of_none_come_back() -> None:
    def training(boundary: Boundary) -> list[Any]:
        trained, seen = Parts(0), list[Parts]()
        step = boundary(sys._getframe(), 0)
        while step < 4:
            trained = Parts(step)
            seen.append(trained)
            step = boundary(sys._getframe(), step + 1)
        return [trained, seen]

    equal_from_each_step(training, "trained seen", 4)


def test_objects_that_nobody_can_make_again_are_said_before_they_are_needed() -> None:
    class Local:
        def __init__(self) -> None:
            self.total = 0.0

    class Opened(Meter):
        def __init__(self) -> None:
            super().__init__()
            self.file = object()

    keeper = Keeper()
    best: Any = None
    records: list[Any] = []
    built, opened = Local(), [Opened()]
    frame = sys._getframe()
    keeper.follow(frame, ["best", "records", "built.total", "opened"])
    keeper.take(frame)
    best = Local()
    records.append(Opened())
    built.total, opened[0].total = 1.0, 1.0
    keeper.take(frame)
    assert [text.split("'")[1] for text in keeper.warned] == ["best", "records"]
    assert [name for told in keeper.saved().values() for name in told] == ["opened", "total"]
    assert best is not None


def test_an_object_that_the_loop_makes_comes_back_with_what_was_seen_inside_of_it_later() -> None:
    def training(keeper: Keeper, saved: dict[str, dict[str, Any]]) -> list[float]:
        made = None
        keeper.follow(sys._getframe(), ["made"])
        if saved:
            keeper.kept.restore(saved)
            keeper.put_back(sys._getframe())
        else:
            made = Meter()
            keeper.take(sys._getframe())
            keeper.follow(sys._getframe(), ["made.values"])
            made.add(2.0)
            keeper.take(sys._getframe())
        assert made is not None
        return made.values

    first, second = Keeper(), Keeper()
    values = training(first, {})
    assert training(second, first.saved()) == values
    assert second.lacking() == ""


def test_what_lies_in_a_list_and_has_a_name_stays_one() -> None:
    def training(boundary: Boundary) -> list[Any]:
        row: dict[str, Any] = {"loss": 0.0}
        rows, best = [row], deque([row], 2)
        last: tuple[Any, ...] = ()
        mean, means = torch.zeros(2), {"mean": torch.ones(2)}
        step = boundary(sys._getframe(), 0)
        while step < 6:
            if step % 3 == 1:
                row = {"loss": float(step)}
                rows.append(row)
                means["mean"] = mean
            if step == 4:
                best, last = deque([rows[1]], 2), (row, rows)
                mean = torch.ones(2)
            row["loss"] += step
            mean += step
            step = boundary(sys._getframe(), step + 1)
        return [rows, row, [*best], last, mean.tolist(), means["mean"].tolist()]

    equal_from_each_step(training, "row rows best last mean means", 6)


def test_what_an_object_has_in_a_list_and_a_variable_too_stays_one() -> None:
    def training(boundary: Boundary) -> list[Any]:
        meters, values = [Meter()], [0.0]
        step = boundary(sys._getframe(), 0)
        while step < 4:
            if step == 1:
                meters[0].values = values
            meters[0].add(step)
            values.append(-step)
            step = boundary(sys._getframe(), step + 1)
        return [meters[0].values, values]

    equal_from_each_step(training, "meters values", 4)


def test_lists_that_lie_in_each_other_are_said() -> None:
    keeper = Keeper()
    first: list[Any] = []
    second: list[Any] = [first]
    keeper.follow(sys._getframe(), ["first", "second"])
    first.append(second)
    keeper.take(sys._getframe())
    assert "which has become a list" in "".join(keeper.warned)


class Private:
    __slots__ = ("__total", "__weakref__", "calls")

    def __init__(self) -> None:
        self.__total, self.calls = 0.0, 0

    def add(self, value: float) -> None:
        self.__total += value
        self.calls += 1

    def said(self) -> tuple[float, int]:
        return self.__total, self.calls


def test_slots_with_names_of_the_class_s_own_go_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        one, more = Private(), [Private()]
        step = boundary(sys._getframe(), 0)
        while step < 4:
            one.add(step)
            more[0].add(step)
            step = boundary(sys._getframe(), step + 1)
        return [one.said(), more[0].said()]

    equal_from_each_step(training, "one._Private__total one.calls more", 4)


def test_an_object_that_lies_in_a_list_and_has_a_name_stays_one() -> None:
    def training(boundary: Boundary) -> list[Any]:
        meters: list[Meter] = []
        step = at = boundary(sys._getframe(), -1)
        while at < 6:
            meter = Meter(at // 3)
            meters.append(meter)
            step = max(step, boundary(sys._getframe(), -2))
            while step < 3 * (at // 3 + 1):
                meter.add(step)
                step = boundary(sys._getframe(), step + 1)
            at = step
        return [(one.limit, one.total, one.values) for one in meters]

    def boundary_of(keeper: Keeper, saves: dict[int, Any], begins_at: int) -> Boundary:
        def boundary(frame: FrameType, step: int) -> int:
            if step == -1:
                return begins_at
            if step == -2:
                keeper.round += 1
                keeper.follow(frame, ["meter.total", "meter.values", "meters"])
                if begins_at and keeper.round == 1:
                    keeper.kept.restore(saves[begins_at])
                    keeper.put_back(frame)
                return begins_at
            keeper.take(frame)
            saves[step] = keeper.saved()
            return step

        return boundary

    saves: dict[int, Any] = {}
    undisturbed = training(boundary_of(Keeper(), saves, 0))
    for at in (1, 2, 4, 5):
        assert training(boundary_of(Keeper(), saves, at)) == undisturbed, at


def test_objects_that_the_loop_makes_and_puts_into_a_list_too_stay_one() -> None:
    def training(boundary: Boundary) -> list[Any]:
        best = first = Meter()
        seen: list[Meter] = []
        step = boundary(sys._getframe(), 0)
        while step < 6:
            best.add(step)
            if step % 2:
                best = Meter(step)
                seen.append(best)
            step = boundary(sys._getframe(), step + 1)
        return [vars(best), vars(first), [vars(one) for one in seen]]

    equal_from_each_step(training, "best first seen best.total", 6)
    equal_from_each_step(training, "seen best first best.total", 6)


class Listing:
    __slots__ = ("values",)


class OpenListing(Listing):
    def __init__(self) -> None:
        self.values, self.limit = [0], 4


def test_a_list_in_a_slot_of_an_object_that_has_other_attributes_goes_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        listings = [OpenListing()]
        step = boundary(sys._getframe(), 0)
        while step < 4:
            listings[0].values.append(step)
            step = boundary(sys._getframe(), step + 1)
        return [one.values for one in listings]

    equal_from_each_step(training, "listings", 4)


def test_a_list_in_a_slot_of_a_variable_goes_on() -> None:
    def training(boundary: Boundary) -> list[Any]:
        best = None
        step = boundary(sys._getframe(), 0)
        while step < 4:
            best = best or OpenListing()
            best.values.append(step)
            step = boundary(sys._getframe(), step + 1)
        return best.values if best else []

    equal_from_each_step(training, "best", 4)


def test_a_part_of_what_has_not_changed_that_gets_a_name_stays_that_part() -> None:
    def training(boundary: Boundary) -> list[Any]:
        stages, means = [[0], [1]], {"mean": torch.zeros(2)}
        stage: list[int] = []
        mean = torch.ones(2)
        step = boundary(sys._getframe(), 0)
        while step < 4:
            if step == 1:
                stage, mean = stages[1], means["mean"]
            if step == 3:
                stage.append(step)
                mean += 1
            step = boundary(sys._getframe(), step + 1)
        return [stages, stage, means["mean"].tolist(), mean.tolist()]

    equal_from_each_step(training, "stage stages mean means", 4)
    equal_from_each_step(training, "stages stage means mean", 4)


@pytest.mark.parametrize("first", [[0], {"a": 0}, torch.zeros(1), numpy.zeros(1)], ids=type)
def test_what_is_set_anew_to_an_equal_value_is_no_more_what_lies_in_a_list(first: Any) -> None:
    def training(boundary: Boundary) -> list[Any]:
        one, two = copy.deepcopy(first), {"inside": copy.deepcopy(first)}
        both = [one, two["inside"]]
        step = boundary(sys._getframe(), 0)
        while step < 6:
            if step == 1:
                one, two["inside"] = copy.deepcopy(first), copy.deepcopy(first)
            if step == 3:
                for part in both:
                    part["a" if isinstance(part, dict) else 0] = 7
            if step == 4:
                one = copy.deepcopy(both[0])
            if step == 5:
                both[0]["a" if isinstance(first, dict) else 0] = 8
            step = boundary(sys._getframe(), step + 1)
        return [str(part) for part in (one, two, both)]

    equal_from_each_step(training, "one two both", 6)
    equal_from_each_step(training, "both two one", 6)


def test_an_attribute_that_the_loop_deletes_is_not_there_after_a_restart() -> None:
    def training(boundary: Boundary) -> list[Any]:
        meter, slotted = Meter(), OpenListing()
        step = boundary(sys._getframe(), 0)
        while step < 5:
            if step == 1:
                del meter.total, slotted.limit
            if step == 2:
                del slotted.values
            if step == 3:
                meter.total = 7.0
            step = boundary(sys._getframe(), step + 1)
        return [vars(meter), vars(slotted), hasattr(slotted, "values")]

    equal_from_each_step(training, "meter.total meter.limit slotted.limit slotted.values", 5)
    equal_from_each_step(training, "slotted.values meter.total slotted.limit", 5)


def test_what_can_not_be_kept_of_an_object_was_not_deleted() -> None:
    keeper, opaque = Keeper(), SimpleNamespace(handle=object(), large=[0] * 2000, total=0)
    frame = sys._getframe()
    keeper.follow(frame, ["opaque.handle", "opaque.large", "opaque.total"])
    opaque.total += 1
    keeper.take(frame)
    assert [*keeper.saved().values()] == [{"total": 1}]


def test_what_is_read_behind_a_loop_is_kept_as_it_ends_alone() -> None:
    """Each iteration makes it anew, so in none but the last it is looked at; what is too large is named."""
    keeper = Keeper()
    frame = sys._getframe()
    loss, large, saves = 0.0, torch.zeros(1), []
    for epoch in range(2):
        for step in range(3):
            loss, large = 10.0 * epoch + step, torch.zeros(300, 300)
            if step == 2:
                keeper.follow_behind(frame, frozenset({"loss", "large"}), is_known=True)
            keeper.take(frame)
            saves.append({name: value for of in keeper.saved().values() for name, value in of.items()})
    assert (loss, large.numel()) == (12.0, 90_000)
    assert saves == [{}, {}, {"loss": 2.0}, {}, {}, {"loss": 12.0}]
    (named,) = keeper.warned
    assert "the script reads large, which the loop sets, and no save holds it (a Tensor" in named


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loop_that_a_restart_passes_by_leaves_what_it_had_left(*, is_known: bool) -> None:
    """Of two loops in an epoch it goes on in the second; what is read behind the first is that one's own."""

    def epoch(keeper: Keeper, *, goes_on: bool) -> list[Any]:
        frame, read = sys._getframe(), []
        for number in range(2):
            keeper.round = number
            if goes_on and number == 0:
                keeper.put_behind(frame)
            else:
                loss = torch.tensor(10.0 * number)
                keeper.follow_behind(frame, frozenset({"loss"}), is_known=is_known)
                keeper.take(frame)
                if not (is_known or goes_on):
                    assert not keeper.kept.earlier.of(f"{number}"), "nobody knows yet that it has ended"
                keeper.loop_ended()
            read.append(loss.item())  # set by the keeper, too
        return read

    before, after = Keeper(), Keeper()
    assert epoch(before, goes_on=False) == [0.0, 10.0]
    after.kept.restore(None, None, packed.unpack(packed.pack(before.kept.earlier.capture())))
    assert epoch(after, goes_on=True) == [0.0, 10.0]
    after.round = 0
    after._round = (0, 1, 5)  # of another epoch
    after.take(sys._getframe())
    assert not after.kept.earlier.of("0")


def test_two_names_of_one_object_that_are_both_set_anew_are_both_kept() -> None:
    """As `observation = environment.reset()` is, which gives the environment's own."""

    def training(boundary: Boundary) -> list[Any]:
        environment = SimpleNamespace(state=[100.0])
        observation = environment.state
        one = torch.zeros(2)
        other = one
        first = {"inside": [0]}
        inside = first["inside"]
        step = boundary(sys._getframe(), 0)
        while step < 6:
            environment.state = [environment.state[0] + 1]
            observation = environment.state
            one = one + 1
            other = one
            if step == 2:
                first["inside"] = inside = [7]
            inside.append(step)
            observation.append(step)
            step = boundary(sys._getframe(), step + 1)
        observation.append("both")
        other += 1
        return [observation, environment.state, one.tolist(), other.tolist(), first, inside]

    names = "environment.state observation one other first inside"
    equal_from_each_step(training, names, 6)
    equal_from_each_step(training, "inside first other one observation environment.state", 6)


def test_a_loss_of_another_class_is_named_and_not_put_into_the_one_that_a_restart_builds() -> None:
    def training(keeper: Keeper) -> nn.Module:
        frame = sys._getframe()
        criterion: nn.Module = nn.CrossEntropyLoss()
        keeper.follow(frame, ["criterion.label_smoothing", "criterion.ignore_index"])
        if keeper.kept.places() and not keeper.kept.is_empty and keeper.saves:
            keeper.put_back(frame)
            return criterion
        for step in range(4):
            if step == 1:
                criterion.label_smoothing = 0.5  # type: ignore[assignment]
            if step == 2:
                criterion = nn.MultiMarginLoss()
            keeper.take(frame)
            keeper.saves.append(keeper.saved())
        return criterion

    keeper = Keeper()
    training(keeper)
    assert [[*one.values()] for one in keeper.saves] == [[], [{"label_smoothing": 0.5}], [], []]
    (said,) = keeper.warned
    assert said.startswith(
        "criterion has become a MultiMarginLoss, and was a CrossEntropyLoss: no save holds"
    )
    for saved, smoothing in ((keeper.saves[1], 0.5), (keeper.saves[3], 0.0)):
        again = Keeper()
        again.kept.restore(saved)
        again.saves = keeper.saves
        assert training(again).label_smoothing == smoothing
