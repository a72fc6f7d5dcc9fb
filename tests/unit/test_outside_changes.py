"""What is changed outside of optimizer steps: which saves hold, which are refused, which take the copies."""

from collections.abc import Mapping
from typing import cast

import pytest
import torch
from torch import Tensor

from jitckpt.worker.saving import outside_changes
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.outside_changes import (
    AT_END,
    CLOSURE,
    HEAD,
    INSIDE,
    NO_ROOM,
    ONCE,
    OutsideChanges,
)


class Copies:
    """A mirror whose device makes every copy at once."""

    def __init__(self) -> None:
        self.taken: dict[int, dict[str, Tensor]] = {}

    def take(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        self.taken[step] = {name: tensor.clone() for name, tensor in tensors.items()}

    def of(self, step: int) -> dict[str, Tensor] | None:
        return self.taken.get(step)


class Loop:
    """A training whose changes a test makes; parameters model.a and model.b, a state of a."""

    def __init__(self) -> None:
        self.warned: list[str] = []
        self.mirror = Copies()
        self.outside = OutsideChanges(cast(Mirror, self.mirror), self.warned.append)
        self.parameters = {"model.a": torch.zeros(1), "model.b": torch.zeros(1)}
        self.state = {"optimizer.0.state.0.m": torch.zeros(1)}
        self.step = 0
        self.outside.begins(0, [self.parameters])

    def forward(self, *, boundary: bool = False, at_end: bool = False) -> None:
        self.outside.minibatch_begun(self.step + 1, boundary=boundary, at_end=at_end)

    def optimize(self) -> None:
        self.outside.step_begun(self.step + 1)
        self.step += 1
        for tensor in (self.parameters | self.state).values():
            tensor.add_(1)
        self.outside.ended(self.step, [self.parameters, self.state], lambda: self.parameters | self.state)

    def plain(self, steps: int) -> None:
        for _ in range(steps):
            self.forward()
            self.optimize()

    def change(self, name: str = "model.a", by: float = 0.25) -> None:
        (self.parameters | self.state)[name].add_(by)

    def is_saved(self) -> bool:
        return self.outside.replacement(self.step).problem is None


def test_a_plain_training_is_saved_as_it_is_and_nothing_is_copied() -> None:
    loop = Loop()
    loop.plain(5)
    loop.forward()
    assert loop.is_saved()
    assert not loop.outside.replacement(5).copies
    assert (loop.mirror.taken, loop.warned) == ({}, [])


def test_what_somebody_says_that_he_will_change_is_copied_before() -> None:
    loop = Loop()
    loop.plain(3)
    loop.outside.will_change(of_model_alone=True)
    loop.change()
    loop.change("model.b")
    copies = loop.outside.replacement(3).copies
    assert {name: tensor.item() for name, tensor in copies.items()} == {"model.a": 3, "model.b": 3}
    loop.change("optimizer.0.state.0.m")
    assert not loop.is_saved(), "of that nobody had said so"
    assert loop.warned == []


def test_where_the_host_has_no_room_nothing_is_copied_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    loop.plain(1)
    monkeypatch.setattr(outside_changes, "free_memory", lambda: 15)
    loop.outside.will_change(of_model_alone=True)
    assert (loop.mirror.taken, loop.warned) == ({}, [NO_ROOM])
    loop.change()
    assert not loop.is_saved()


def test_a_perturbation_is_refused_until_it_is_known_then_copied() -> None:
    loop = Loop()
    loop.plain(1)
    for known in (False, False, True, True):
        loop.forward()
        loop.change()
        assert loop.is_saved() == known
        if known:
            assert loop.outside.replacement(loop.step).copies["model.a"].item() == loop.step
        loop.change(by=-0.25)
        loop.optimize()
    assert loop.warned == [INSIDE.format(size="8 bytes")]


def test_a_first_change_that_does_not_come_in_each_minibatch_is_named_before_a_failure_meets_the_next() -> (
    None
):
    """An average of the weights in their place at each epoch's end, say."""
    loop = Loop()
    for epoch in range(3):
        loop.plain(2)
        assert (ONCE in loop.warned) == (epoch > 0)
        loop.change()
        loop.change(by=-0.25)
    loop.plain(2)
    assert loop.warned.count(ONCE) == 1


def test_what_is_changed_between_loops_is_copied_as_a_loop_ends_from_the_second_time_on() -> None:
    """An average of the weights in their place for the evaluation at each epoch's end."""
    loop = Loop()
    for epoch in range(4):
        for _ in range(3):
            loop.optimize()
            loop.forward(boundary=True)
        loop.optimize()
        loop.forward(boundary=True, at_end=True)
        loop.change()
        assert loop.is_saved() == (epoch > 0)
        if epoch:
            assert loop.outside.replacement(loop.step).copies["model.a"].item() == loop.step
        loop.change(by=-0.25)
    assert loop.warned == [AT_END.format(size="8 bytes")]
    copied = {step for step, copies in loop.mirror.taken.items() if copies}
    assert copied == {8, 12, 16}, "it is copied where nothing is changed"


def test_another_parameter_than_those_that_are_copied_is_refused_once_more() -> None:
    loop = Loop()
    for name in ("model.a", "model.a", "model.a"):
        loop.forward()
        loop.change(name)
        loop.change(name, -0.25)
        loop.optimize()
    loop.forward()
    loop.change("model.b")
    assert not loop.is_saved()


def test_what_is_done_after_every_step_belongs_to_it() -> None:
    loop = Loop()
    for known in (True, False, True, True):  # the first minibatch has nothing before it
        loop.forward()
        assert loop.is_saved() == known or loop.step == 0
        loop.optimize()
        loop.change()
    assert loop.warned == []


def test_until_the_device_is_behind_it_the_state_is_not_whole() -> None:
    loop = Loop()
    for _ in range(4):
        loop.forward()
        loop.optimize()
        loop.change()
    assert not loop.is_saved()
    loop.forward()
    assert loop.is_saved()


def test_from_the_change_until_the_copies_there_is_no_moment_at_which_it_is_not_known() -> None:
    """The saver looks from another thread: here right after the tensors are looked at."""
    loop = Loop()
    for _ in range(4):
        loop.forward()
        loop.optimize()
        loop.change()
    looked: list[bool] = []
    names, writes = loop.outside._looked

    class Watched:
        def look(self) -> None:
            writes.look()
            looked.append(loop.is_saved())

        def changed(self) -> list[int]:
            return writes.changed()

    loop.outside._looked = names, Watched()
    loop.forward()
    assert looked == [False]
    assert loop.is_saved()


def test_what_ends_each_step_is_let_come_to_its_end() -> None:
    loop = Loop()
    loop.plain(2)
    assert not loop.outside.end_the_step

    loop = Loop()
    for _ in range(4):
        loop.forward()
        loop.optimize()
        loop.change()
    assert loop.outside.end_the_step


def test_what_is_done_now_and_then_is_refused_for_that_minibatch_alone() -> None:
    loop = Loop()
    loop.plain(3)
    loop.change()
    loop.forward()
    assert not loop.is_saved()
    loop.optimize()
    loop.plain(2)
    loop.forward()
    assert loop.is_saved()
    loop.optimize()
    loop.change()
    loop.forward()
    assert not loop.is_saved()
    assert loop.warned == [ONCE, HEAD]


def test_what_is_done_before_every_minibatch_is_never_counted_to_the_step_before() -> None:
    loop = Loop()
    for _ in range(5):
        loop.change()
        loop.forward()
        assert loop.step == 0 or not loop.is_saved()
        loop.optimize()


def test_where_the_loop_tells_its_boundaries_all_before_them_is_counted() -> None:
    loop = Loop()
    for turn in range(9):
        loop.forward(boundary=True)
        loop.optimize()
        if turn % 3 == 2:
            loop.change()
    loop.forward(boundary=True)
    assert loop.is_saved()
    assert loop.warned == []


def test_what_somebody_else_has_looked_for_is_known_from_then_on() -> None:
    """As the self-check looks once, after the second step: what follows is the same again."""
    loop = Loop()
    loop.plain(1)
    for look in (False, True, False, False):
        loop.outside.minibatch_begun(loop.step + 1, look=look, boundary=True)
        assert loop.is_saved()
        loop.optimize()
        loop.change()
    assert loop.warned == []


def test_taking_the_data_counts_as_changing_all_parameters() -> None:
    loop = Loop()
    for known in (False, False, True):
        loop.forward()
        loop.outside.taken()
        assert loop.is_saved() == known or loop.step == 0
        loop.optimize()
    assert loop.mirror.taken[loop.step - 1].keys() == loop.parameters.keys()


def test_the_optimizers_state_is_watched_too() -> None:
    loop = Loop()
    loop.plain(2)
    loop.forward()
    loop.change("optimizer.0.state.0.m")
    assert not loop.is_saved()


def test_closures_that_are_called_again_have_all_copied() -> None:
    loop = Loop()
    for _ in range(3):
        loop.forward()
        loop.outside.step_begun(loop.step + 1)
        loop.outside.closure_again(loop.step + 1)
        assert loop.outside.has_all_of(loop.step) == (loop.step > 0)
        if loop.step:
            assert loop.outside.replacement(loop.step).copies.keys() == (loop.parameters | loop.state).keys()
        loop.optimize()
    assert loop.warned == [CLOSURE.format(size="24 bytes")]


def test_a_save_that_was_taken_hears_of_what_changed_after() -> None:
    loop = Loop()
    loop.plain(3)
    assert not loop.outside.minibatch_begun(4, look=True)
    loop.optimize()
    loop.change()
    assert loop.outside.minibatch_begun(5, look=True)
    assert not loop.outside.is_counted(5)
