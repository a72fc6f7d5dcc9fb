"""Loops that a script leaves by an exception of its own are left by the same after a failure."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import LOADERS, Training, generators, listed, resumed, run

from jitckpt._seen import Exit
from jitckpt.data import exits, loop, loop_exits
from jitckpt.data.loop_exits import OVER_STEPS, LoopExits
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded

pytestmark = pytest.mark.usefixtures("nothing_is_watched")


class Enough(Exception):
    """Ends a training early."""


class OtherEnough(Exception):
    """Does so, too."""


class MadeInAWayOfItsOwn(Enough):
    def __new__(cls, *, step: int) -> "MadeInAWayOfItsOwn":
        return super().__new__(cls)

    def __init__(self, *, step: int) -> None:
        super().__init__("enough", step)
        self.step = step


class InSlots(Enough):
    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step


def trained(training: Training, loader: Any, most: int) -> None:
    for batch in training.loop.batches(loader):
        training.told.append((listed(batch), generators()))
        training.optimize()
        if training.step % 5 == most:
            raise Enough(training.step)


def out_of_batches(training: Training, loader: Any, plain: bool) -> None:
    for epoch in training.loop.epochs(3):
        try:
            trained(training, loader, 3)
        except Enough as enough:
            training.told.append((epoch, enough.args, generators()))
        else:
            training.told.append("to its end")
        training.told.append(generators())


def out_of_both(training: Training, loader: Any, plain: bool) -> None:
    """A fold's training ends by an exception; what comes behind differs from where the loop has its end."""
    for fold in range(3):
        try:
            for _ in training.loop.epochs(2):
                trained(training, loader, 3 if fold != 1 else 9)
                generators()
            training.told.append((fold, "to its end"))
        except (KeyError, Enough):
            training.told.append((fold, "enough", generators()))


def behind_the_batches(training: Training, loader: Any, plain: bool) -> None:
    """It is raised by the evaluation, and a second training follows."""
    try:
        for epoch in training.loop.epochs(3):
            trained(training, loader, 9)
            training.told.append(generators())
            if epoch == 1:
                raise Enough
        training.told.append("to its end")
    except Enough:
        training.told.append("enough")
    for _ in training.loop.epochs(1):
        trained(training, loader, 9)


def out_of_steps(training: Training, loader: Any, plain: bool) -> None:
    for _ in range(2):
        try:
            for step in training.loop.steps(6):
                training.told.append((step, generators()))
                training.optimize()
                if step == 2:
                    raise Enough
            training.told.append("to its end")
        except Enough:
            training.told.append(("enough", generators()))


@pytest.mark.parametrize("script", [out_of_batches, out_of_both, behind_the_batches, out_of_steps])
def test_loops_are_left_in_the_same_way(script: Callable[[Training, Any, bool], None]) -> None:
    undisturbed = run(script, LOADERS["shuffled"])
    assert undisturbed.warnings == []
    for step, state in undisturbed.boundary.items():
        assert resumed(script, LOADERS["shuffled"], state).told == undisturbed.told, step


def told_in(way: Callable[[Callable[[], None]], None]) -> bytes:
    told: list[bytes] = []

    def leave() -> None:
        for one in Exit(lambda exception: told.append(exits.told(exception, sys._getframe(1))), iter("abc")):
            raise Enough(one, 2)

    way(leave)
    return told[0]


def by_its_class(leave: Callable[[], None]) -> None:
    try:
        leave()
    except Enough:
        generators()


def behind_others(leave: Callable[[], None]) -> None:
    try:
        try:
            leave()
        except OtherEnough:
            pass
        finally:
            generators()
    except (OtherEnough, Enough):
        pass


def of_any(leave: Callable[[], None]) -> None:
    try:
        leave()
    except Exception:
        generators()


def by_all(leave: Callable[[], None]) -> None:
    try:
        leave()
    except:  # noqa: E722
        generators()


def raised_again(leave: Callable[[], None]) -> None:
    try:
        try:
            leave()
        except Enough:
            raise
    except Enough:
        pass


def test_only_what_the_script_catches_by_its_class_and_ends_there_is_told() -> None:
    for way in (by_its_class, behind_others):
        exception = exits.made(told_in(way))
        assert type(exception) is Enough
        assert exception.args == ("a", 2)
    for way in (of_any, by_all, raised_again):
        assert told_in(way) == b""
    with pytest.raises(Enough):
        told_in(lambda leave: leave())


def test_an_iterator_that_ends_or_is_let_go_tells_of_none() -> None:
    told: list[BaseException | None] = []
    assert [*Exit(told.append, iter("ab"))] == ["a", "b"]
    for _ in Exit(told.append, iter("ab")):
        break
    assert told == [None, None]
    with pytest.raises(TypeError):
        Exit(told.append, 3)  # type: ignore[arg-type]


