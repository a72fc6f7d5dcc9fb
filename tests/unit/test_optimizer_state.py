"""An optimizer's state: by the parameters' names, and with all that lies beside it."""

import copy
import json
import pickle
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.errors import CheckpointError, TreeError
from jitckpt.state.host_state import HostState
from jitckpt.worker import as_restored

Saved = tuple[dict[str, Any], dict[str, Tensor]]


def net() -> Any:  # nn.Sequential: of its layers mypy knows nothing
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def host_of(model: nn.Module, optimizer: Optimizer, *wrappers: object) -> HostState:
    return HostState(
        model=model,
        optimizers=[optimizer],
        schedulers=[],
        scaler=None,
        extra=None,
        device=None,
        wrappers={id(optimizer): wrappers},
    )


def take(host: HostState) -> Saved:
    shared, progress = host.shared(), host.progress()
    tensors = {name: tensor.clone() for name, tensor in shared.all_tensors().items()}
    for encoded in (*(part.on_host() for part in shared.optimizers), progress):
        tensors |= encoded.tensors
    document = {
        "optimizers": [part.on_host().tree for part in shared.optimizers],
        "progress": progress.tree,
        "scheduler_steps_due": [],
        "scaler": None,
        "frozen": [*shared.held.frozen],
    }
    return json.loads(json.dumps(document)), tensors


def put(host: HostState, saved: Saved) -> None:
    document, tensors = saved
    host.restore_parameters(tensors, document["frozen"])
    host.restore_shared(document, tensors, whole=True)


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names: Mapping[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[key]: {k: v.tolist() for k, v in state.items()}
        for key, state in optimizer.state.items()
        if key in names  # else a parameter that was taken out of the model
    }


def test_the_state_is_found_by_name_whatever_the_order() -> None:
    first = net()
    optimizer = torch.optim.Adam(first.parameters(), lr=0.1)
    host = host_of(first, optimizer)
    step(first, optimizer)
    saved = take(host)
    second = net()
    other = torch.optim.Adam([*second.parameters()][::-1], lr=0.5)
    put(host_of(second, other), saved)
    assert by_name(second, other) == by_name(first, optimizer)
    assert [id(one) for one in other.param_groups[0]["params"]] == [*map(id, second.parameters())]
    assert other.param_groups[0]["lr"] == 0.1


def test_groups_in_another_order_come_back_in_that_of_the_save() -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": [*layer.parameters()], "lr": rate}
            for layer, rate in zip(model, (0.1, 0.2), strict=True)
        ]

    first, second = net(), net()
    optimizer, other = torch.optim.Adam(groups(first)), torch.optim.Adam(groups(second)[::-1])
    host = host_of(first, optimizer)
    step(first, optimizer)
    put(host_of(second, other), take(host))
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
    assert by_name(second, other) == by_name(first, optimizer)


def test_a_group_that_was_added_is_added_again() -> None:
    first, second = net(), net()
    optimizer, other = (torch.optim.Adam(model[1].parameters(), lr=0.1) for model in (first, second))
    host = host_of(first, optimizer)
    step(first, optimizer)
    optimizer.add_param_group({"params": [*first[0].parameters()], "lr": 0.3})
    step(first, optimizer)
    put(host_of(second, other), take(host))
    assert [(len(group["params"]), group["lr"]) for group in other.param_groups] == [(2, 0.1), (2, 0.3)]
    assert by_name(second, other) == by_name(first, optimizer)


def test_parameters_that_were_added_to_a_group_are_added_again() -> None:
    first, second = net(), net()
    optimizer, other = (torch.optim.Adam([model[1].weight], lr=0.1) for model in (first, second))
    host = host_of(first, optimizer)
    optimizer.param_groups[0]["params"].append(first[0].weight)
    step(first, optimizer)
    put(host_of(second, other), take(host))
    assert by_name(second, other) == by_name(first, optimizer)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: torch.optim.Adam(model[0].parameters()), "other groups"),
        (
            lambda model: torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(1))]),
            "it has own.0, which",
        ),
    ],
)
def test_what_is_not_to_be_found_is_refused(make: Callable[[Any], Optimizer], sentence: str) -> None:
    first, second = net(), net()
    groups = [{"params": [first[0].weight]}, {"params": [first[0].bias]}]
    optimizer = torch.optim.Adam(groups if "groups" in sentence else first.parameters())
    host = host_of(first, optimizer)
    step(first, optimizer)
    with pytest.raises(CheckpointError, match=sentence):
        put(host_of(second, make(second)), take(host))


