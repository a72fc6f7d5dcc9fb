"""A save restored into copies of the objects as they were: what a restart would bring back, and what not."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_presented import OPTIMIZERS, SCHEDULERS
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler

from jitckpt.state.host_state import HostState
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.saver import document_of
from jitckpt.worker.self_check import checker, comparison
from jitckpt.worker.self_check.comparison import Difference, Snapshot
from jitckpt.worker.self_check.fresh_copy import FreshCopy, worth_looking_at


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.norm(self.conv(batch)).mean((2, 3))))
        return result


class Training:
    """On the host. `begin` is jitckpt.init, `differences` restores a save of now and compares."""

    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer], schedule: Any) -> None:
        torch.manual_seed(0)
        self.model = Tied()
        self.optimizer = make(list(self.model.parameters()))
        self.scheduler = schedule(self.optimizer)

    def begin(self, limit: int | None = None) -> None:
        objects: dict[str, Any] = {
            "model": self.model,
            "optimizers": [self.optimizer],
            "schedulers": [self.scheduler],
            "scaler": None,
        }
        self.fresh = FreshCopy(**objects, limit=limit)
        self.host = HostState(**objects, extra=None, device=None)
        self.history = History(self.host)

    def go_on(self) -> None:
        for step in (1, 2):
            self.model(torch.randn(3, 1, 5, 5)).square().mean().backward()
            self.optimizer.step()
            self.history.add(step, self.host.shared())
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.history.settle(step)

    def describe(self, optimizer: torch.optim.Optimizer, scheduler: Any, module: nn.Module) -> Snapshot:
        state = checker._describe_state(module, [optimizer], self.fresh.names, self.fresh.sampled)
        progress = checker._describe_progress([optimizer], [scheduler])
        tensors = state.tensors | progress.tensors
        return state.texts | progress.texts | comparison.leaves(tensors, checker._restored(tensors))

    def differences(self) -> list[Difference]:
        snapshot = self.history.snapshot(2)
        assert snapshot is not None
        local = self.host.local()
        trees = {"trees": {name: part.tree for name, part in local.items()}}
        document, tensors = document_of(
            self.host, self.history, snapshot, step=2, reason="a test", local=trees
        )
        for part in local.values():
            tensors |= part.tensors
        tensors |= self.host.parameters()
        tensors |= {
            name: torch.empty_like(tensor, device="meta")
            for name, tensor in tensors.items()
            if name.startswith("model.") and name.removeprefix("model.") not in self.fresh.sampled
        }
        self.fresh.restore(document, tensors)
        return comparison.compare(
            self.describe(self.optimizer, self.scheduler, self.model),
            self.describe(self.fresh.optimizers[0], self.fresh.schedulers[0], self.fresh.copy),
        )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torchs_own_come_back_as_they_are(optimizer: str, scheduler: str) -> None:
    training = Training(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    training.begin()
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    drawn = torch.get_rng_state()
    training.go_on()
    assert training.differences() == []
    assert not torch.equal(torch.get_rng_state(), drawn), "the training has drawn"
    now = training.model.state_dict()
    assert not torch.equal(now["first.weight"], before["first.weight"])
    assert torch.equal(training.fresh.copy.get_parameter("first.weight"), now["first.weight"])
    assert training.fresh.copy.get_parameter("second.weight") is training.fresh.copy.get_parameter(
        "first.weight"
    )


def adam(given: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(given)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2)


def test_the_training_is_not_touched() -> None:
    training = Training(adam, step_lr)
    training.begin()
    training.go_on()
    now = copy.deepcopy([training.model.state_dict(), training.optimizer.state_dict()])
    drawn = torch.get_rng_state()
    training.differences()
    torch.testing.assert_close(
        [training.model.state_dict(), training.optimizer.state_dict()], now, rtol=0, atol=0
    )
    assert torch.equal(torch.get_rng_state(), drawn)


class Counting(torch.optim.Adam):
    """Keeps what no state_dict holds."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__(given)
        self.counter, self.averages = 0, [torch.zeros(2)]

    def step(self, closure: Any = None) -> Any:
        self.counter += 1
        self.averages[0].add_(1)
        return super().step(closure)


