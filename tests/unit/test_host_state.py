"""The host's state of a training job: taken, put back, and what it does to the training after."""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError
from jitckpt.state import host_state, schedules
from jitckpt.state.host_state import HostState
from jitckpt.state.model_state import ModelState
from jitckpt.state.optimizer_state import OptimizerState, on_host
from jitckpt.worker.saving.history import History


class Loader:
    """Counts the batches that it gave."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        noise = random.random() * numpy.random.rand()
        return torch.full((4, 8), self.position / 10) + torch.rand(4, 8) * noise

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """A small training on the host, whose state is taken and put back in memory."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer], seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3)
        self.loader = Loader()
        self.host = HostState(
            model=self.model,
            optimizers=[self.optimizer],
            schedulers=[self.scheduler],
            scaler=None,
            extra=self.loader,
            device=None,
        )

    def step(self) -> None:
        self.model(self.loader.next()).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def take(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shared, local, progress = self.host.shared(), self.host.local(), self.host.progress()
        tensors = {name: tensor.clone() for name, tensor in shared.tensors().items()}
        for encoded in (*(part.on_host() for part in shared.optimizers), progress, *local.values()):
            tensors |= encoded.tensors
        document = {
            "optimizers": [part.on_host().tree for part in shared.optimizers],
            "progress": progress.tree,
            "scheduler_steps_due": [0],
            "scaler": None,
            "frozen": shared.held.frozen,
            "local": {"trees": {name: encoded.tree for name, encoded in local.items()}},
        }
        return document, tensors

    def put_back(self, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.host.restore_parameters(tensors, document["frozen"])
        self.host.restore_shared(document, tensors, whole=True)
        self.host.restore_local(host_state.local_parts(document["local"], tensors, None))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.01, t0=2),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


class WarmingUp:
    """As DeepSpeed's schedulers: its state_dict does not say what get_last_lr returns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, -1
        self._last_lr = [0.0]

    def step(self) -> None:
        self.steps += 1
        self._last_lr = [self.steps / 10]
        self.optimizer.param_groups[0]["lr"] = self._last_lr[0]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert [*state] == ["steps"]
        self.steps = state["steps"]


def test_the_rates_of_a_schedulers_last_step_come_back_that_it_does_not_say_itself() -> None:
    parameter = nn.Parameter(torch.ones(1))
    first, second = (WarmingUp(torch.optim.SGD([parameter], lr=0.01)) for _ in range(2))
    first.step()
    first.step()
    said = tree_codec.encode(schedules.SchedulerState(first).state(), "scheduler")
    for _ in range(2):
        schedules.SchedulerState(second).restore(tree_codec.decode(json.loads(json.dumps(said.tree)), {}))
        assert second._last_lr == [0.1]
        assert second.steps == 1


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_training_goes_on_as_the_undisturbed_one(name: str) -> None:
    first = Training(OPTIMIZERS[name])
    for _ in range(4):
        first.step()
    document, tensors = first.take()
    for _ in range(5):
        first.step()
    expected_numbers = random_numbers()
    second = Training(OPTIMIZERS[name], seed=99)
    second.step()
    second.put_back(json.loads(json.dumps(document)), tensors)
    for _ in range(5):
        second.step()
    assert random_numbers() == expected_numbers
    assert first.loader.position == second.loader.position
    assert first.scheduler.get_last_lr() == second.scheduler.get_last_lr()
    for (where, expected), found in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, found), where
    before, after = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for number, state in before["state"].items():
        assert state.keys() == after["state"][number].keys()
        for key, value in state.items():
            found = after["state"][number][key]
            same = torch.equal(value, found) if isinstance(value, Tensor) else value == found
            assert same, (number, key)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def test_what_has_to_be_asked_can_not_be_told_to_be_unchanged() -> None:
    training = Training(OPTIMIZERS["AdamW"])
    training.host.local()
    assert training.host.unchanged() is None, "`extra` has to be asked"
    training.host.extra = None
    training.host.local()
    assert training.host.unchanged() is None, "buffers on the host may change where they are"
    training.host.model = None
    training.host.local()
    unchanged = training.host.unchanged()
    assert unchanged is not None
    assert not unchanged.going_on
    assert all(look.is_same() for look in unchanged.looks)
    random.random()
    assert not all(look.is_same() for look in unchanged.looks)


def test_progress_is_that_of_the_moment_in_which_it_was_taken() -> None:
    training = Training(OPTIMIZERS["AdamW"])
    training.step()
    told, expected = training.host.take_progress(training.host.groups()), training.host.progress().tree
    training.scheduler.base_lrs[0] = 7.0  # in its place
    training.step()
    assert told().tree == expected != training.host.progress().tree
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    told = training.host.take_progress(training.host.groups())
    training.optimizer.param_groups[0]["lr"].zero_()
    (copied,) = told().tensors.values()
    assert copied == 0.5


def test_taking_the_state_copies_it() -> None:
    training = Training(adam)
    training.step()
    before = training.host.optimizers[0].capture()
    training.step()
    dtype, where, values = before.numbers["step"]
    assert (where, dtype, [*values]) == ([0, 1, 2, 3, 4, 5], torch.float32, [1.0] * 6)
    after = tree_codec.decode(before.others.tree, before.others.tensors)
    weight = training.optimizer.param_groups[0]["params"][0]
    live = training.optimizer.state[weight]["exp_avg"]
    assert not torch.equal(after[0][2], live)


def test_an_optimizer_state_that_changes_shape_is_looked_at_anew() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9)
    state = OptimizerState(optimizer, "optimizer.0")

    def others() -> list[list[Any]]:
        part = state.capture()
        found = tree_codec.decode(part.others.tree, part.others.tensors)
        return [[number, key, value.tolist()] for number, key, value in found]

    assert others() == []
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert others() == [[0, "momentum_buffer", [1, 1]], [1, "momentum_buffer", [1, 1]]]
    optimizer.add_param_group({"params": [parameters[2]]})
    optimizer.step()
    assert [number for number, _, _ in others()] == [0, 1, 2]
    optimizer.state[parameters[1]]["momentum_buffer"] = torch.full((2,), 7.0)
    assert others()[1][2] == [7, 7]
    optimizer.state[parameters[1]] = {"other": torch.tensor(3)}
    assert [number for number, _, _ in others()] == [0, 2]
    ((key, (dtype, where, values)),) = state.capture().numbers.items()
    assert (key, dtype, where, [*values]) == ("other", torch.int64, [1], [3])


def test_an_optimizer_state_that_is_replaced_as_a_whole_is_looked_at_anew() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"count": torch.tensor(1)}
    state = OptimizerState(optimizer, "optimizer.0")
    assert [*state.capture().numbers["count"][2]] == [1]
    optimizer.state = defaultdict(dict, {parameter: {"count": torch.tensor(2)}})
    assert [*state.capture().numbers["count"][2]] == [2]


def test_the_numbers_are_read_where_they_are_now() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = adam(parameters)
    state = OptimizerState(optimizer, "optimizer.0")

    def steps() -> list[float]:
        ((dtype, where, values),) = state.capture().numbers.values()
        assert (dtype, where) == (torch.float32, [0, 1, 2])
        return [*values]

    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert steps() == [1, 1, 1]
    optimizer.step()
    assert steps() == [2, 2, 2]
    optimizer.state[parameters[1]]["step"].data = torch.tensor(7.5)  # the same object, elsewhere
    assert steps() == [2, 7.5, 2]
    optimizer.step()
    assert steps() == [3, 8.5, 3]
    optimizer.state[parameters[1]]["step"].data = torch.tensor(9.5, dtype=torch.float64)
    part = state.capture()
    assert [(dtype, [*values]) for dtype, _, values in part.numbers.values()] == [(torch.float32, [3, 3])]
    others = tree_codec.decode(part.others.tree, part.others.tensors)
    assert [(number, value.item()) for number, key, value in others if key == "step"] == [(1, 9.5)]


def test_numbers_that_their_memory_does_not_tell_are_kept_as_well() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "complex": torch.tensor(1 - 2j),
        "negative": torch.tensor(1 - 2j).conj().imag,  # its memory says -2
        "flag": torch.tensor(True),
    }
    encoded = OptimizerState(optimizer, "optimizer.0").capture().on_host()
    found = on_host(json.loads(json.dumps(encoded.tree)), encoded.tensors, None)
    assert {key: value.item() for key, value in found[0].items()} == {
        "half": 1.5,
        "complex": 1 - 2j,
        "negative": 2.0,
        "flag": True,
    }
    assert all(found[0][key].dtype == value.dtype for key, value in optimizer.state[parameter].items())


def test_other_parameter_groups_are_refused_with_both_counts() -> None:
    training = Training(adam)
    training.step()
    document, tensors = training.take()
    other = HostState(
        model=None,
        optimizers=[adam(nn.Linear(2, 2).parameters())],
        schedulers=[training.scheduler],
        scaler=None,
        extra=None,
        device=None,
    )
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters; the save has \[6\]"):
        other.restore_shared(document, tensors, whole=True)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"optimizers": []}, "The save has 1 optimizers; jitckpt.init was given 0"),
        ({"schedulers": []}, "The save has 1 schedulers; jitckpt.init was given 0"),
        (
            {"scaler": GradScaler("cpu")},
            "The save has no gradient scaler; jitckpt.init was given one",
        ),
    ],
)
def test_missing_objects_are_named(changed: dict[str, Any], sentence: str) -> None:
    training = Training(adam)
    document, tensors = training.take()
    objects: dict[str, Any] = {
        "model": training.model,
        "optimizers": [training.optimizer],
        "schedulers": [training.scheduler],
        "scaler": None,
        "extra": None,
        "device": None,
    }
    host = HostState(**(objects | changed))
    with pytest.raises(CheckpointError, match=sentence):
        host.restore_shared(document, tensors, whole=True)
    with pytest.raises(CheckpointError, match="The save has some state of `extra`"):
        host.restore_local(host_state.local_parts(document["local"], tensors, None))


def test_parameters_must_have_the_same_names() -> None:
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="it lacks b and has c, which the model has not"):
        ModelState(model).restore_parameters({"a": torch.ones(2), "c": torch.ones(3)}, [])
    assert not model["a"].any()


def test_buffers_must_have_the_same_names_and_types() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match="it lacks a and has b, which the model has not"):
        ModelState(model).restore_buffers({"b": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"in the save it is torch.float64"):
        ModelState(model).restore_buffers({"a": torch.ones(3).double()})
    assert isinstance(model.a, Tensor)
    assert not model.a.any()


def test_a_buffer_that_has_grown_or_was_none_comes_back_as_it_was() -> None:
    """As a memory bank does, and a running mean that begins with the first batch."""
    model = nn.Module()
    model.register_buffer("bank", torch.zeros(0, 4))
    model.register_buffer("mean", None)
    saved = {"bank": torch.arange(8.0).view(2, 4).t().contiguous().t(), "mean": torch.ones(3)}
    bank = model.bank
    state = ModelState(model)
    state.restore_buffers(saved)
    assert model.bank is bank
    assert isinstance(bank, Tensor)
    assert (bank.tolist(), bank.stride()) == (saved["bank"].tolist(), (1, 2))
    assert isinstance(model.mean, Tensor)
    assert model.mean.tolist() == [1, 1, 1]
    assert state.buffers().keys() == saved.keys()


def test_a_model_has_the_same_names_inside_ddp_and_compile() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled: Any = torch.compile(model)
    wrapped = nn.DataParallel(compiled)
    assert ModelState(wrapped).parameters().keys() == ModelState(model).parameters().keys()
    assert list(ModelState(model).buffers()) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def in_ddp(model: nn.Module) -> nn.Module:
    """Wrap it as DistributedDataParallel does; without a process group."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


def test_what_ddp_was_built_without_is_named_and_not_restored_into() -> None:
    def built() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model.requires_grad_(False)

    model = built()
    state = ModelState(in_ddp(model))
    state.held()
    assert state.thawed() == []
    model[1].requires_grad_(True)  # type: ignore[index]
    parameters, frozen, *_ = state.held()
    assert state.thawed() == ["1.bias", "1.weight"]
    with pytest.raises(
        CheckpointError, match=r"1\.weight, 1\.bias: frozen as DistributedDataParallel was built"
    ):
        ModelState(in_ddp(built())).restore_parameters(parameters, frozen)
    unwrapped = built()
    ModelState(unwrapped).restore_parameters(parameters, frozen)
    assert [one.requires_grad for one in unwrapped.parameters()] == [False, False, True, True]


def test_tied_parameters_non_persistent_buffers_and_extra_states() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 5
            self.register_buffer("kept", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(2), persistent=False)
            self.register_buffer("unset", None)

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Counting())
    model[1].weight = model[0].weight
    state = ModelState(model)
    assert sorted(state.parameters()) == ["0.bias", "0.weight", "1.bias"]
    assert list(state.buffers()) == ["2.kept"]
    assert state.extra_states() == {"2": {"calls": 5}}
    state.restore_extra_states({"2": {"calls": 9}})
    assert model[2].calls == 9
    model[2].kept = torch.ones(2)  # replaced, not changed in place
    assert state.buffers()["2.kept"].tolist() == [1, 1]
    model[2].register_buffer("late", torch.zeros(1))
    state.look_again()
    assert list(state.buffers()) == ["2.kept", "2.late"]


