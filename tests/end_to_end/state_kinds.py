"""Trains twice in one process, without jitckpt and with it, and says whether both came to the same state.

    state_kinds.py KIND

Each kind is a way in which trainings keep or change their state otherwise than by the plain step of a plain
optimizer. In the first start rank 1 kills itself in minibatch DIES, once its device has made all before it.
"""

import hashlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from coded import Coded, CodedMomentum, inner_of
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _random, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import jitckpt
from jitckpt.bindings.interpose import Native

STEPS, DIES = 12, 7
KINDS: dict[str, Callable[["Training"], None]] = {}
# With three ranks whose sums depend on where in a buffer a number lies.
KINDS_OF_RINGS: dict[str, Callable[["Training"], None]] = {}


class Training:
    """A small training; a kind changes what it is made of. `steps` is the loop's range, 0 to STEPS."""

    def __init__(self, protected: bool) -> None:
        self.protected = protected
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.net: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)).cuda()
        self.ranks_reduce = False  # the model is no DDP: the script sums gradients up by itself
        self.wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
        self.wraps_late = False  # behind jitckpt.init
        self.optimizer: Any = None
        self.given: Any = None  # as the optimizer, if that is another
        self.scheduler: Any = None
        self.before: Callable[[int], object] = lambda step: None
        self.inside: Callable[[int], object] = lambda step: None  # between backward pass and optimizer step
        self.after: Callable[[int], object] = lambda step: None
        self.loss: Callable[[Tensor, Tensor], Tensor] = lambda x, y: cross_entropy(self.model(x), y)
        self.make_step: Callable[[Callable[[], Tensor]], object] = self.plain_step
        self.more: Callable[[], object] = lambda: None
        self.clear: Callable[[], object] = self.take_gradients_away  # at the top of an iteration
        self.extra: Any = None
        self.by_steps = False  # the loop is over job.steps

    def start(self) -> Iterator[int]:
        self.model = self.net if self.ranks_reduce or self.wraps_late else self.wrap(self.net)
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        first = 0
        if self.protected:
            job = jitckpt.init(
                checkpoint_dir="ckpt",
                model=self.model,
                optimizer=self.given if self.given is not None else self.optimizer,
                scheduler=self.scheduler,
                extra=self.extra,
            )
            first = job.restore()
            if self.by_steps:
                return iter(job.steps(STEPS))
        if self.wraps_late:
            self.model = self.wrap(self.net)
        return iter(range(first, STEPS))

    @property
    def is_first_start(self) -> bool:
        return os.environ["JITCKPT_RESTART"] == "0"

    def die(self, step: int) -> None:
        if self.protected and self.is_first_start and self.rank == 1 and step == DIES:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

    def take_gradients_away(self) -> None:
        self.optimizer.zero_grad()

    def plain_step(self, closure: Callable[[], Tensor]) -> None:
        closure()
        self.inside(self.step)
        self.optimizer.step()

    def train(self) -> str:
        for step in self.start():
            self.step = step
            self.before(step)
            x, y = batch(self.step, self.rank)
            x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
            self.make_step(lambda x=x, y=y: self.backward(x, y))  # type: ignore[misc]
            self.after(self.step)
        return digest([self.net.state_dict(), self.net, self.optimizer, self.more()])

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.clear()
        loss = self.loss(x, y)
        self.die(self.step)
        loss.backward()
        if self.ranks_reduce:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        return loss


def batch(step: int, rank: int, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*(shape or (8, 16)), generator=torch.Generator().manual_seed(1000 * step + rank))
    return x.cuda(), (x.flatten(1).sum(1) > 0).long().cuda()


