"""Tensors that are made of others: saved by these and made of them again, wherever a training has them."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from coded import Coded, CodedMomentum, coded_like, inner_of
from test_optimizer_state import host_of, put, take
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import Dataset, TensorDataset

from jitckpt.data import made_in_loop
from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError, TreeError
from jitckpt.state import inner_tensors, parallel, told_tensors
from jitckpt.state.model_state import ModelState


class Net(nn.Module):
    """Parameters, a buffer and an attribute that are made of others."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.first.weight = nn.Parameter(Coded.of(self.first.weight.detach()))
        self.register_buffer("buffer", Coded.of(torch.zeros(2, 3)))
        self.attribute = Coded.of(torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) * self.buffer.sum() + self.attribute.sum()


def step(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.buffer.copy_(torch.randn(2, 3))
        model.attribute.copy_(torch.randn(2))


def parts(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    every = [*model.parameters(), model.buffer, model.attribute]
    for parameter in model.parameters():
        every += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [part.clone() for one in every for part in inner_of(one)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        assert (first.dtype, first.stride()) == (second.dtype, second.stride())
        assert torch.equal(first, second)


def test_a_training_with_them_goes_on_as_if_nothing_had_been() -> None:
    model = Net()
    optimizer = CodedMomentum(model.parameters())
    host = host_of(model, optimizer)
    for number in range(3):
        step(model, optimizer, number)
    saved, local = take(host), host.local()
    assert {"model.first.weight.codes", "model.first.weight.scale"} <= saved[1].keys()
    assert "model.first.weight" not in saved[1]
    other = Net()
    own = CodedMomentum(other.parameters())
    restored = host_of(other, own)
    weight, attribute = other.first.weight, other.attribute
    put(restored, saved)
    restored.restore_local({name: tree_codec.decode(one.tree, one.tensors) for name, one in local.items()})
    assert other.first.weight is weight
    assert other.attribute is attribute
    assert_equal(parts(model, optimizer), parts(other, own))
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, own, number)
    assert_equal(parts(model, optimizer), parts(other, own))


def test_what_is_written_to_one_or_to_what_it_is_made_of_is_seen() -> None:
    """Torch counts the one at the tensor, the other at what it is made of."""
    model = Net()
    state = ModelState(model)
    watched = [state.memory, state.around]
    assert (
        state.memory.keys() >= state.around.keys() == {"model.first.weight.codes", "model.first.weight.scale"}
    )

    def counts() -> list[int]:
        return [one._version for each in watched for one in each.values()]

    before, buffers = counts(), state.buffer_versions()
    with torch.no_grad():
        model.first.weight.mul_(2)
    changed = counts()
    assert changed != before
    assert isinstance(model.first.weight, Coded)
    model.first.weight.scale.mul_(2)
    assert counts() != changed
    model.buffer.copy_(torch.ones(2, 3))
    assert state.buffer_versions() != buffers
    buffers = state.buffer_versions()
    assert isinstance(model.buffer, Coded)
    model.buffer.codes.add_(1)
    assert state.buffer_versions() != buffers


class Shared(torch.optim.Optimizer):
    """States that share what they are made of, one that is under two names, and one that lies otherwise."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (one,) = self.param_groups[0]["params"]
        scale = torch.full((), 0.5)
        state = self.state[one]
        state["first"] = Coded(torch.ones(3, 2, dtype=torch.int8).t(), scale, 0.0)
        state["second"] = Coded(torch.zeros(3, 2, dtype=torch.int8), scale, 1.5)
        state["again"] = state["first"]
        state["scale"] = scale


def test_what_shares_memory_shares_it_again_and_lies_as_it_lay() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = Shared(model.parameters())
    host = host_of(model, optimizer)
    optimizer.step()
    saved = take(host)
    other = nn.Linear(2, 2, bias=False)
    own = Shared(other.parameters())
    put(host_of(other, own), saved)
    state = own.state[other.weight]
    assert state["again"] is state["first"]
    assert state["first"].scale is state["second"].scale is state["scale"]
    assert [state[name].offset for name in ("first", "second")] == [0.0, 1.5]
    assert state["first"].codes.stride() == (1, 2)
    assert torch.equal(state["first"].codes, torch.ones(2, 3, dtype=torch.int8))


def after_a_step() -> tuple[nn.Linear, CodedMomentum, Any]:
    """Return a model, its optimizer, and what that has made for the weight."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = CodedMomentum(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer, optimizer.state[model.weight]["mean"]


def test_a_state_that_was_built_before_keeps_its_memory() -> None:
    model, optimizer, mean = after_a_step()
    saved = take(host_of(model, optimizer))
    before, codes = mean.values(), mean.codes
    optimizer.step()
    assert not torch.equal(mean.values(), before)
    put(host_of(model, optimizer), saved)
    assert optimizer.state[model.weight]["mean"] is mean
    assert mean.codes is codes
    assert torch.equal(mean.values(), before)


def test_what_belongs_to_it_and_is_no_tensor_is_as_it_is_now() -> None:
    """An optimizer may change that, and put other tensors into it, without torch's seeing it."""
    model, optimizer, mean = after_a_step()
    host = host_of(model, optimizer)
    take(host)
    mean.offset = 4.0
    mean.codes = torch.full((2, 2), 7, dtype=torch.int8)
    mean.scale.data = torch.full((), 2.0)
    saved = take(host)
    put(host, saved)
    restored = optimizer.state[model.weight]["mean"]
    assert restored.offset == 4.0
    assert torch.equal(restored.values(), torch.full((2, 2), 18.0))


class Kind(enum.Enum):
    SMALL = "small"


@dataclass(frozen=True)
class Options:
    kind: Kind
    dtype: torch.dtype


class Size(NamedTuple):
    rows: int
    made_by: type


class Nested(Tensor):
    """Made of one that is made of others."""

    part: Tensor
    told: Any

    @staticmethod
    def __new__(cls, inner: Tensor, told: Any) -> "Nested":
        made: Nested = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
        made.part, made.told = inner, told
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["part"], self.told

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> "Nested":
        return cls(inner["part"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} is asked of what has no values")


class Opaque(Tensor):
    """It does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Opaque":
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls(args[0])


def test_at_any_depth_and_with_all_that_belongs_to_it() -> None:
    told = {"options": Options(Kind.SMALL, torch.bfloat16), "size": Size(3, Coded), "none": (None, [1.5])}
    tensor = Nested(Coded.of(torch.tensor([1.0, -2.0])), told)
    description = inner_tensors.described(tensor, "one")
    leaves = inner_tensors.leaves(tensor, "one")
    assert [*leaves] == inner_tensors.names_in(description, "one") == ["one.part.codes", "one.part.scale"]
    again = inner_tensors.made(description, "one", leaves)
    assert isinstance(again, Nested)
    assert again.told == told
    assert inner_tensors.described(again, "one") == description
    assert [one is other for one, other in zip(leaves.values(), inner_of(again.part), strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (Nested(torch.ones(2), object()), r"x is a Nested, and what belongs to it .* can't be saved"),
        (Nested(torch.ones(2).to_sparse(), None), r"x\.part is a tensor without plain dense storage"),
        (Nested(Opaque(torch.ones(2)), None), r"x\.part is a Opaque, a class that does not say what"),
        (
            Nested(torch.ones(2), torch.ones(2)),
            r"x is a Nested, which has tensors that are none of",
        ),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "x is a NestedTensor",
        ),
    ],
)
def test_what_can_not_be_saved_is_named(tensor: Tensor, text: str) -> None:
    with pytest.raises(TreeError, match=f"{text}.*save_checkpoint"):
        inner_tensors.described(tensor, "x")


def test_what_a_collective_may_still_fill_is_not_saved_as_it_is_now() -> None:
    pending = AsyncCollectiveTensor(torch.ones(2))
    assert not told_tensors.can_be_told(pending)
    assert inner_tensors.why_not(pending, "mean") is not None
    assert not pending.completed


def test_a_class_that_is_not_there_is_named() -> None:
    description = inner_tensors.described(Coded.of(torch.ones(2)), "x")
    description["class"][1] = "Gone"
    with pytest.raises(CheckpointError, match=r"of the class coded\.Gone, which is not loaded"):
        inner_tensors.made(description, "x", {"x.codes": torch.ones(2), "x.scale": torch.ones(())})


def test_a_parameter_that_the_training_makes_otherwise_is_named() -> None:
    """A restart would put its values into what the script builds, which is told by something else."""
    model = Net()
    state = ModelState(model)
    held = state.held()
    assert state.held() is held
    assert isinstance(model.first.weight, Coded)
    model.first.weight.offset = 1.0
    with pytest.raises(TreeError, match=r"first\.weight is a Coded, and what belongs to it .* is other than"):
        state.held()


def test_other_tensors_in_a_parameter_are_saved() -> None:
    model = Net()
    state = ModelState(model)
    state.held()
    assert isinstance(model.first.weight, Coded)
    model.first.weight.codes = torch.full((4, 3), 9, dtype=torch.int8)
    assert state.held().parameters["first.weight.codes"].flatten()[0] == 9
    assert state.memory["model.first.weight.codes"] is model.first.weight.codes


def test_tied_parameters_have_both_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight = model[1].weight = nn.Parameter(Coded.of(torch.ones(3, 3)))
    held = ModelState(model).held()
    assert held.aliases == {"1.weight.codes": "0.weight.codes", "1.weight.scale": "0.weight.scale"}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    place = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_dtensor_of_one_is_one_again() -> None:
    """As FSDP2's parameters have it in an optimizer of few bits."""
    mesh = init_device_mesh("cpu", (1,))

    def build() -> tuple[nn.Linear, CodedMomentum]:
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]))
        return model, CodedMomentum(model.parameters())

    model, optimizer = build()
    host = host_of(model, optimizer)
    model.weight.grad = DTensor.from_local(torch.full((2, 3), 0.5), mesh, [Replicate()])
    optimizer.step()
    saved = take(host)
    other, own = build()
    put(host_of(other, own), saved)
    one, again = (each.state[of.weight]["mean"] for each, of in ((optimizer, model), (own, other)))
    assert isinstance(again, DTensor)
    assert again.placements == one.placements
    assert isinstance(again._local_tensor, Coded)
    assert again._local_tensor.offset == 0.25
    assert_equal(inner_of(one), inner_of(again))
    assert parallel.held_bytes(again) == 6 + 4
    assert isinstance(coded_like(other.weight), DTensor)


def test_a_loop_begins_whatever_tensors_there_are() -> None:
    """As it begins it looks at data sets, which may have such tensors: a failure there is the training's."""
    dataset = TensorDataset(Coded.of(torch.ones(2, 3)))
    kept = [Opaque(torch.ones(2)), Nested(torch.ones(2), None)]
    listed = Listed([*kept, Coded.of(torch.ones(2))])
    made_in_loop.watch()
    assert made_in_loop.is_watching()
    assert len(dataset) == len(listed) == 2


class Listed(Dataset[int]):
    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.first = tensors, tensors[0]

    def __len__(self) -> int:
        return 2