class TestScaler:
    @staticmethod
    def make() -> tuple[GradScaler, nn.Linear, torch.optim.Optimizer]:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        model = nn.Linear(2, 1)
        return scaler, model, torch.optim.SGD(model.parameters(), lr=0.1)

    @staticmethod
    def to_the_update(scaler: GradScaler, model: nn.Linear, optimizer: Any, overflow: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)

    @pytest.mark.parametrize(
        "overflow", [[False], [True], [False, False], [False, True], [False, False, False]]
    )
    def test_an_update_that_is_due_is_done_to_the_saved_state(self, overflow: list[bool]) -> None:
        scaler, model, optimizer = self.make()
        for flag in overflow[:-1]:
            self.to_the_update(scaler, model, optimizer, flag)
            scaler.update()
        self.to_the_update(scaler, model, optimizer, overflow[-1])
        assert schedules.scaler_update_is_due(scaler)
        early = schedules.scaler_state(scaler, update_is_due=True)
        assert schedules.scaler_state(scaler, update_is_due=False) == scaler.state_dict()
        scaler.update()
        assert not schedules.scaler_update_is_due(scaler)
        assert early == scaler.state_dict() == schedules.scaler_state(scaler, update_is_due=False)

    def test_before_the_first_use_and_disabled(self) -> None:
        scaler, _, _ = self.make()
        assert schedules.scaler_state(scaler, update_is_due=False) == scaler.state_dict()
        assert not schedules.scaler_update_is_due(scaler)
        disabled = GradScaler("cpu", enabled=False)
        assert schedules.scaler_state(disabled, update_is_due=False) == disabled.state_dict() == {}