def digest(value: Any) -> str:
    """Return a digest of values, strides and flags, and of optimizers' states by their parameters' names."""
    names: dict[int, str] = {}
    content = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, Coded):
            add([type(one), one.offset, *inner_of(one)])
        elif isinstance(one, Tensor):
            content.update(f"{one.dtype} {one.shape} {one.stride()} {one.requires_grad}".encode())
            content.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, nn.Module):
            names.update({id(parameter): name for name, parameter in one.named_parameters()})
            add(dict(one.named_parameters()) | dict(one.named_buffers()))
        elif isinstance(one, torch.optim.Optimizer):
            add(
                [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in one.param_groups
                ]
            )
            add(
                {
                    str(names.get(id(key), key if isinstance(key, str) else "own")): state
                    for key, state in one.state.items()
                }
                if names
                else None
            )
        elif isinstance(one, dict):
            for key in sorted(one, key=repr):
                content.update(repr(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        else:
            content.update(repr(one).encode())

    add(value)
    return content.hexdigest()[:16]


def kind(make: Callable[[Training], None]) -> Callable[[Training], None]:
    KINDS[make.__name__] = make
    return make


def kind_of_rings(make: Callable[[Training], None]) -> Callable[[Training], None]:
    KINDS_OF_RINGS[make.__name__] = make
    return make


@kind
def parameters_in_another_order(training: Training) -> None:
    """Each process gives the optimizer its parameters as a set has them, all of one shape."""
    training.net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)]).cuda()
    parameters = list(training.net.parameters())
    order = random.Random(10 * int(os.environ["JITCKPT_RESTART"]) + training.rank)
    order.shuffle(parameters)
    training.optimizer = torch.optim.Adam(parameters, lr=0.01)


@kind
def groups_in_another_order(training: Training) -> None:
    groups = [
        {"params": list(training.net[0].parameters()), "lr": 0.01},  # type: ignore[index]
        {"params": list(training.net[2].parameters()), "lr": 0.001},  # type: ignore[index]
    ]
    if os.environ["JITCKPT_RESTART"] != "0" and training.protected:
        groups.reverse()
    training.optimizer = torch.optim.Adam(groups)
    training.more = lambda: None


@kind
def channels_last(training: Training) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 8, 8))
    training.net = net.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01, fused=True)
    training.loss = lambda x, y: cross_entropy(
        training.model(
            batch(training.step, training.rank, 8, 3, 8, 8)[0].to(memory_format=torch.channels_last)
        ),
        y,
    )


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a counter in attributes, around another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner, self.done, self.rank = inner, 0, dist.get_rank()
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.done += 1
        if self.done % 5 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


class LookaheadWithDict(Lookahead):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow, self.done = state_dict["slow"], state_dict["done"]


@kind
def attributes_that_no_state_dict_holds(training: Training) -> None:
    training.optimizer = Lookahead(torch.optim.Adam(training.net.parameters(), lr=0.01))
    training.more = lambda: [training.optimizer.inner, training.optimizer.slow, training.optimizer.done]
    assert training.optimizer.rank == dist.get_rank()


class Anchored(torch.optim.SGD):
    """Draws the weights to what they were some steps before."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.01)
        self.anchors, self.made = [one.detach() for one in self.param_groups[0]["params"]], 0  # their memory

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.made += 1
        if self.made % 3 == 0:
            self.anchors = [one.detach().clone() for one in self.param_groups[0]["params"]]
        with torch.no_grad():
            for parameter, anchor in zip(self.param_groups[0]["params"], self.anchors, strict=True):
                parameter.lerp_(anchor, 0.1)


@kind
def attributes_that_are_set_anew(training: Training) -> None:
    training.optimizer = Anchored(training.net.parameters())
    training.more = lambda: training.optimizer.anchors


@kind
def a_state_dict_of_its_own(training: Training) -> None:
    training.optimizer = LookaheadWithDict(torch.optim.Adam(training.net.parameters(), lr=0.01))
    training.more = lambda: [training.optimizer.inner, training.optimizer.slow, training.optimizer.done]


class Around(torch.optim.Optimizer):
    """An optimizer by its class alone, as Accelerate's are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.optimizer.step()