def test_parameters_that_are_not_the_models_are_kept() -> None:
    first, second = net(), net()
    masters = [nn.Parameter(parameter.detach().double()) for parameter in first.parameters()]
    copies = [nn.Parameter(parameter.detach().double()) for parameter in second.parameters()]
    optimizer, other = torch.optim.Adam(masters), torch.optim.Adam(copies)
    host = host_of(first, optimizer)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    put(host_of(second, other), take(host))
    assert all(map(torch.equal, masters, copies))
    assert [state["exp_avg"].tolist() for state in other.state.values()] == [
        state["exp_avg"].tolist() for state in optimizer.state.values()
    ]
    fewer = net()
    with pytest.raises(CheckpointError, match=r"it lacks own.3"):
        put(host_of(fewer, torch.optim.Adam(copies[:3])), take(host))


class Slow(torch.optim.SGD):
    """Keeps a counter, slow weights, a rank and a clock in attributes."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.rank, self.done, self.clock = rank, 0, timedelta()
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
        self.group = self.param_groups[0]["params"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.done += 1
        self.clock += timedelta(seconds=1)
        for slow in self.slow:
            slow.mul_(0.5)


def test_attributes_are_kept_once_they_change() -> None:
    first, second = net(), net()
    optimizer, other = Slow(first.parameters(), 0), Slow(second.parameters(), 1)
    host, host_of_other = host_of(first, optimizer), host_of(second, other)
    places = [slow.data_ptr() for slow in other.slow]
    step(first, optimizer)
    put(host_of_other, take(host))
    assert (other.done, other.rank, other.clock) == (1, 1, timedelta())  # a rank of the save's would be wrong
    assert all(map(torch.equal, other.slow, optimizer.slow))
    assert [slow.data_ptr() for slow in other.slow] == places
    (problem,) = host.optimizers[0].problems()
    assert "the attribute 'clock' of Slow, a timedelta, which changes" in problem
    assert host_of_other.optimizers[0].problems() == []


def test_an_optimizer_inside_of_another_is_kept_with_it() -> None:
    class Outer(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    first, second = net(), net()
    optimizer, other = (Outer(torch.optim.Adam(model.parameters(), lr=0.1)) for model in (first, second))
    host = host_of(first, optimizer)
    step(first, optimizer)
    put(host_of(second, other), take(host))
    assert by_name(second, other.inner) == by_name(first, optimizer.inner)


def test_a_wrappers_attributes_are_kept_too() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.skipped = 0

    first, second, wrapper, other = net(), net(), Wrapper(), Wrapper()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]
    host = host_of(first, optimizers[0], wrapper)
    step(first, optimizers[0])
    wrapper.skipped = 3
    put(host_of(second, optimizers[1], other), take(host))
    assert other.skipped == 3


def test_state_under_a_name_is_kept() -> None:
    first, second = net(), net()
    optimizer, other = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (first, second)
    )
    host = host_of(first, optimizer)
    step(first, optimizer)
    optimizer.state["made"] = {"steps": 1, "scale": torch.ones(2)}  # type: ignore[index]
    put(host_of(second, other), take(host))
    made: Any = other.state["made"]  # type: ignore[index]
    assert (made["steps"], made["scale"].tolist()) == (1, [1, 1])


def test_what_cant_be_saved_is_named_by_its_place() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["note"] = timedelta()
    with pytest.raises(TreeError, match=r"optimizer.0.others.0.2 is a datetime.timedelta"):
        host_of(model, optimizer).shared()


def test_a_replaced_parameter_and_a_grown_one_come_back() -> None:
    first, second = net(), net()
    optimizer, other = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (first, second)
    )
    host, host_of_other = host_of(first, optimizer), host_of(second, other)
    step(first, optimizer)
    old = first[1].weight
    first[1].weight = nn.Parameter(torch.cat([old.detach(), torch.ones(2, 3)]))
    first[1].bias = None
    group = optimizer.param_groups[0]["params"]
    group[2:] = [first[1].weight]
    del optimizer.state[old]
    assert host.model is not None
    assert not host.is_restructured
    assert host.model.follow()
    assert host.is_restructured
    assert host.model.structure() == ([], ["1.bias"])
    step(first, optimizer)
    with pytest.raises(CheckpointError, match=r"of its parameters it lacks 1.bias"):
        put(host_of_other, take(host))
    second[1].bias = None
    other = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    put(host_of(second, other), take(host))
    assert torch.equal(second[1].weight, first[1].weight)
    assert by_name(second, other) == by_name(first, optimizer)


def test_memory_formats_flags_and_frozen_parameters_come_back() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    first, second = make(), make()
    first[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    put(host_of(second, torch.optim.SGD(second.parameters(), lr=0.1)), take(host_of(first, optimizer)))
    assert [one.requires_grad for one in second.parameters()] == [True, True, False, True]


def test_a_buffer_outside_of_the_state_dict_is_kept_once_it_changes() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("still", torch.zeros(1), persistent=False)
            self.register_buffer("mean", torch.zeros(1), persistent=False)

    first, second = Keeping(), Keeping()
    host, other = (
        host_of(first, torch.optim.SGD([first.weight])),
        host_of(second, torch.optim.SGD([second.weight])),
    )
    assert host.model is not None
    assert other.model is not None
    assert [*host.model.buffers()] == []
    first.mean.add_(1)  # type: ignore[operator]
    host.model.follow()
    assert [*host.model.buffers()] == ["mean"]
    other.model.restore_buffers(host.model.buffers())
    assert torch.equal(second.mean, torch.ones(1))  # type: ignore[arg-type]


def test_a_group_that_is_added_makes_another_structure() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    host = host_of(model, optimizer)
    step(model, optimizer)
    host.shared()
    assert not host.is_restructured
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    host.shared()
    assert host.is_restructured


def test_a_group_that_is_added_behind_the_step_belongs_to_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    host = host_of(model, optimizer)
    step(model, optimizer)
    shared = host.shared()
    assert host.shared_again(shared).optimizers == shared.optimizers
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    (part,) = host.shared_again(shared).optimizers
    assert [*map(len, part.names)] == [2, 2]
    assert part.names[:1] == shared.optimizers[0].names
    assert host.with_new_groups(shared).optimizers == (part,)
    optimizer.param_groups.reverse()  # its parameters have other numbers now
    assert host.with_new_groups(shared).optimizers == shared.optimizers


def test_groups_that_a_restart_has_are_added_once_and_only_until_its_first_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    as_restored.add_no_group_twice_before_a_step([optimizer])
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 1]
    step(model, optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [*model[1].parameters()]})


class Copied(torch.optim.SGD):
    """Takes all attributes along into a copy; torch's own leave out what a class does not know."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_optimizer_adds_groups_as_ever(copied: Callable[[Copied], Copied]) -> None:
    model = net()
    for kind in (torch.optim.SGD, Copied):
        optimizer = kind(model.parameters(), lr=0.1)
        as_restored.add_no_group_twice(optimizer)
        other = copied(optimizer)  # type: ignore[arg-type]
        as_restored.add_groups_as_ever(optimizer)
        with pytest.raises(ValueError, match="more than one parameter group"):
            other.add_param_group({"params": [*other.param_groups[0]["params"]]})
        other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert [len(one.param_groups) for one in (optimizer, other)] == [1, 2]


