"""The optimizer steps of a script that knows nothing of jitckpt, and names for the state that they change.

Every step of every optimizer counts, in the order in which they are made. So several optimizers, in whatever
turns, and gradients that are summed over micro-batches need no word of the script. A step that a GradScaler
skips counts too. The names are the same on all replicas: they number optimizers by their first step.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jitckpt._seen import Seen
from jitckpt.errors import CheckpointError
from jitckpt.hooks import captured_graphs
from jitckpt.hooks.guard import Guard
from jitckpt.hooks.torch_training import is_in_step
from jitckpt.hooks.untraced import untraced
from jitckpt.state import parallel
from jitckpt.state.optimizer_state import OptimizerState, parameters_of
from jitckpt.state.unwrapping import unwrapped

State = Callable[[], Mapping[str, Tensor]]


class StepListener(Protocol):
    """What is told, on the thread that makes the step. Steps are counted from 1.

    state(): the parameters and all that the optimizers keep on a device, of every optimizer that has made a
    step, under names such as optimizer.0.parameter.17 and optimizer.0.state.17.exp_avg. The mapping is the
    same object as long as it holds the same tensors. To find that out takes a look at each of them.
    """

    def step_begins(self, step: int, optimizer: Optimizer, state: State) -> None:
        """All calls before the step are made; the next is the first that changes the state."""

    def step_ended(self, step: int, optimizer: Optimizer, state: State) -> None:
        """The last call of the step is made. The state may have got new tensors."""

    def unsupported(self, reason: str) -> None:
        """The script does what transparent mode can't recover from; `reason` is a clause that names it."""

    def failed(self, step: int, error: Exception) -> None:
        """These hooks or their listener have failed around that step; nothing is told any more."""