class TestHistory:
    def test_the_state_of_each_step_is_settled_when_the_next_begins(self) -> None:
        training = Training(adam)
        history = History(training.host)
        for step in (1, 2):
            training.optimizer.step()
            history.add(step, training.host.shared())
            training.scheduler.step()
            assert not history.is_settled(step)
            history.settle(step)
            assert history.is_settled(step)
        assert not history.is_settled(3)
        assert history.usual_scheduler_steps == (1,)
        snapshot = history.snapshot(1)
        assert snapshot is not None
        assert snapshot.progress.tree["schedulers"][0]["last_epoch"] == 1
        assert snapshot.scheduler_steps_due == (0,)
        history.forget_before(2)
        assert history.snapshot(1) is None
        assert history.snapshot(2) is not None

    def test_a_pass_that_may_be_an_evaluations_is_no_sign_that_all_has_come(self) -> None:
        """An evaluation that takes gradients lies between an optimizer step and a scheduler's."""
        training = Training(adam)
        history = History(training.host)

        def step(number: int, passes: int, *, ends_epoch: bool = False) -> None:
            for again in range(passes):
                (history.settle_again if again else history.settle)(number - 1)
            training.optimizer.step()
            history.add(number, training.host.shared())
            if ends_epoch:
                training.scheduler.step()

        step(1, 1)
        step(2, 1, ends_epoch=True)
        step(3, 1)
        history.settle(3)
        assert not history.may_lack(3), "all minibatches have one forward pass: it is the next one's"
        step(4, 3)  # two more than the one above: an evaluation had them
        history.settle(4)
        assert history.may_lack(4)
        training.scheduler.step()
        history.settle_again(4)
        assert not history.may_lack(4), "what comes now and then has come"

    def test_only_the_next_optimizer_step_tells_that_no_scheduler_step_comes(self) -> None:
        training = Training(adam)
        history = History(training.host)
        history.settle(0)
        for number in (1, 2):
            training.optimizer.step()
            history.add(number, training.host.shared())
            assert not history.is_irregular
            history.settle(number)
        assert history.is_irregular, "the scheduler was not stepped in the second one"
        assert history.may_come(2)
        assert not history.may_lack(2), "all have had one forward pass: likely it is the next one's"
        history.settle_again(2)
        assert history.may_lack(2), "an evaluation's passes: there are more than there ever were"
        history.step_begins(3)
        assert not history.may_come(2)
        training.optimizer.step()
        history.add(3, training.host.shared())
        history.settle(3)
        training.scheduler.step()
        assert history.may_come(3), "what was kept is from before the scheduler's step"
        history.settle_again(3)
        assert not history.may_come(3)

    def test_an_iteration_goes_on_until_the_loop_tells_of_its_end(self) -> None:
        training = Training(adam)
        history = History(training.host)
        training.optimizer.step()
        history.add(1, training.host.shared())
        assert not history.goes_on(1), "this loop tells nothing"
        history.waits_for_boundary = True
        assert history.goes_on(1)
        history.settle(1)
        assert not history.goes_on(1)
        assert not history.goes_on(2), "no such step is made yet"

    def test_a_scheduler_that_is_stepped_before_the_optimizer_is_no_irregular_one(self) -> None:
        training = Training(adam)
        history = History(training.host)
        for number in (1, 2, 3):
            training.scheduler.step()
            training.optimizer.step()
            history.add(number, training.host.shared())
            history.settle(number)
        assert not history.is_irregular

    def test_scheduler_steps_that_have_not_come_yet_are_due(self) -> None:
        training = Training(adam)
        history = History(training.host)
        history.expect_scheduler_steps([1])
        training.optimizer.step()
        history.add(2, training.host.shared())
        early = history.snapshot(2)
        assert early is not None
        assert early.scheduler_steps_due == (1,)
        training.scheduler.step()
        later = history.snapshot(2)
        assert later is not None
        assert later.scheduler_steps_due == (0,)
        assert not later.says_the_same_as(early)
        assert later.progress.tree["schedulers"][0]["last_epoch"] == 1

    @pytest.mark.parametrize(
        ("made", "usual"), [([1, 1], 1), ([1, 1, 1], 1), ([0, 0, 1], 0), ([1, 0], 0), ([2, 2], 2)]
    )
    def test_what_is_usual_is_seen_twice(self, made: list[int], usual: int) -> None:
        training = Training(adam)
        history = History(training.host)
        for step, steps in enumerate(made, start=1):
            training.optimizer.step()
            history.add(step, training.host.shared())
            for _ in range(steps):
                training.scheduler.step()
            history.settle(step)
        assert history.usual_scheduler_steps == (usual,)
        assert History(training.host).usual_scheduler_steps == (0,)

    @pytest.mark.parametrize(
        ("between", "foreseen"),
        [
            ("scheduler", True),
            ("nothing", False),  # the scheduler may be one that is stepped once an epoch
            ("scheduler and hyperparameters", False),
            ("metric", False),
            ("tensor", False),
            ("list", False),  # it may be changed in its place
        ],
    )
    def test_what_comes_between_minibatches_is_foreseen_where_it_is_always_the_same(
        self, between: str, foreseen: bool
    ) -> None:
        training = Training(adam)
        (group,) = training.optimizer.param_groups
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer)
        if between == "metric":
            training.host.schedulers.append(schedules.SchedulerState(plateau))
        if between == "tensor":
            group["of its own"] = torch.tensor(0.5)
        if between == "list":
            group["of its own"] = [0.5]
        history = History(training.host)
        for step in range(1, 4):
            training.optimizer.step()
            history.add(step, training.host.shared())
            assert history.is_foreseen(step) == (foreseen and step == 3), "two minibatches are seen before"
            if between != "nothing":
                training.scheduler.step()
            if between == "metric":
                plateau.step(1.0)
            if between == "scheduler and hyperparameters":
                group["weight_decay"] *= 0.5
            assert history.is_foreseen(step) == (step == 3 and (foreseen or between == "metric"))
            history.settle(step)
        assert not history.is_foreseen(4)

    def test_hyperparameters_that_the_training_sets_itself_are_not_foreseen(self) -> None:
        training = Training(adam)
        training.host.schedulers.clear()
        history = History(training.host)
        for step in range(1, 6):
            training.optimizer.step()
            history.add(step, training.host.shared())
            assert history.is_foreseen(step) == (step == 3)
            if step == 3:
                training.optimizer.param_groups[0]["lr"] *= 0.5
            history.settle(step)

    def test_no_snapshot_is_taken_of_half_a_scheduler_step(self) -> None:
        """Ask at every line that a step runs: whoever may go on sees the state before it or after it."""
        training = Training(adam)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 10)
        both = torch.optim.lr_scheduler.ChainedScheduler([cosine], optimizer=training.optimizer)
        training.host.schedulers[0] = schedules.SchedulerState(both)
        training.host.changing_code = {type(both).step.__code__}
        history = History(training.host)
        history.add(1, training.host.shared())
        seen: list[tuple[bool, object]] = []

        def look(frame: FrameType, event: str, argument: object) -> Any:
            seen.append((history.is_changing(), training.host.progress().tree))
            return look

        before = training.host.progress().tree
        sys.settrace(look)
        both.step()
        sys.settrace(None)
        after = training.host.progress().tree
        clean = [tree for changing, tree in seen if not changing]
        assert all(tree in (before, after) for tree in clean)
        assert any(tree not in (before, after) for _, tree in seen), "there is something to be torn"
        assert not history.is_changing()

    def test_a_snapshot_says_the_same_until_something_of_it_changes(self) -> None:
        training = Training(adam)
        history = History(training.host)
        history.add(1, training.host.shared())
        first = history.snapshot(1)
        history.settle(1)
        settled = history.snapshot(1)
        assert first is not None
        assert settled is not None
        assert settled.says_the_same_as(first)
        history.add(1, training.host.shared())
        training.optimizer.param_groups[0]["lr"] *= 0.5
        changed = history.snapshot(1)
        assert changed is not None
        assert not changed.says_the_same_as(first)

    def test_due_steps_are_made_at_the_restore(self) -> None:
        first = Training(adam)
        for _ in range(2):
            first.step()
        first.optimizer.step()
        document, tensors = first.take()
        first.scheduler.step()
        second = Training(adam, seed=5)
        second.put_back(document | {"scheduler_steps_due": [1]}, tensors)
        assert second.scheduler.state_dict() == first.scheduler.state_dict()
        assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"] == 0.001

    def test_a_scheduler_that_needs_a_metric_is_not_stepped(self) -> None:
        training = Training(adam)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer)
        state = schedules.SchedulerState(plateau)
        assert not state.can_step
        plateau.step(1.0)
        assert state.count() == 1