def test_that_groups_are_added_once_leaves_nothing_and_is_no_change() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group = own = types.MethodType(torch.optim.SGD.add_param_group, optimizer)  # type: ignore[method-assign]
    as_restored.add_no_group_twice_before_a_step([optimizer])
    host = host_of(model, optimizer)
    looked = as_restored.AsRestored(host)
    looked.end()
    assert vars(optimizer)["add_param_group"] is own
    as_restored.add_no_group_twice_before_a_step([optimizer])
    host.shared()
    step(model, optimizer)
    assert vars(optimizer)["add_param_group"] is own
    assert not host.shared().optimizers[0].beside.tree
    assert host.optimizers[0].problems() == []


@pytest.mark.parametrize("unshared", [False, True])
def test_hyperparameters_that_are_tensors_keep_their_memory_and_groups_share_them(unshared: bool) -> None:
    """Else one of a device comes back on the host, where the training can't go on with it."""
    model, rate = net(), torch.tensor(0.5)
    groups = [{"params": [*layer.parameters()]} for layer in model]
    optimizer = torch.optim.SGD(groups, lr=rate)
    host = host_of(model, optimizer)
    step(model, optimizer)
    if unshared:
        optimizer.param_groups[1]["lr"] = torch.tensor(0.125)
    rate.mul_(0.5)
    saved, progress = take(host), host.progress()
    ways: list[Callable[[], None]] = [lambda: put(host, saved), lambda: host.restore_progress(progress)]
    for put_back in ways:
        for group in optimizer.param_groups:
            group["lr"] = rate
        rate.fill_(1.0)
        put_back()
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first is rate
        assert (second is rate) is not unshared
        assert (float(first), float(second)) == (0.25, 0.125 if unshared else 0.25)


class Codes(Tensor):
    """As optimizers of 8 bits have it: codes and a scale, and whoever reads or copies it gets numbers."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> "Codes":
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*[one.codes / 16 if isinstance(one, cls) else one for one in args], **(kwargs or {}))


def test_a_state_that_can_not_be_made_of_its_parts_again_is_refused_by_name() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    host = host_of(model, optimizer)
    step(model, optimizer)
    optimizer.state[model[0].bias]["exp_avg"] = Codes(torch.ones(3, dtype=torch.int8))
    with pytest.raises(
        TreeError, match=r"optimizer\.0\.state\.1\.exp_avg is a Codes, which has no __tensor_unflatten__"
    ):
        take(host)