def test_attributes_that_change_come_back() -> None:
    training = Training(Counting, step_lr)
    training.begin()
    training.go_on()
    assert comparison.sentences(training.differences()) == []


def test_a_parameter_that_is_frozen_after_init_comes_back_so() -> None:
    training = Training(adam, step_lr)
    training.begin()
    training.model.get_parameter("conv.bias").requires_grad_(False)
    training.go_on()
    assert comparison.sentences(training.differences()) == []


@pytest.mark.parametrize("trained", [True, False])
def test_a_tensor_that_is_no_parameter_is_trained_in_the_copy_as_well(trained: bool) -> None:
    """A temperature that is learned; the flat copies of mixed precision are not."""
    temperature = torch.zeros(1, requires_grad=trained)
    training = Training(lambda given: adam([*given, temperature]), step_lr)
    training.begin()
    copied = training.fresh.optimizers[0].param_groups[0]["params"][-1]
    assert type(copied) is Tensor
    assert copied.requires_grad == trained


class Casting(lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"last_epoch": float(state_dict["last_epoch"])})


def test_a_load_state_dict_that_changes_what_it_loads_is_named() -> None:
    training = Training(adam, lambda optimizer: Casting(optimizer, 2))
    training.begin()
    training.go_on()
    assert comparison.sentences(training.differences()) == [
        "scheduler 0.last_epoch (2, but 2.0 after a restore)"
    ]


def test_of_large_tensors_there_is_no_copy() -> None:
    training = Training(lambda given: torch.optim.SGD(given, lr=0.1), step_lr)
    training.begin(limit=600)
    sizes = {name: one.nbytes for name, one in training.model.named_parameters()}
    fresh = training.fresh
    taken = fresh.sampled & sizes.keys()
    assert taken
    assert sum(sizes[name] for name in taken) * 4 <= 600
    assert {
        fresh.copy.get_parameter(name).device.type for name in sizes.keys() - taken - {"second.weight"}
    } == {"meta"}
    training.go_on()
    assert training.differences() == []


def test_what_cant_be_copied_is_named() -> None:
    class Locked(lr_scheduler.StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, 2)
            self.lock = threading.Lock()

    training = Training(adam, Locked)
    with pytest.raises(TypeError, match=r"Locked\.lock can't be copied .*pickle"):
        training.begin()


def test_a_scaler_is_copied() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0)
    fresh = FreshCopy(model=model, optimizers=[optimizer], schedulers=[], scaler=scaler, limit=None)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(4.0)
    fresh.scaler.load_state_dict(scaler.state_dict())
    assert fresh.scaler.state_dict() == scaler.state_dict()


def test_many_tensors_are_not_all_looked_at() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(400)])
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = lr_scheduler.LambdaLR(
        torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), lambda _: 1.0
    )
    objects: dict[str, Any] = {"model": model, "optimizers": [optimizer], "schedulers": [scheduler]}
    assert len(FreshCopy(**objects, scaler=None, limit=1 << 20).sampled) == 64
    assert len(FreshCopy(**objects, scaler=None, limit=None).sampled) == 400


def test_some_of_each_kind_are_looked_at() -> None:
    tensors = {f"bias {number}": torch.zeros(1 + number) for number in range(5)}
    tensors |= {f"kernel {number}": torch.zeros(2, 2, 3 + number, 3) for number in range(5)}
    tensors["laid out"] = torch.zeros(4, 3, 9, 9).to(memory_format=torch.channels_last)
    order = worth_looking_at(tensors)
    assert order[:5] == ["bias 0", "kernel 0", "laid out", "bias 1", "kernel 1"]
    assert sorted(order) == sorted(tensors)