def test_a_fingerprint_tells_models_and_optimizers_apart() -> None:
    model, wider = nn.Linear(2, 2), nn.Linear(2, 3)
    fingerprints = [
        host_state.fingerprint(None, []),
        host_state.fingerprint(model, []),
        host_state.fingerprint(wider, []),
        host_state.fingerprint(nn.Linear(2, 2).double(), []),
        host_state.fingerprint(model, [adam(model.parameters())]),
        host_state.fingerprint(model, [torch.optim.SGD(model.parameters())]),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprints[0] == ""
    assert host_state.fingerprint(nn.Linear(2, 2), []) == fingerprints[1]


def test_a_model_is_one_whatever_its_length_is() -> None:
    model = nn.Linear(2, 2)
    compiled: Any = torch.compile(in_ddp(model))  # has a length, and raises when it is asked for
    assert host_state.fingerprint(compiled, []) == host_state.fingerprint(model, [])


def test_names_follow_whoever_looked_last() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = OptimizerState(optimizer, "optimizer.3")
    assert [*state.named_tensors()] == ["optimizer.3.parameter.0", "optimizer.3.parameter.1"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    state.capture()
    assert [*state.named_tensors()][2:] == ["optimizer.3.parameter.2"]
    assert state.named_tensors() is state.named_tensors()
