"""The optimizer steps of scripts that know nothing of jitckpt."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Adam, Optimizer

from jitckpt.hooks import captured_graphs
from jitckpt.hooks.torch_steps import OptimizerSteps, State, named_buffers


class Told:
    """Writes down what it is told, and the values that the named tensors have then."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []
        self.values: list[dict[str, Tensor]] = []
        self.states: list[Mapping[str, Tensor]] = []
        self.reasons: list[str] = []

    def step_begins(self, step: int, optimizer: Optimizer, state: State) -> None:
        self._note("begins", step, state())

    def step_ended(self, step: int, optimizer: Optimizer, state: State) -> None:
        self._note("ended", step, state())

    def unsupported(self, reason: str) -> None:
        self.reasons.append(reason)

    def failed(self, step: int, error: Exception) -> None:
        raise AssertionError(step) from error

    def _note(self, what: str, step: int, state: Mapping[str, Tensor]) -> None:
        self.all.append((what, step))
        self.states.append(state)
        self.values.append({name: tensor.detach().clone() for name, tensor in state.items()})


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture(autouse=True)
def steps(told: Told) -> Iterator[OptimizerSteps]:
    original = GradScaler.step
    found = OptimizerSteps(told)
    yield found
    found.detach()
    assert GradScaler.step is original


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(1, 2)).sum()
    loss.backward()
    return loss


def both(*steps: int) -> list[tuple[str, int]]:
    return [(what, step) for step in steps for what in ("begins", "ended")]


def test_the_step_is_what_lies_between_begin_and_end(told: Told) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)  # gradients of micro-batches are summed up
        backward(model)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        optimizer.step()
        assert torch.equal(told.values[-2]["optimizer.0.parameter.0"], before["weight"])
        assert torch.equal(told.values[-1]["optimizer.0.parameter.0"], model.weight)
        assert not torch.equal(before["weight"], model.weight)
    assert told.all == both(1, 2)
    assert told.reasons == []


def test_the_mapping_stays_the_same_while_the_tensors_do(told: Told) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert told.states[1] is told.states[2] is told.states[5]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    backward(model)
    optimizer.step()
    assert [*told.states[-1]] == [f"optimizer.0.parameter.{place}" for place in range(3)]
    assert told.states[-1]["optimizer.0.parameter.0"] is model.weight


