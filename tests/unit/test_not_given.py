"""What trains beside the objects that jitckpt.init was given is named, and nothing else."""

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.optim.swa_utils import AveragedModel

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Json
from jitckpt.state.host_state import HostState
from jitckpt.worker.self_check.not_given import NotGiven


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> None:
    gc.collect()


class Training:
    """A model, its optimizer and whatever a test puts beside them."""

    def __init__(self, **given: Any) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.given = {"schedulers": [], "scaler": None, "extra": None} | given

    def names(self, *, steps: Any = None, scaler: object = None, ours: Collection[object] = ()) -> list[str]:
        """Return what is named after two looks, between which the model and the rest train."""
        host = HostState(model=self.model, optimizers=[self.optimizer], device=None, **self.given)
        looks = NotGiven(host, self.model, ours)
        found = []
        for _ in range(2):
            self.model(torch.randn(4, 3)).sum().backward()
            self.optimizer.step()
            if steps is not None:
                steps()
            found += looks.look(*self._extra(host), scaler)
        return [one.name for one in found]

    def _extra(self, host: HostState) -> tuple[Mapping[str, Tensor], Json]:
        if host.extra is None:
            return {}, None
        encoded = tree_codec.encode(host.extra.state_dict(), "extra")
        return encoded.tensors, encoded.tree


def test_where_all_is_given_nothing_is_named() -> None:
    training = Training()
    frozen: Any = copy.deepcopy(training.model)
    for one in frozen.parameters():
        one.requires_grad_(False)
    frozen.eval()
    view = nn.ModuleList([training.model[0]])  # the same parameters once more
    frozen.weight = next(training.model.parameters()).detach()  # and in an attribute
    assert training.names(steps=lambda: (frozen(torch.randn(4, 3)), len(view))) == []


def test_the_model_may_have_an_attribute_called_buffers() -> None:
    training = Training()
    training.model.buffers = []  # type: ignore[assignment]  # as Megatron's DistributedDataParallel
    assert training.names() == []


def test_what_wraps_the_optimizer_and_is_copied_with_it_is_no_other_one() -> None:
    class Wrapper(torch.optim.SGD):
        """As Accelerate's: its groups are those of the optimizer inside."""

    training, copied = Training(), nn.Linear(3, 3)
    ours = torch.optim.Adam(copied.parameters())
    wrapper = Wrapper(copied.parameters())
    assert training.names(steps=wrapper.step, ours=[*copied.modules(), ours]) == []


def test_a_graph_with_an_optimizers_state_in_it_is_no_other_model() -> None:
    training = Training()
    training.model(torch.randn(4, 3)).sum().backward()
    training.optimizer.step()
    graph = nn.Module()  # as torch.compile makes one of the optimizer's step
    for number, state in enumerate(training.optimizer.state.values()):
        for name, value in state.items():
            graph.register_buffer(f"{name}_{number}", value)
    assert training.names() == []
    assert [*graph.buffers()]


def test_another_models_optimizer_is_named_and_the_model() -> None:
    training, head = Training(), nn.Linear(3, 1)
    of_head = torch.optim.Adam(head.parameters())

    def steps() -> None:
        head(torch.randn(4, 3)).sum().backward()
        of_head.step()

    assert set(training.names(steps=steps)) == {"Adam with 2 parameters", "the module Linear"}


def test_a_fused_optimizer_is_named_though_torch_does_not_count_what_it_writes() -> None:
    training, head = Training(), nn.Linear(3, 1)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1, fused=True)
    head.weight.grad, head.bias.grad = torch.ones_like(head.weight), torch.ones_like(head.bias)
    version = head.weight._version
    assert "SGD with 2 parameters" in training.names(steps=of_head.step)
    assert head.weight._version == version


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_teacher_that_follows_the_model_is_named_unless_extra_keeps_it(is_kept: bool) -> None:
    training = Training()
    teacher = nn.Sequential(copy.deepcopy(training.model))
    training.given["extra"] = teacher if is_kept else None

    def steps() -> None:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), training.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    assert training.names(steps=steps) == ([] if is_kept else ["the module Sequential"])


class Metric(nn.Module):
    """As torchmetrics': its states are attributes, with a copy of what they are at first."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "replaced": torch.zeros(2), "seen": []}
        self.reset()

    def reset(self) -> None:
        for name, value in self._defaults.items():
            setattr(self, name, value.clone() if isinstance(value, Tensor) else [])


class Buffers(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.last = torch.zeros(())


def written(metric: Any) -> None:
    metric.total += 1


def replaced(metric: Any) -> None:
    metric.before = metric.replaced
    metric.replaced = metric.replaced + 1


def listed(metric: Any) -> None:
    metric.seen.append(torch.ones(()))


def buffer(metric: Any) -> None:
    metric.count = metric.count + 1


def noted(metric: Any) -> None:
    """What is made anew is no state."""
    metric.last = torch.ones(())


@pytest.mark.parametrize(
    ("make", "update", "named"),
    [
        (Metric, written, ["the module Metric"]),
        (Metric, replaced, ["the module Metric"]),
        (Metric, listed, ["the module Metric"]),
        (Metric, noted, []),
        (Buffers, buffer, ["the module Buffers"]),
        (Buffers, noted, []),
    ],
)
def test_a_metric_is_named_however_it_counts(
    make: Callable[[], nn.Module], update: Callable[[Any], None], named: list[str]
) -> None:
    training, metric = Training(), make()
    assert training.names(steps=lambda: update(metric)) == named


def test_an_average_that_begins_later_is_named_at_once() -> None:
    training = Training()
    average = AveragedModel(training.model)
    assert "the module AveragedModel" in training.names()
    training.given["extra"] = average
    assert training.names() == []


@pytest.mark.parametrize("is_kept", [False, True])
def test_schedulers_and_a_scaler_are_named_unless_extra_keeps_them(is_kept: bool) -> None:
    training = Training()
    first = torch.optim.lr_scheduler.LinearLR(training.optimizer)
    second = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    both = torch.optim.lr_scheduler.ChainedScheduler([first, second])
    scaler = GradScaler("cpu")

    class Extra:
        def state_dict(self) -> Any:
            return {"scheduler": both.state_dict(), "scaler": scaler.state_dict()}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    training.given["extra"] = Extra() if is_kept else None
    names = set(training.names(scaler=scaler))
    assert names == (set() if is_kept else {"the scheduler of optimizer 0, ChainedScheduler", "a GradScaler"})
    training.given |= {"schedulers": [both], "scaler": scaler, "extra": None}
    assert training.names(scaler=scaler) == []


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("hook", "state", "named"),
    [
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None), "powerSGD_hook"),
        (
            post_localSGD_hook.post_localSGD_hook,
            post_localSGD_hook.PostLocalSGDState(None, None, 5),
            "post_localSGD_hook",
        ),
        (default_hooks.bf16_compress_hook, None, ""),
    ],
)
def test_a_communication_hook_that_keeps_something_is_named(hook: Any, state: Any, named: str) -> None:
    training = Training()
    training.model = nn.Sequential(nn.Linear(3, 3))
    training.optimizer = torch.optim.Adam(training.model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(training.model)
    wrapped.register_comm_hook(state, hook)
    names = training.names()
    assert any(f"communication hook {named} with its" in one for one in names) == bool(named), names
