"""Objects of a training that say for a while what they did some steps before."""

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler

from jitckpt.errors import SaveError
from jitckpt.saves.final_state import Digest
from jitckpt.state.host_state import HostState
from jitckpt.worker.saving import found, presented
from jitckpt.worker.saving.history import History, SharedSnapshot
from jitckpt.worker.saving.presented import Memento
from jitckpt.worker.saving.saver import document_of

Optimizers = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "Adam": torch.optim.Adam,
    "Adam with a rate that is a tensor": lambda given: torch.optim.Adam(given, lr=torch.tensor(0.01)),
    "NAdam": torch.optim.NAdam,
    "Adadelta": torch.optim.Adadelta,
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "SGD with momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
}


class Slow(torch.optim.SGD):
    """Keeps slow weights on the host, and how often it has stepped, in attributes."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__(given, lr=0.1)
        self.slow, self.counts = [torch.zeros(3)], {"steps": 0}

    def step(self, closure: Any = None) -> Any:
        self.slow[0] += 1
        self.counts["steps"] += 1
        return super().step(closure)

    def says(self) -> list[Any]:
        return [self.slow[0].tolist(), dict(self.counts), id(self.slow[0]), id(self.counts)]


class Decay:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**step


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2),
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, Decay()),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=20, cycle_momentum=False),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.ConstantLR(one), lr_scheduler.ExponentialLR(one, 0.9)], [3]
    ),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.StepLR(one, 2)]
    ),
}


class Training:
    def __init__(self, optimizer: str, scheduler: str, *, given: bool = True) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.host = HostState(
            model=None,
            optimizers=[self.optimizer],
            schedulers=[self.scheduler] if given else [],
            scaler=None,
            extra=None,
            device=None,
        )
        self.history = History(self.host)
        self.found = None if given else found.look([], None)
        self.step = 0

    def go_on(self, steps: int, *, last_scheduler_step: bool = True) -> None:
        for number in range(steps):
            self.step += 1
            self.history.settle(self.step - 1)
            if self.found is not None:
                self.found.settle(self.step - 1)
            self.model(torch.randn(3, 4) + random.random()).square().mean().backward()
            self.optimizer.step()
            self.history.add(self.step, self.host.shared())
            if self.found is not None:
                self.found.add(self.step)
            self.local = self.host.local()
            if last_scheduler_step or number < steps - 1:
                self.scheduler.step()

    def says(self) -> dict[str, Any]:
        """Return what a save function may read of the host's state."""
        return copy.deepcopy(
            {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "rates": [
                    self.scheduler.get_last_lr(),
                    [group["lr"] for group in self.optimizer.param_groups],
                ],
            }
        )

    def document(self, step: int, local: Any) -> tuple[SharedSnapshot, dict[str, Any], dict[str, Tensor]]:
        snapshot = self.history.snapshot(step)
        assert snapshot is not None
        trees = {"trees": {name: part.tree for name, part in local.items()}}
        document, tensors = document_of(
            self.host, self.history, snapshot, step=step, reason="a test", local=trees
        )
        for part in local.values():
            tensors |= part.tensors
        return snapshot, document, tensors


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    differing = [name for name in one if digest(one[name]) != digest(other[name])]
    assert not differing, [(one[name], other[name]) for name in differing]


def digest(value: object) -> str:
    found = Digest()
    found.add(value, "value")
    assert not found.left_out
    return found.text()


def objects(training: Training) -> list[int]:
    """Return which objects make up the optimizer."""
    states = training.optimizer.state.values()
    groups = training.optimizer.param_groups
    return [id(one) for part in (*states, *groups) for one in (part, *part, *part.values())]


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_say_what_they_did_and_then_what_they_do_now(optimizer: str, scheduler: str, ahead: int) -> None:
    training = Training(optimizer, scheduler)
    training.go_on(3)
    then, local, drawn_then = training.says(), training.local, torch.get_rng_state()
    training.go_on(ahead)
    now, parts, drawn_now = training.says(), objects(training), (random.getstate(), torch.get_rng_state())
    snapshot, document, tensors = training.document(3, local)
    with presented.presented(training.host, snapshot, document, tensors):
        assert_same(training.says(), then)
        assert torch.equal(torch.get_rng_state(), drawn_then)
    assert_same(training.says(), now)
    assert objects(training) == parts
    assert random.getstate() == drawn_now[0]
    assert torch.equal(torch.get_rng_state(), drawn_now[1])


def test_attributes_of_an_optimizer_are_what_they_were_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Slow", Slow)
    training = Training("Slow", "StepLR")
    training.go_on(3)
    local, optimizer = training.local, cast(Slow, training.optimizer)
    training.go_on(2)
    now = optimizer.says()
    with presented.presented(training.host, *training.document(3, local)):
        assert optimizer.says()[:2] == [[3, 3, 3], {"steps": 3}]
    assert optimizer.says() == now


