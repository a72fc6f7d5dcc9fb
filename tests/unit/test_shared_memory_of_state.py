"""Tensors of an optimizer's state that are one tensor, or lie in memory that something else knows."""

import itertools
import random
from typing import Any

import numpy
import pytest
import torch
from test_optimizer_state import host_of, net, put, step, take
from torch.optim import Optimizer

from jitckpt.worker.saving.history import History


class OneForAll(Optimizer):
    """Keeps one tensor under all parameters, as Adam-mini does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        first = self.state[group["params"][0]]
        shared = first.setdefault("shared", torch.zeros(3))
        for parameter in group["params"]:
            state = self.state[parameter]
            state["shared"] = shared
            state.setdefault("count", first.get("count", torch.zeros(())))
            shared.add_(parameter.grad.mean())
            state["count"] += 1
            parameter.sub_(shared.mean() + state["count"], alpha=0.1)


class Flat(Optimizer):
    """Has its momenta in one buffer. late: these are made in the first step."""

    def __init__(self, parameters: Any, *, late: bool = False, table: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.flat = torch.zeros(sum(one.numel() for one in self.param_groups[0]["params"]))
        self.table = torch.arange(4.0) if table else None
        if not late:
            self._make()

    def _make(self) -> None:
        at = 0
        for parameter in self.param_groups[0]["params"]:
            part = self.flat[at : at + parameter.numel()]
            self.state[parameter]["momentum"] = part.view_as(parameter)
            at += parameter.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.state:
            self._make()
        self.flat.mul_(0.9)
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter]["momentum"]
            if self.table is not None:
                self.state[parameter]["table"] = self.table
                self.state[parameter]["momentum"] = momentum = momentum.clone()
            momentum.add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.1)


def test_one_tensor_under_several_parameters_is_one_again() -> None:
    model = net()
    optimizer = OneForAll(model.parameters())
    step(model, optimizer)
    saved = take(host_of(model, optimizer))
    assert sum(name.endswith(".shared") for name in saved[1]) <= 1
    again = net()
    others = OneForAll(again.parameters())
    put(host_of(again, others), saved)
    assert len({id(state["shared"]) for state in others.state.values()}) == 1
    assert len({id(state["count"]) for state in others.state.values()}) == 1
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(again, others, seed)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_state_that_the_script_builds_keeps_its_memory() -> None:
    model = net()
    optimizer = Flat(model.parameters())
    host = host_of(model, optimizer)
    step(model, optimizer)
    saved = take(host)
    assert host.optimizers[0].refusal is None
    again = net()
    others = Flat(again.parameters())
    put(host_of(again, others), saved)
    assert torch.equal(others.flat, optimizer.flat)
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(again, others, seed)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_state_in_memory_that_an_attribute_has_is_refused_once_it_changes() -> None:
    model = net()
    optimizer = Flat(model.parameters(), late=True)
    host = host_of(model, optimizer)
    for seed in range(2):
        step(model, optimizer, seed)
        host.shared()
    refusal = host.optimizers[0].refusal
    assert refusal is not None
    assert "'0.momentum'" in refusal or "'3.momentum'" in refusal
    assert "__init__" in refusal


def test_a_table_that_never_changes_may_lie_in_an_attribute() -> None:
    model = net()
    optimizer = Flat(model.parameters(), table=True)
    host = host_of(model, optimizer)
    for seed in range(3):
        step(model, optimizer, seed)
        host.shared()
    assert host.optimizers[0].refusal is None


class Counting(Optimizer):
    def __init__(self, parameters: Any, kept: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept = kept

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def _of_slots(kept: Slots) -> None:
    kept.number += 1


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (torch.Generator(), lambda kept: torch.rand(1, generator=kept)),
        (random.Random(1), random.Random.random),
        (numpy.random.default_rng(1), lambda kept: kept.random()),
        (numpy.random.RandomState(1), lambda kept: kept.rand()),
        (itertools.count(), next),
        (Slots(), _of_slots),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_changes_inside_of_an_attribute_is_named(kept: Any, change: Any) -> None:
    model = net()
    host = host_of(model, Counting(model.parameters(), kept))
    host.shared()
    assert host.optimizers[0].problems() == []
    change(kept)
    host.shared()
    (problem,) = host.optimizers[0].problems()
    assert "'kept'" in problem
    assert "Counting" in problem


class Wrapper:
    """Counts, and keeps slow weights, after its optimizer's own step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [one.detach().clone() for one in optimizer.param_groups[0]["params"]]


def test_what_a_wrapper_does_after_the_step_belongs_to_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Wrapper(optimizer)
    host = host_of(model, optimizer, wrapper)
    history = History(host)
    step(model, optimizer)
    history.add(1, host.shared())
    wrapper.steps += 1
    wrapper.slow[0].add_(1)
    history.settle(1)
    snapshot = history.snapshot(1)
    assert snapshot is not None
    again = net()
    inner = torch.optim.SGD(again.parameters(), lr=0.1)
    other = Wrapper(inner)
    host_again = host_of(again, inner, other)
    (part,) = snapshot.shared.optimizers
    state = part.on_host()
    host_again.optimizers[0].restore(state.tree, state.tensors, snapshot.shared.groups[0], whole=False)
    assert other.steps == 1
    assert torch.equal(other.slow[0], wrapper.slow[0])


def test_a_wrapper_of_a_wrapper_is_no_attribute_that_changes() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = Wrapper(optimizer)
    outer = Wrapper(optimizer)
    outer.optimizer = inner  # type: ignore[assignment]
    host = host_of(model, optimizer, outer, inner)
    inner.steps += 1
    host.shared()
    assert host.optimizers[0].problems() == []