@kind
def an_object_around_the_optimizer(training: Training) -> None:
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    around = training.given = Around(training.optimizer)

    def make_step(closure: Callable[[], Tensor]) -> None:
        closure()
        around.step()

    training.make_step = make_step
    training.more = lambda: around.calls


@kind
def sharpness_aware(training: Training) -> None:
    """Two passes a step, the second with weights that are taken back before the step."""
    training.optimizer = torch.optim.SGD(training.net.parameters(), lr=0.1, momentum=0.9)

    def make_step(closure: Callable[[], Tensor]) -> None:
        step, training.step = training.step, -1  # it dies in the second pass
        closure()
        training.step = step
        with torch.no_grad():
            climbs = [0.1 * p.grad for p in training.net.parameters() if p.grad is not None]
            for parameter, climb in zip(training.net.parameters(), climbs, strict=True):
                parameter.add_(climb)
        closure()
        with torch.no_grad():
            for parameter, climb in zip(training.net.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        training.optimizer.step()

    training.make_step = make_step


@kind
def perturbed_through_data(training: Training) -> None:
    """An adversarial step: torch does not count what is written through `data`."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        clean = cross_entropy(training.model(x), y)
        weight = training.net[0].weight  # type: ignore[index]
        kept = weight.data.clone()
        weight.data.add_(0.1)
        found = clean + cross_entropy(training.net(x), y)
        training.die(training.step)
        dist.all_reduce(torch.ones(1, device="cuda"))
        weight.data.copy_(kept)
        return found

    training.loss = loss


def _adding_a_group(training: Training, at: int) -> Callable[[int], None]:
    """Have the optimizer begin with one layer; return what adds the other one in an iteration."""
    training.optimizer = torch.optim.Adam(training.net[2].parameters(), lr=0.01)  # type: ignore[index]

    def add(step: int) -> None:
        if step == at:
            added = list(training.net[0].parameters())  # type: ignore[index]
            training.optimizer.add_param_group({"params": added, "lr": 0.001})

    return add


@kind
def a_group_that_is_added(training: Training) -> None:
    training.before = _adding_a_group(training, 4)


@kind
def a_group_that_is_added_in_the_iteration_that_is_made_again(training: Training) -> None:
    """The script adds it in both: the restart has brought it back by then."""
    training.before = _adding_a_group(training, DIES)


@kind
def a_group_that_is_added_behind_the_step(training: Training) -> None:
    training.after = _adding_a_group(training, DIES - 1)


def _replace(training: Training, grown: int) -> None:
    """Put another parameter in the place of the first weight, as densification and pruning do."""
    old = training.net[0].weight  # type: ignore[index]
    rows = torch.cat([old.detach(), torch.full((grown, old.shape[1]), 0.1, device="cuda")])
    new = nn.Parameter(rows)
    training.net[0].weight = new  # type: ignore[index]
    group = training.optimizer.param_groups[0]["params"]
    group[[id(one) for one in group].index(id(old))] = new
    state = training.optimizer.state.pop(old)
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros(grown, old.shape[1], device="cuda")])
    training.optimizer.state[new] = state


@kind
def a_parameter_that_is_replaced(training: Training) -> None:
    training.ranks_reduce = True
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    training.before = lambda step: _replace(training, 0) if step == 4 else None


@kind
def a_parameter_that_grows(training: Training) -> None:
    training.ranks_reduce = True
    training.net = nn.Sequential(nn.Linear(16, 4, bias=False)).cuda()
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    training.before = lambda step: _replace(training, 3) if step == 4 else None


@kind
def a_module_that_is_added(training: Training) -> None:
    """A restart builds it before it calls jitckpt.init."""
    training.ranks_reduce = True

    def add() -> None:
        torch.manual_seed(3)
        more = nn.Linear(2, 2).cuda()
        training.net.add_module("more", more)
        training.optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.001})

    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    if training.is_first_start or not training.protected:
        training.before = lambda step: add() if step == 4 else None
    else:
        add()


@kind
def parameters_that_are_unfrozen(training: Training) -> None:
    training.ranks_reduce = True
    training.net[0].requires_grad_(False)  # type: ignore[index]
    training.before = lambda step: training.net.requires_grad_(True) if step == 4 else None


@kind
def masters_in_the_optimizer(training: Training) -> None:
    """The model is of half precision; the optimizer has fp32 copies of it, which are copied back."""
    training.net = training.net.bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in training.net.parameters()]
    training.optimizer = torch.optim.AdamW(masters, lr=0.01)
    training.loss = lambda x, y: cross_entropy(training.model(x.bfloat16()).float(), y)

    def inside(step: int) -> None:
        for master, parameter in zip(masters, training.net.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        training.net.zero_grad()

    def after(step: int) -> None:
        with torch.no_grad():
            for master, parameter in zip(masters, training.net.parameters(), strict=True):
                parameter.copy_(master)

    training.inside, training.after, training.more = inside, after, lambda: masters


@kind
def weights_that_are_clamped(training: Training) -> None:
    def after(step: int) -> None:
        for parameter in training.net.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    training.after = after


@kind
def weights_that_are_clamped_as_another_dies(training: Training) -> None:
    """Rank 0 is held up in the middle of it until long after rank 1 has been found dead."""

    def after(step: int) -> None:
        for number, parameter in enumerate(training.net.parameters()):
            if number == 2 and step == DIES - 1 and training.protected and training.rank == 0:
                time.sleep(2)
            parameter.data.clamp_(-0.1, 0.1)

    training.after = after


class Branching(nn.Module):
    """It has a spare branch, too, that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.spare = nn.Linear(16, 2), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: Tensor, uses_branch: bool) -> Tensor:
        return self.trunk(x) + (self.branch(x) if uses_branch else 0)  # type: ignore[no-any-return]