class OptimizerSteps:
    """Tells a listener of all optimizer steps in this process, until `detach`."""

    def __init__(self, listener: StepListener) -> None:
        self.step = 0  # that have ended
        self._listener = listener
        self._known: list[weakref.ref[Optimizer]] = []  # in the order of their first steps
        self._state: Mapping[str, Tensor] = {}
        self._parts: list[Mapping[str, Tensor]] = []  # of what the state was put together
        self._inside: Optimizer | None = None
        self._has_inner = False  # a step has begun inside of that one, perhaps of the same optimizer
        self._begun = False
        self._said: set[str] = set()
        self._guard = Guard(lambda error: listener.failed(self.step + 1, error))
        self._handles = [
            register_optimizer_step_pre_hook(untraced(self._guard(self._enters))),
            register_optimizer_step_post_hook(untraced(self._guard(self._leaves))),
        ]
        self._replayed = self._guard(self._graph_has_stepped)
        captured_graphs.listen(self)
        self._scaler_step: Callable[..., Any] = GradScaler.step
        GradScaler.step = self._watched_scaler_step()  # type: ignore[method-assign]

    def detach(self) -> None:
        """Take every hook away again."""
        captured_graphs.ignore(self)
        for handle in self._handles:
            handle.remove()
        GradScaler.step = self._scaler_step  # type: ignore[method-assign]

    def optimizers(self) -> list[Optimizer | None]:
        """Return the optimizers that have made a step, by number; None for one that is no more."""
        return [one() for one in self._known]

    def _enters(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if captured_graphs.is_now():
            return None
        if self._inside is not None:
            if is_in_step(self._inside, besides=optimizer):
                self._has_inner = True
                return None  # such as the optimizer inside a ZeroRedundancyOptimizer
            left = self._spelled(self._inside)
            self._unsupported(f"the step of {left} was left with an exception, so its state is half stepped")
        self._inside, self._has_inner, self._begun = optimizer, False, False
        if torch._C._current_graph_task_id() != -1:
            self._unsupported(f"{self._spelled(optimizer)} makes its step inside the backward pass")
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._watched_closure(optimizer, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._watched_closure(optimizer, kwargs["closure"])}
        self._begins()
        return None

    def _leaves(self, optimizer: Optimizer, args: object = (), kwargs: object = None) -> None:
        # A step may call that of its base class, which has hooks of its own. To find out takes a look at all
        # callers.
        if (
            optimizer is self._inside
            and not captured_graphs.is_now()
            and not (self._has_inner and is_in_step(optimizer, besides=optimizer))
        ):
            if not self._begun:
                self._begins()  # it was given a closure that it did not call
            self._inside = None
            self.step += 1
            self._listener.step_ended(self.step, optimizer, self._named)

    def _begins(self) -> None:
        self._begun = True
        assert self._inside is not None
        self._number(self._inside)
        self._listener.step_begins(self.step + 1, self._inside, self._named)

    def _watched_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after whose first call the step begins: until then it is forward and backward."""

        again, begins = self._guard(self._calls_again), self._guard(self._begins)

        def watched() -> Any:
            if self._begun:
                again(optimizer)
            result = closure()
            if not self._begun:
                begins()
            return result

        return watched

    def _calls_again(self, optimizer: Optimizer) -> None:
        self._unsupported(f"{self._spelled(optimizer)} calls its closure several times in one step")

    def _watched_scaler_step(self) -> Callable[..., Any]:
        steps, original, leaves_out = self, self._scaler_step, self._guard(self._leaves_out)

        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = steps.step
            result = original(self, optimizer, *args, **kwargs)
            if steps.step == before and steps._inside is None:
                leaves_out(optimizer)
            return result

        return step

    def _leaves_out(self, optimizer: Optimizer) -> None:
        """A scaler has not let the optimizer make its step, so no hook has run."""
        if captured_graphs.is_now():
            return
        self._inside = optimizer
        self._begins()
        self._leaves(optimizer)

    def replay_begins(self, optimizers: list[Optimizer] | None) -> None: ...

    def replay_ended(self, optimizers: list[Optimizer] | None) -> None:
        if optimizers:
            self._replayed(optimizers)

    def _graph_has_stepped(self, optimizers: list[Optimizer]) -> None:
        """A minibatch ends behind a graph with a step in it; only an image has the state before that."""
        for optimizer in optimizers:
            self._number(optimizer)
            self._unsupported(f"a CUDA graph makes the step of {self._spelled(optimizer)}")
        self._listener.step_begins(self.step + 1, optimizers[-1], self._named)
        self.step += 1
        self._listener.step_ended(self.step, optimizers[-1], self._named)

    def _number(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._known):
            if known() is optimizer:
                return number
        self._known.append(weakref.ref(optimizer))
        # With the optimizer itself, so that it lives no longer.
        optimizer.__dict__["_jitckpt_state"] = OptimizerState(optimizer, f"optimizer.{len(self._known) - 1}")
        return len(self._known) - 1

    def seen(self, optimizer: Optimizer) -> Seen | None:
        """Return what tells that the state is still as it was last given; None with several optimizers."""
        state: OptimizerState = optimizer.__dict__["_jitckpt_state"]
        return state.seen if len(self._known) == 1 else None

    def _named(self) -> Mapping[str, Tensor]:
        for one in self._known:
            optimizer = one()
            if optimizer is None or not optimizer.__dict__["_jitckpt_state"].is_as_named():
                return self._put_together()
        return self._state

    def _put_together(self) -> Mapping[str, Tensor]:
        parts: list[Mapping[str, Tensor]] = []
        for optimizer in self.optimizers():
            if optimizer is not None:
                try:
                    parts.append(optimizer.__dict__["_jitckpt_state"].named_tensors())
                except CheckpointError as error:
                    self._unsupported(str(error))
        if [*map(id, parts)] != [*map(id, self._parts)]:
            self._parts = parts
            self._state = {name: tensor for part in parts for name, tensor in part.items()}
        return self._state

    def _spelled(self, optimizer: Optimizer) -> str:
        return f"optimizer {self._number(optimizer)} ({type(optimizer).__name__})"

    def _unsupported(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._listener.unsupported(reason)


def named_buffers(optimizers: list[Optimizer | None]) -> dict[str, Tensor]:
    """Return the buffers of all modules that there are, under names such as module.0.layer1.bn.running_mean.

    Modules are numbered by their first parameter in an optimizer, others after them by what they are made of;
    of those that are made alike the buffers are left out. Looks through all objects: for now and then.
    """
    places = {
        id(parameter): (number, place)
        for number, optimizer in enumerate(optimizers)
        if optimizer is not None
        for place, parameter in enumerate(parameters_of(optimizer))
    }
    modules = parallel.all_of(nn.Module)
    inner = {id(child) for module in modules for child in module.children()}
    # With an optimizer's parameters before those without; then by content.
    roots: dict[int, tuple[Any, nn.Module]] = {}
    for module in modules:
        if id(module) not in inner:
            root = unwrapped(module)
            own = [places[id(parameter)] for parameter in root.parameters() if id(parameter) in places]
            content = [
                (name, tuple(tensor.shape))
                for name, tensor in [*root.named_parameters(), *root.named_buffers()]
            ]
            roots[id(root)] = ((not own, min(own, default=()), type(root).__name__, content), root)
    alike = Counter(repr(key) for key, _ in roots.values())
    found: dict[str, Tensor] = {}
    told_apart = [
        (repr(key), root)
        for key, root in roots.values()
        # Not buffers(): Megatron's DistributedDataParallel has an attribute of that name, a list.
        if alike[repr(key)] == 1 and any(True for _ in root.named_buffers())
    ]
    for number, (_, root) in enumerate(sorted(told_apart, key=lambda one: one[0])):
        for name, buffer in root.named_buffers():
            found |= parallel.held(buffer, f"module.{number}.{name}")
    return found