def test_a_scheduler_that_is_still_to_be_stepped_says_that_it_was() -> None:
    training = Training("Adam", "OneCycleLR")
    training.go_on(4)
    then = training.says()
    again = Training("Adam", "OneCycleLR")
    again.go_on(4, last_scheduler_step=False)
    now = again.says()
    snapshot, document, tensors = again.document(4, again.local)
    assert document["scheduler_steps_due"] == (1,)
    with presented.presented(again.host, snapshot, document, tensors):
        assert_same(again.says(), then)
    assert_same(again.says(), now)


def test_an_exception_of_the_save_function_leaves_all_as_it_was() -> None:
    training = Training("Adam", "StepLR")
    training.go_on(2)
    local = training.local
    training.go_on(2)
    now = training.says()
    snapshot, document, tensors = training.document(2, local)

    def call() -> None:
        with presented.presented(training.host, snapshot, document, tensors):
            training.optimizer.state.clear()
            training.optimizer.param_groups.append({"lr": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call()
    assert_same(training.says(), now)


def test_what_cant_be_put_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("Adam", "StepLR")
    training.go_on(2)
    local = training.local
    training.go_on(2)
    snapshot, document, tensors = training.document(2, local)

    def refuse(scheduler: Any, state: object) -> None:
        scheduler.last_epoch = 77
        raise RuntimeError("not while it runs")

    monkeypatch.setattr(lr_scheduler.LRScheduler, "load_state_dict", refuse)
    now = training.says()
    with (
        pytest.raises(SaveError, match=r"after step 2 can't be put into its objects: .*not while it runs"),
        presented.presented(training.host, snapshot, document, tensors),
    ):
        pytest.fail("it was called")
    assert_same(training.says(), now)


@pytest.mark.parametrize("scheduler", ["LambdaLR", "SequentialLR"])
def test_schedulers_that_were_not_given_are_found(scheduler: str) -> None:
    training = Training("Adam", scheduler, given=False)
    assert training.found is not None
    assert [one.scheduler for one in training.found.host.schedulers].count(training.scheduler) == 1
    training.found = found.Found([training.scheduler], None)  # tests before this one may have left others
    training.go_on(3)
    then, local = training.says(), training.local
    training.go_on(4)
    now = training.says()
    snapshot, document, tensors = training.document(3, local)
    with (
        presented.presented(training.host, snapshot, document, tensors),
        training.found.presented(3, optimizers_restored=False),
    ):
        assert_same(training.says(), then)
    assert_same(training.says(), now)
    training.found.forget_before(5)
    with (
        pytest.raises(SaveError, match="after step 3 is kept no more"),
        training.found.presented(3, optimizers_restored=False),
    ):
        pytest.fail("it was called")


def test_a_found_scheduler_with_a_step_to_come_is_refused_where_a_restart_puts_the_rates_back() -> None:
    training = Training("Adam", "StepLR", given=False)
    training.found = found.Found([training.scheduler], None)
    training.go_on(4, last_scheduler_step=False)
    with (
        pytest.raises(SaveError, match="give it to jitckpt"),
        training.found.presented(4, optimizers_restored=True),
    ):
        pytest.fail("it was called")
    with training.found.presented(4, optimizers_restored=False):
        assert training.scheduler.last_epoch == 4
    assert training.scheduler.last_epoch == 3


def test_a_scaler_says_what_it_did() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    now = (scaler._scale, scaler._growth_tracker)
    presented._present_scaler(scaler, scaler.state_dict() | {"scale": 4.0, "_growth_tracker": 3})
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (4.0, 3)
    assert cast(Tensor, now[0]).item() == 8.0, "what is on the device is not written to"


def test_a_memento_puts_back_the_same_objects() -> None:
    class Thing:
        def __init__(self) -> None:
            self.number, self.list, self.deque = torch.tensor(1.0), [1, {"a": 2}], deque([3], maxlen=2)
            self.ordered, self.set, self.itself = OrderedDict(x=1, y=2), {5}, self

    thing = Thing()
    before = {name: value for name, value in vars(thing).items() if name != "itself"}
    shown, version = copy.deepcopy(before), thing.number._version
    memento = Memento([thing])
    memento.put_back()
    assert thing.number._version == version, "what has not changed is not written to"
    thing.number.fill_(2.0)
    inner = cast(dict[str, int], thing.list[1])
    inner["a"] = 7
    thing.list.pop(0)
    thing.deque.extend([1, 2])
    thing.ordered.move_to_end("x")
    thing.set.add(6)
    vars(thing)["more"] = 1
    memento.put_back()
    assert {name: value for name, value in vars(thing).items() if name != "itself"} == shown
    assert all(getattr(thing, name) is value for name, value in before.items())
    assert list(thing.ordered) == ["x", "y"]
    assert thing.list[1] is inner
    assert thing.deque.maxlen == 2


def test_buffers_of_a_model_that_was_not_given_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other = nn.BatchNorm2d(3)
    names = found.buffers_of([torch.optim.SGD(model.parameters())])
    assert names == ["BatchNorm1d.num_batches_tracked", "BatchNorm1d.running_mean", "BatchNorm1d.running_var"]
    assert found.buffers_of([torch.optim.SGD([*other.parameters()][:1])])[0].startswith("BatchNorm2d.")
    assert found.buffers_of([torch.optim.SGD(model[0].parameters())]) == []