def _branching(training: Training) -> None:
    """The branch is used in the first minibatches alone."""
    training.net = Branching().cuda()
    training.ranks_reduce = True
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01, weight_decay=0.1)
    training.loss = lambda x, y: cross_entropy(training.model(x, training.step < 4), y)


@kind
def gradients_that_are_made_zeros(training: Training) -> None:
    """A parameter that is not used any more is decayed on: it has a gradient, of zeros."""
    _branching(training)
    training.clear = lambda: training.optimizer.zero_grad(set_to_none=False)


@kind
def gradients_that_are_made_zeros_behind_the_step(training: Training) -> None:
    _branching(training)
    training.clear = lambda: None
    training.after = lambda step: training.net.zero_grad(set_to_none=False)


@kind
def gradients_that_are_taken_away_behind_the_step(training: Training) -> None:
    """A parameter that is not used any more is left alone."""
    _branching(training)
    training.clear = lambda: None
    training.after = lambda step: training.net.zero_grad()


@kind
def a_closure(training: Training) -> None:
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    training.make_step = training.optimizer.step


@kind
def a_closure_called_several_times(training: Training) -> None:
    training.optimizer = torch.optim.LBFGS(training.net.parameters(), history_size=4, max_iter=3)
    calls = itertools.count()

    def make_step(closure: Callable[[], Tensor]) -> None:
        def counted() -> Tensor:
            step, training.step = training.step, training.step if next(calls) % 3 == 1 else -1
            loss = closure()  # it dies in the second call of a step
            training.step = step
            return loss

        training.optimizer.step(counted)

    training.make_step = make_step


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state.setdefault("made", {"steps": 0})["steps"] += 1  # type: ignore[call-overload]


@kind
def state_under_a_name(training: Training) -> None:
    training.optimizer = Counting(training.net.parameters(), lr=0.1, momentum=0.9)