def test_what_fails_as_it_is_told_does_not_stop_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def fails(exception: BaseException | None) -> None:
        raise OtherEnough

    def leave() -> None:
        for _ in Exit(fails, iter("a")):
            raise Enough

    with pytest.raises(Enough):
        leave()
    assert [one.exc_type for one in unraisable] == [OtherEnough]


def test_a_failure_is_no_exit() -> None:
    training = Training()
    with pytest.raises(Enough):
        trained(training, LOADERS["shuffled"](), 3)
    assert training.loop._passes[0].exit == b""
    assert not training.loop._passes[0].ended
    assert loop.DROPPED not in training.warnings


def out_by_one_of_pythons(training: Training, loader: Any, plain: bool) -> None:
    for number in range(2):
        with contextlib.suppress(KeyError):
            for _ in training.loop.steps(3):
                training.optimize()
                raise KeyError(number)


def outside_of_epochs(training: Training, loader: Any, plain: bool) -> None:
    with contextlib.suppress(OtherEnough):
        try:
            trained(training, loader, 3)
        except Enough:
            training.told.append("enough")
    for _ in training.loop.epochs(1):
        trained(training, loader, 9)


@pytest.mark.parametrize(
    ("script", "said"),
    [(out_by_one_of_pythons, loop_exits.DROPPED), (outside_of_epochs, loop_exits.PASSED_BY)],
)
def test_what_a_restart_does_otherwise_is_named_once(
    script: Callable[[Training, Any, bool], None], said: str
) -> None:
    assert run(script, LOADERS["shuffled"]).warnings == [said]


def test_a_class_that_is_not_there_is_named() -> None:
    said: list[str] = []
    told = told_in(by_its_class).replace(b"Enough", b"Nobody")
    LoopExits(said.append).raise_again(told)
    assert said == [exits.NOWHERE]


def test_what_a_replica_tells_of_a_loop_over_steps_is_taken_over() -> None:
    replica, own = LoopExits(pytest.fail), LoopExits(pytest.fail)
    replica.left(OVER_STEPS, 1, told_in(by_its_class))
    tensors = {name: torch.frombuffer(bytearray(exit), dtype=torch.uint8) for name, exit in replica.pieces()}
    kept = Encoded({"exits": replica.tree()}, tensors)
    saved = tree_codec.decode(kept.tree, kept.tensors)
    own.take(saved, 0)
    own.leave_again(OVER_STEPS, 0)
    own.take(saved, 1)
    with pytest.raises(Enough):
        own.leave_again(OVER_STEPS, 1)
    own.epoch_begins()
    own.leave_again(OVER_STEPS, 1)


def test_one_of_a_class_with_a_way_of_its_own_is_made_again() -> None:
    told = told_by(MadeInAWayOfItsOwn(step=3))
    made = exits.made(told)
    assert isinstance(made, MadeInAWayOfItsOwn)
    assert (made.args, made.step) == (("enough", 3), 3)


def test_nothing_is_told_of_one_that_can_not_be_made_again() -> None:
    assert told_by(InSlots(3)) == b""


def told_by(exception: Enough) -> bytes:
    told: list[bytes] = []

    def leave() -> None:
        for _ in Exit(lambda one: told.append(exits.told(one, sys._getframe(1))), iter("abc")):
            raise exception

    by_its_class(leave)
    return told[0]


def bar(iterable: Any) -> Any:
    """As a progress bar is: it holds on to what it draws from."""
    yield from iter(iterable)


def in_a_bar(training: Training, loader: Any, plain: bool) -> None:
    for _ in range(2):
        with contextlib.suppress(Enough):
            for step in bar(training.loop.steps(6)):
                training.optimize()
                if step == 2:
                    raise Enough


def over_epochs_in_a_bar(training: Training, loader: Any, plain: bool) -> None:
    for _ in range(2):
        with contextlib.suppress(Enough):
            for epoch in bar(training.loop.epochs(3)):
                trained(training, loader, 9)
                if epoch == 1:
                    raise Enough


@pytest.mark.parametrize("script", [in_a_bar, over_epochs_in_a_bar])
def test_a_loop_in_a_progress_bar_is_over_and_named(script: Callable[[Training, Any, bool], None]) -> None:
    assert run(script, LOADERS["shuffled"]).warnings == [loop_exits.DROPPED]


AT_THE_END = """
from jitckpt.data.loop_exits import LoopExits

of_loop = LoopExits(print).seen(iter([1, 2]))
next(of_loop)
"""


def test_a_loop_that_is_there_until_the_interpreters_end_is_no_error() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
