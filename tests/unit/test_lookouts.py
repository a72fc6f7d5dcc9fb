"""What a failure would lose is said: where `extra` and averages change, what a start builds otherwise."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.state.host_state import HostState
from jitckpt.worker.lookouts import extra_changes
from jitckpt.worker.lookouts.averages import CHANGES_LATE, Averages
from jitckpt.worker.lookouts.chosen_by_time import ChosenByTime
from jitckpt.worker.lookouts.extra_changes import ExtraChanges
from jitckpt.worker.lookouts.stepped_by_script import SteppedByScript
from jitckpt.worker.lookouts.structure import Structure
from jitckpt.worker.other_steps import OtherSteps
from jitckpt.worker.self_check.first_steps import FirstSteps


class Extra:
    """What the rank knows beside its model: a count."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


def state_of(**given: Any) -> HostState:
    nothing: dict[str, Any] = {
        "model": None,
        "optimizers": [],
        "schedulers": [],
        "scaler": None,
        "extra": None,
    }
    return HostState(**(nothing | given), device=None)


def test_extra_that_changes_between_minibatches_does_not_change_in_one() -> None:
    """Each of several optimizers tells, as its step ends, what the rank knows by then: a minibatch's last."""
    said: list[str] = []
    extra = Extra()
    looks = ExtraChanges(state_of(extra=extra), said.append, has_barrier=False)
    for step in range(1, extra_changes.LOOKED_AT + 2):
        extra.count += 1
        looks.forward_ended(step)
        looks.step_begins()
        looks.forward_ended(step)
    assert said == []
    looks.forward_ended(1)
    extra.count += 1
    looks.step_begins()
    assert said == [extra_changes.CHANGES_EARLY]


def test_with_a_barrier_or_an_adapter_nothing_of_extra_is_lost() -> None:
    said: list[str] = []
    extra = Extra()
    looks = ExtraChanges(state_of(extra=extra), said.append, has_barrier=True)
    looks.forward_ended(1)
    extra.count += 1
    looks.step_begins()
    looks.step_ended(1)
    looks.trust()
    extra.count += 1
    looks.goes_on(extra_changes.CHANGES_LATE)
    assert said == []


def test_extra_that_changes_behind_a_step_is_looked_at_in_the_first_minibatches() -> None:
    said: list[str] = []
    extra = Extra()
    looks = ExtraChanges(state_of(extra=extra), said.append, has_barrier=False)
    looks.base = 10
    for step in (10 + extra_changes.LOOKED_AT, 11 + extra_changes.LOOKED_AT):
        looks.step_ended(step)
        extra.count += 1
        looks.goes_on(extra_changes.CHANGES_LATE)
    assert said == [extra_changes.CHANGES_LATE]


def test_an_average_that_is_updated_behind_its_step_is_named() -> None:
    said: list[str] = []
    updates = [0]
    loop = SimpleNamespace(is_used=False)
    host = SimpleNamespace(updates_of_averages=lambda: [*updates])
    averages = Averages(host, loop, said.append)  # type: ignore[arg-type]
    averages.forward_begins()  # no step has ended yet
    averages.step_ended()
    averages.forward_begins()
    assert said == []
    updates[0] += 1
    averages.forward_begins()
    assert said == [CHANGES_LATE]
    loop.is_used = True  # it belongs to the loop's iteration
    averages.forward_begins()
    assert said == [CHANGES_LATE]


def test_a_scheduler_that_the_script_brings_forward_itself_is_undone_once() -> None:
    said: list[str] = []
    undone: list[object] = []

    def undo(counts: object, progress: object) -> tuple[dict[str, int], bool]:
        undone.append((counts, progress))
        return {"a scheduler": 4}, True

    host: Any = SimpleNamespace(
        kept=SimpleNamespace(schedulers=[object()]),
        counts=lambda: (4,),
        copied_progress=lambda: "progress",
        undo_steps=undo,
    )
    stepped = SteppedByScript(host, said.append)
    stepped.forward_begins()  # nothing was restored
    stepped.restored()
    stepped.forward_begins()
    stepped.forward_begins()
    assert undone == [((4,), "progress")]
    assert len(said) == 1
    assert "makes 4 steps of a scheduler between" in said[0]
    host.kept.schedulers = []
    stepped.restored()
    stepped.forward_begins()
    assert len(undone) == 1, "the script has given it, and brings nothing forward"


def test_parameters_that_come_and_go_are_named_and_what_can_t_be_saved_ends_it() -> None:
    said: list[str] = []
    ended: list[str] = []
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    host = state_of(model=model, optimizers=[optimizer])
    structure = Structure(host, said.append, ended.append)
    structure.follow(1)
    structure.step_ended()
    assert (said, ended) == ([], [])
    model.scale = nn.Parameter(torch.ones(1))
    structure.follow(2)
    assert len(said) == 1
    assert "After step 2 the model has got" in said[0]
    assert "scale" in said[0]
    (state,) = host.optimizers
    state.refusal = "its state is no tree."
    structure.step_ended()
    assert ended == ["its state is no tree."]


def test_an_optimizer_that_begins_when_nobody_looks_for_such_any_more_is_named_once() -> None:
    said: list[str] = []
    named: list[object] = []
    host = state_of()
    checker: Any = SimpleNamespace(
        has_named=lambda other: other in named, is_done=True, step_begins=lambda: None
    )
    check = FirstSteps(checker, host)
    reporter: Any = SimpleNamespace(warn_once=said.append)
    one = OtherSteps(host, Any, Any, check, reporter)  # type: ignore[arg-type]
    late = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1)
    assert not one.stepped_elsewhere(late), "the self-check still looks at who trains along"
    check.step_begins()
    assert one.stepped_elsewhere(late)
    assert len(said) == 1
    assert "(SGD with 2 parameters) makes steps" in said[0]
    named.append(late)
    assert one.stepped_elsewhere(late)
    named.clear()
    host.extra = SimpleNamespace(state_dict=lambda: late.param_groups[0]["params"])
    assert one.stepped_elsewhere(late)
    assert len(said) == 1, "it was named before, or `extra` has it"


def test_what_is_chosen_by_the_clock_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    looks = ChosenByTime(nn.Sequential(nn.Conv2d(1, 1, 1)), said.append)
    looks.step_ended()
    looks.step_ended()
    assert [text.partition(",")[0] for text in said] == ["torch.backends.cudnn.benchmark is on"]
    ChosenByTime(nn.Sequential(nn.Linear(1, 1)), said.append).step_ended()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    ChosenByTime(nn.Conv1d(1, 1, 1), said.append).step_ended()
    assert len(said) == 1


def test_kernels_that_inductor_chooses_by_the_clock_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(max_autotune=True))
    ChosenByTime(None, said.append).step_ended()
    assert ["max_autotune" in text for text in said] == [True]