class Remembering(nn.Module):
    """A running mean in a buffer that a state_dict leaves out."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@kind
def a_buffer_that_a_state_dict_leaves_out(training: Training) -> None:
    training.net = nn.Sequential(nn.Linear(16, 32), Remembering(), nn.Linear(32, 2)).cuda()


class Recomputed(nn.Module):
    """Its activations are computed again in the backward pass, with the random numbers of the forward one."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 32))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


def _recomputed(training: Training, use_reentrant: bool) -> None:
    parts = [Recomputed(use_reentrant) for _ in range(2)]
    training.net = nn.Sequential(nn.Linear(16, 32), *parts, nn.Linear(32, 2)).cuda()
    training.more = lambda: [torch.rand(2), torch.rand(2, device="cuda")]


@kind
def activations_that_are_computed_again(training: Training) -> None:
    _recomputed(training, use_reentrant=False)


@kind
def activations_that_are_computed_again_by_a_pass_within_the_pass(training: Training) -> None:
    _recomputed(training, use_reentrant=True)


class Application(Stateful):
    """The recipe of torch's own checkpoints: model and optimizer as one object."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("jitckpt brings the training back, and not this")


class Progress(Stateful):
    """What the script carries on: it stands in torch's own checkpoints, and is jitckpt's `extra`."""

    def __init__(self) -> None:
        self.mean, self.seen = 0.0, torch.zeros((), device="cuda")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean, self.seen = state_dict["mean"], state_dict["seen"].cuda()


def _saving(training: Training, begin: Callable[..., Any]) -> None:
    """Have torch's own checkpoint be saved behind each third step, the last one before the death among them.

    `begin` may return what is to be waited for.
    """
    group = dist.new_group(backend="gloo")
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01)
    progress = training.extra = Progress()
    training.by_steps = True  # what changes behind the step belongs to it then
    state = {"application": Application(training), "progress": progress}
    folder = "own/protected" if training.protected else "own/plain"
    begun: list[Future[Any]] = []

    def wait() -> None:
        while begun:
            begun.pop().result()

    def after(step: int) -> None:
        progress.mean = 0.9 * progress.mean + step
        progress.seen += next(training.net.parameters()).detach().sum()
        if step % 3 == (DIES - 1) % 3:
            wait()
            saving = begin(state, checkpoint_id=f"{folder}/{step}", process_group=group)
            begun.extend([saving] if isinstance(saving, Future) else [])

    def more() -> list[Any]:
        wait()
        return [progress.mean, progress.seen]

    training.after, training.more = after, more


@kind
def torchs_own_checkpoints(training: Training) -> None:
    _saving(training, save)


@kind
def torchs_own_checkpoints_that_are_saved_beside_the_training(training: Training) -> None:
    _saving(training, async_save)


@kind
def a_state_that_torch_asks_for_before_the_first_step(training: Training) -> None:
    """Torch makes a step of its own then, without gradients and at no rate, to have the optimizer's state."""
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01)
    application = Application(training)
    training.before = lambda step: application.state_dict() if step == 0 else None


@kind
def rates_on_the_device(training: Training) -> None:
    """Changed in their place, one after each step and one before it: there the failure comes."""
    rates = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    groups = [
        {"params": [*layer.parameters()], "lr": rate}
        for layer, rate in zip((training.net[0], training.net[2]), rates, strict=True)  # type: ignore[index]
    ]
    training.optimizer = torch.optim.Adam(groups, capturable=True)

    def make_step(closure: Callable[[], Tensor]) -> None:
        step, training.step = training.step, -1
        closure()
        training.step = step
        rates[1].mul_(0.9)
        training.die(step)
        dist.all_reduce(torch.ones(1, device="cuda"))
        training.optimizer.step()

    training.make_step = make_step
    training.after = lambda step: rates[0].mul_(0.9)
    training.more = lambda: rates