def test_every_step_of_every_optimizer_counts_and_has_its_names(told: Told, steps: OptimizerSteps) -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    first, second = SGD(one.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    backward(other)
    second.step()  # the second is the first to make a step
    for _ in range(2):
        backward(one)
        first.step()
    assert told.all == both(1, 2, 3)
    assert [*told.states[0]] == ["optimizer.0.parameter.0"]
    assert told.states[0]["optimizer.0.parameter.0"] is other.weight
    assert [*told.states[-1]] == [
        "optimizer.0.parameter.0",
        "optimizer.1.parameter.0",
        "optimizer.1.parameter.1",
    ]
    assert steps.optimizers() == [second, first]


def test_an_optimizer_that_is_no_more_is_forgotten(told: Told, steps: OptimizerSteps) -> None:
    model = nn.Linear(2, 1)
    for _ in range(2):
        optimizer = SGD(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        del optimizer
    import gc

    gc.collect()  # it and its state know each other
    assert steps.optimizers() == [None, None]
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert [*told.states[-1]] == ["optimizer.2.parameter.0", "optimizer.2.parameter.1"]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_belongs_to_what_comes_before_the_step(told: Told, by_name: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        told.all.append(("closure", 0))
        return backward(model)

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert told.all == [("closure", 0), *both(1)]
    assert told.reasons == []


def test_a_closure_that_is_not_called_changes_nothing(told: Told) -> None:
    class Careless(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    model = nn.Linear(2, 1)
    backward(model)
    Careless(model.parameters(), lr=0.1).step(lambda: 1.0)
    assert told.all == both(1)


def test_a_step_ends_with_the_last_of_what_it_does(told: Told) -> None:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            told.all.append(("own", 0))

    model = nn.Linear(2, 1)
    SGD(model.parameters(), lr=0.1)  # from now on torch calls hooks in the base class's step, too
    Own(model.parameters(), lr=0.1).step()
    assert told.all == [("begins", 1), ("own", 0), ("ended", 1)]


def test_a_closure_that_is_called_again_is_named(told: Told) -> None:
    model = nn.Linear(2, 1)
    optimizer = LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(torch.ones(1, 2)) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert told.reasons[0] == "optimizer 0 (LBFGS) calls its closure several times in one step"
    assert "keeps tensors in '" in told.reasons[1]
    assert told.all == both(1)


def test_a_step_that_a_scaler_skips_counts(told: Told) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(before, model.weight) == (factor != 1.0)
        scaler.update()
    assert told.all == both(1, 2, 3)
    disabled = GradScaler("cpu", enabled=False)
    disabled.step(optimizer)
    assert told.all == both(1, 2, 3, 4)


def test_a_step_inside_the_backward_pass_is_named(told: Told) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    backward(model)
    assert told.reasons == ["optimizer 0 (SGD) makes its step inside the backward pass"]


def test_an_exception_in_a_step_is_named_and_the_next_steps_count(told: Told) -> None:
    class Failing(SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise FloatingPointError("as a test")
            return super().step(closure)

    model = nn.Linear(2, 1)
    optimizer, other = Failing(model.parameters(), lr=0.1), Adam(model.parameters(), lr=0.1)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert told.reasons == []
    other.step()
    assert told.reasons == [
        "the step of optimizer 0 (Failing) was left with an exception, so its state is half stepped"
    ]
    assert told.all == [("begins", 1), *both(1)]
    with pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert told.all[3:] == [("begins", 2), *both(2)]


def test_an_optimizer_inside_another_is_a_part_of_its_step(told: Told) -> None:
    class Outer(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    model = nn.Linear(2, 1)
    outer = Outer(SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        backward(model)
        outer.step()
    assert told.all == both(1, 2)
    assert told.reasons == []


def test_buffers_have_names_whatever_else_there_is() -> None:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))

    net, teacher = Net(3), Net(5)
    twins = [nn.BatchNorm1d(7), nn.BatchNorm1d(7)]
    optimizer = SGD(net.parameters(), lr=0.1)
    found = named_buffers([optimizer])
    # There may be modules of other tests.
    own = {
        name: tensor for name, tensor in found.items() if ".layer." in name and tensor.shape in ((3,), (5,))
    }
    prefixes = list(dict.fromkeys(name.partition(".layer")[0] for name in own))
    assert prefixes[0] == "module.0"  # that of the optimizer
    assert [*own] == [f"{one}.layer.1.running_{what}" for one in prefixes for what in ("mean", "var")]
    mean = net.layer[1].running_mean
    assert isinstance(mean, Tensor)
    assert own["module.0.layer.1.running_mean"].data_ptr() == mean.data_ptr()
    assert own[f"{prefixes[1]}.layer.1.running_var"].shape == (5,)
    assert not any(tensor.shape == (7,) for tensor in found.values())  # which is which can't be said
    del teacher, twins


def test_a_module_may_have_an_attribute_called_buffers() -> None:
    class Wrapper(nn.Module):
        """As Megatron's DistributedDataParallel: the buffers of gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.BatchNorm1d(23)
            self.buffers = [torch.zeros(3)]  # type: ignore[assignment]

    wrapper = Wrapper()
    found = named_buffers([SGD(wrapper.parameters(), lr=0.1)])
    mean = wrapper.module.running_mean
    assert mean is not None
    assert found["module.0.module.running_mean"].data_ptr() == mean.data_ptr()


def test_modules_are_numbered_by_their_first_parameter_in_an_optimizer() -> None:
    wide, narrow = nn.BatchNorm1d(19), nn.BatchNorm1d(17)
    for order in ((wide, narrow), (narrow, wide)):
        optimizer = SGD([parameter for module in order for parameter in module.parameters()], lr=0.1)
        found = named_buffers([optimizer])
        assert found["module.0.running_mean"].data_ptr() == order[0].running_mean.data_ptr()  # type: ignore[union-attr]
        assert found["module.1.running_mean"].data_ptr() == order[1].running_mean.data_ptr()  # type: ignore[union-attr]


def test_a_graph_with_a_step_in_it_makes_a_minibatch_that_only_images_protect(
    told: Told, steps: OptimizerSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(captured_graphs, "is_now", lambda: True)
    backward(model)
    optimizer.step()
    assert told.all == []
    monkeypatch.undo()
    for _ in range(2):
        steps.replay_begins([optimizer])
        steps.replay_ended([optimizer])
        steps.replay_ended([])  # one without a step
    assert told.all == both(1, 2)
    assert told.reasons == ["a CUDA graph makes the step of optimizer 0 (SGD)"]