@kind
def a_validation_with_gradients(training: Training) -> None:
    """It needs forces, so it runs with gradients; a scheduler is stepped behind it."""
    training.ranks_reduce = True
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

    def after(step: int) -> None:
        if step % 4 == 3:
            x = batch(900 + step, training.rank)[0].requires_grad_(True)
            torch.autograd.grad(training.model(x).sum(), x)[0].sum().item()
            training.scheduler.step()

    training.after = after


@kind
def a_death_in_the_first_validation(training: Training) -> None:
    """The other rank is in its validation, too, and comes to the scheduler's step behind it."""
    training.ranks_reduce = True
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=0.01)
    training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

    def after(step: int) -> None:
        if step + 1 == DIES:
            for part in range(3):
                x = batch(900 + part, training.rank)[0].requires_grad_(True)
                torch.autograd.grad(training.model(x).sum(), x)[0].sum().item()
                training.die(step + 1)
                while training.protected and training.is_first_start and not Native().progress().holding:
                    time.sleep(0.01)  # until a save is ordered
            training.scheduler.step()

    training.after = after


@kind
def numbers_of_a_distributed_tensor(training: Training) -> None:
    """Its first draw sends rank 0's numbers to all, once in a process; the ranks draw differently since."""
    _random._rng_tracker = None
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    noise = distribute_tensor(torch.zeros(4 * dist.get_world_size()), mesh, [Shard(0)])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(training.rank):
            x = x + 0.1 * torch.rand_like(x)
        own = torch.rand_like(noise).to_local()  # type: ignore[attr-defined]
        return cross_entropy(training.model(x * own.mean()), y)

    training.loss = loss


def many_buckets(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=0.001, **options)


@kind_of_rings
def buckets(training: Training) -> None:
    training.wrap = many_buckets


@kind_of_rings
def buckets_of_a_model_that_is_wrapped_late(training: Training) -> None:
    training.wrap = many_buckets
    training.wraps_late = True


@kind_of_rings
def buckets_of_a_static_graph(training: Training) -> None:
    training.wrap = partial(many_buckets, static_graph=True)


@kind_of_rings
def buckets_that_are_the_gradients(training: Training) -> None:
    training.wrap = partial(many_buckets, gradient_as_bucket_view=True)


@kind_of_rings
def buckets_that_a_function_sums_up(training: Training) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        wrapper = many_buckets(net)
        wrapper.register_comm_hook(None, bf16_compress_hook)
        return wrapper

    training.wrap = wrap


@kind_of_rings
def buckets_that_torch_sums_up_in_half_precision(training: Training) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        wrapper = many_buckets(net)
        wrapper._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        return wrapper

    training.wrap = wrap


class Scaled(nn.Module):
    """What comes out times a buffer and an attribute of codes, which change behind each step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.attribute = net, Coded.of(torch.ones(2, device="cuda"))
        self.buffer: Tensor
        self.register_buffer("buffer", Coded.of(torch.ones(1, device="cuda")))

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * self.buffer + self.attribute.abs().mean()


@kind
def tensors_that_are_made_of_others(training: Training) -> None:
    """Codes and scales in a parameter, a buffer, an attribute and the optimizer's state."""
    first: Any = training.net[0]  # type: ignore[index]
    first.weight = nn.Parameter(Coded.of(first.weight.detach()))
    net = training.net = Scaled(training.net)
    training.optimizer = CodedMomentum(net.parameters())
    training.by_steps = True  # what changes behind the step belongs to it then

    def after(step: int) -> None:
        with torch.no_grad():
            net.buffer.copy_(next(net.parameters()).abs().mean().reshape(1))
            net.attribute.add_(torch.full((2,), 0.01 * step, device="cuda"))

    training.after, training.more = after, lambda: net.attribute


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = []
    for protected in (False, True):
        training = Training(protected)
        (KINDS | KINDS_OF_RINGS)[sys.argv[1]](training)
        found.append(training.train())
    os.write(1, f"rank {dist.get_rank()} {'equal' if found[0] == found[1] else 'OTHER'} {found}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
