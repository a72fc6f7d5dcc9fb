"""Hooks into a plain PyTorch training loop: they count minibatches and tell where in one the loop is.

A minibatch is one step of every optimizer that was given. A step that a GradScaler skips, because gradients
overflowed, counts too: the loop goes on to the next batch all the same.

Where the loop tells its boundaries (`boundary`), what comes between two of them is one minibatch, whatever
optimizers make steps in it.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from jitckpt.hooks import captured_graphs
from jitckpt.hooks.attached import Attached, AttachedMethod
from jitckpt.hooks.steps_for_state import is_for_state
from jitckpt.hooks.untraced import compiled_from, left_out, untraced
from jitckpt.state.optimizer_state import inside

MOST_PARTS = 100  # of a model that are watched, where nobody calls the model itself


class Listener(Protocol):
    """What is told; `step` is the step being made, counted from 1."""

    def minibatch_begun(self, step: int) -> None:
        """The host is past all that belongs to the step before: scheduler, scaler."""

    def forward_ended(self, step: int) -> None:
        """The forward pass of a micro-batch is enqueued, its backward pass not yet."""

    def step_begun(self, step: int) -> None:
        """The optimizer is about to enqueue its first kernel."""

    def step_ended(self, step: int) -> None:
        """The last optimizer has enqueued its last kernel."""

    def passed_again(self, step: int) -> None:
        """One more forward pass begins in a minibatch whose optimizer step has not begun."""

    def closure_again(self, step: int) -> None:
        """The optimizer calls its closure once more in the same step."""

    def unequal_turns(self, step: int) -> None:
        """An optimizer has stepped again before another has: who is to say where the minibatch ends."""

    def captured_step(self, step: int) -> None:
        """A CUDA graph is about to be replayed in which an optimizer makes a step, as far as is known."""

    # Where the loop tells its boundaries, these as well; minibatch_begun is not told there.

    def minibatch_ended(self, step: int) -> None:
        """The script goes on to the next one: what it did after the optimizer step belongs to the step."""

    def drawn_ahead(self) -> None:
        """The script asked for a batch between a forward pass and its optimizer step."""

    def steps_again(self) -> None:
        """A second step is made in one minibatch, and the one before had a single step."""

    def several_steps(self) -> None:
        """There were several steps in the minibatch that is just ended."""


class TrainingHooks:
    """Attached to the objects of one training loop until `detach`."""

    def __init__(
        self,
        listener: Listener,
        *,
        model: nn.Module | None,
        optimizers: list[Optimizer],
        scaler: Any = None,
        on_phase: Callable[[int, str], None] | None = None,
        every_optimizer: bool = False,
        every_scaler: bool = False,
    ) -> None:
        """Without optimizers every optimizer is watched; the first to make a step counts the minibatches.

        every_optimizer: then a minibatch is, from the second on, one step of each that has made one before
        the first one makes its second. every_scaler: without a scaler, watch whichever is used.
        on_phase: called with the step and forward, backward, optimizer or between when the loop gets there.
        Without a model the forward pass is that of the outermost module called, watched only for on_phase;
        of one without a forward of its own (a ModuleList) it is that of each of its parts.
        """
        self.step = 0  # the newest step that has ended on the host
        self._first_step = 0  # of those seen, where every optimizer is watched
        self._listener = listener
        self._on_phase = on_phase
        self._optimizers: list[weakref.ref[Optimizer]] = [weakref.ref(optimizer) for optimizer in optimizers]
        # Of an optimizer inside of another (SAM's and Lookahead's), whose own step may never be called, that.
        self._outer: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            self._outer |= {id(inner): optimizer for inner in all_inside(optimizer)}
        self._entered: Counter[int] = Counter()  # calls of step of each optimizer since one has ended, by id
        self._stepped: set[int] = set()  # optimizers that have ended their step in this minibatch
        self._in_step = False
        self._in_minibatch = False
        self._has_model = model is not None
        self._forward_seen = False  # of the model, in this minibatch
        self._depth = 0
        self._parts: WeakSet[nn.Module] | None = None  # of the model, by on_phase alone
        self._outermost: WeakSet[nn.Module] | None = None  # of these, those that have hooks of their own
        self._explicit = False  # the loop tells its boundaries
        # Optimizer steps since the last boundary. Where there may be several, the minibatch ends with it.
        self._turns = 0
        self._ends_at_boundary = True
        self.only_at_boundary = False  # whatever is around the optimizers goes on after their own steps
        self._asked_since_forward = False
        self._handles: list[RemovableHandle] = []
        called = [] if model is None else [*outermost(model)]
        # Inside of what is watched; a wrapper may be gone with the script's last name for it.
        self._inside = WeakSet(_parts_of(called))
        for one in called:
            self._handles += self._watch_model(one)
        if on_phase is not None:
            self._watch_parts(model, called)
        self._watch_optimizers(optimizers)
        self._learns = every_optimizer and not optimizers
        self.is_learned = not self._learns  # which optimizers make up a minibatch
        self.unexpected: Optimizer | None = None  # one that is none of them and made a step later
        captured_graphs.listen(self)
        self._scaler = scaler
        self.found_scaler: GradScaler | None = None
        self._scaler_step: Callable[..., Any] | None = None
        if scaler is not None:
            self._wrap_scaler(scaler)
        elif every_scaler:
            self._wrap_every_scaler()

    def _watch_model(self, model: nn.Module) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        begins, ends = untraced(self._forward_begins), untraced(self._forward_ends)
        compiled = compiled_from(model)
        if compiled:  # which may be one graph that no hook may cut: these are called around it
            for one in compiled:
                handles += [
                    one.register_forward_pre_hook(Attached(begins)),
                    one.register_forward_hook(Attached(ends)),
                ]
            begins, ends = left_out(begins), left_out(ends)
        return [
            *handles,
            model.register_forward_pre_hook(Attached(begins)),
            model.register_forward_hook(Attached(ends)),
        ]

    def _watch_inside(self) -> None:
        """Watch, from the next minibatch on, what is inside of the modules that nobody calls.

        Such as a model that the script has wrapped anew by DistributedDataParallel, or calls by its parts.
        """
        called = [*self._inside] if len(self._inside) <= MOST_PARTS else []
        self._inside = WeakSet(_parts_of(called))
        if self._outermost is not None:
            self._outermost.update(called)
        for one in called:
            self._handles[:0] = self._watch_model(one)  # the last one stays what it is, see end_last

    def _watch_parts(self, model: nn.Module | None, called: Iterable[nn.Module]) -> None:
        """Watch the modules of the model, or without one all there are, for what they are called in."""
        self._parts = None if model is None else WeakSet(model.modules())
        self._outermost = None if model is None else WeakSet(called)
        self._handles += [
            nn.modules.module.register_module_forward_pre_hook(untraced(self._any_module_begins)),
            nn.modules.module.register_module_forward_hook(untraced(self._any_module_ends), always_call=True),
        ]

    def _watch_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Watch these and what is inside of them; every optimizer, where there are none."""
        for optimizer in [*optimizers, *(inner for one in optimizers for inner in all_inside(one))]:
            self._handles += [
                optimizer.register_step_pre_hook(Attached(untraced(self._begin))),
                optimizer.register_step_post_hook(Attached(untraced(self._end))),
            ]
        if not optimizers:
            self._handles += [
                register_optimizer_step_pre_hook(untraced(self._begin_any)),
                register_optimizer_step_post_hook(untraced(self._end_any)),
            ]

    def detach(self) -> None:
        """Take every hook away again."""
        captured_graphs.ignore(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._scaler is not None:
            del self._scaler.step
            self._scaler = None
        if self._scaler_step is not None:
            GradScaler.step = self._scaler_step  # type: ignore[method-assign]
            self._scaler_step = None

    def end_last(self) -> None:
        """Hear of the end of a step after all who are told of it by now. Where every optimizer is watched."""
        self._handles[-1].remove()
        self._handles[-1] = register_optimizer_step_post_hook(untraced(self._end_any))

    @property
    def watched(self) -> list[Optimizer]:
        """The optimizers whose steps make a minibatch, as far as they are known and alive."""
        return [optimizer for one in self._optimizers if (optimizer := one()) is not None]

    def boundary(self) -> bool:
        """The loop asks for its next iteration, or is at its end; returns whether steps were made since."""
        self._explicit = True
        self._asked_since_forward = True
        if self._turns == 0:
            return False
        if self._in_step:
            self._end_minibatch()
        self._ends_at_boundary = self.only_at_boundary or self._turns > 1 or len(self._optimizers) > 1
        if self._turns > 1:
            self._listener.several_steps()
        self._turns = 0
        self._listener.minibatch_ended(self.step)
        return True

    def forget_pass(self) -> None:
        """No step belongs to the forward pass that has ended."""
        self._in_minibatch = self._forward_seen = False

    # Where all is cold in the caches each call of a Python function takes some microseconds: so the methods
    # are hooks themselves, and no call is made of which is known before that it does nothing.

    def _enter_minibatch(self) -> None:
        if not (self._in_minibatch or self._explicit):
            self._in_minibatch = True
            self._listener.minibatch_begun(self.step + 1)

    def _forward_begins(self, module: nn.Module | None, inputs: object) -> None:
        # Else an evaluation, which trains nothing, or one that is captured and does nothing now.
        if torch.is_grad_enabled() and not (captured_graphs.capturing and captured_graphs.is_now()):
            if self._in_minibatch:
                if not self._in_step:
                    self._listener.passed_again(self.step + 1)
            else:
                self._enter_minibatch()
            if self._on_phase is not None:
                self._on_phase(self.step + 1, "forward")

    def _forward_ends(self, module: nn.Module | None, inputs: object, output: object) -> None:
        if captured_graphs.capturing and captured_graphs.is_now():
            return
        # A pass after the step, and before the boundary, is an evaluation that takes gradients.
        if torch.is_grad_enabled() and (self._turns == 0 or self._in_step):
            self._forward_seen = True
            self._asked_since_forward = False
            self._listener.forward_ended(self.step + 1)
            if self._on_phase is not None:
                self._watch_backward(output)

    # What a graph does that the script replays itself is taken for a forward pass. Torch's own (of
    # make_graphed_callables, of torch.compile) are replayed inside of autograd's functions, and of a module.

    def replay_begins(self, optimizers: list[Optimizer] | None) -> None:
        if optimizers is None or optimizers:
            self._listener.captured_step(self.step + 1)
        self._forward_begins(None, ())

    def replay_ended(self, optimizers: list[Optimizer] | None) -> None:
        self._forward_ends(None, (), None)

    def _watch_backward(self, output: object) -> None:
        if (on_phase := self._on_phase) is not None:
            tensor = next(_tensors_with_gradient(output), None)
            if tensor is not None:
                tensor.register_hook(lambda gradient: on_phase(self.step + 1, "backward"))

    def _any_module_begins(self, module: nn.Module, inputs: object) -> None:
        if self._parts is None or module in self._parts:
            self._depth += 1
            if self._depth == 1 and self._outermost is None:
                self._forward_begins(module, inputs)
            elif self._depth == 1 and not self._is_watched(module) and torch.is_grad_enabled():
                assert self._on_phase is not None
                self._on_phase(self.step + 1, "forward")

    def _any_module_ends(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._parts is None or module in self._parts:
            self._depth -= 1
            if self._depth == 0 and self._outermost is None:
                self._forward_ends(module, inputs, output)
            elif self._depth == 0 and not self._is_watched(module) and torch.is_grad_enabled():
                self._watch_backward(output)

    def _is_watched(self, module: nn.Module) -> bool:
        """Return whether it has hooks of its own."""
        return self._outermost is not None and module in self._outermost

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if (captured_graphs.capturing and captured_graphs.is_now()) or (kwargs and is_for_state(kwargs)):
            return None
        outer = self._outer.get(id(optimizer), optimizer) if self._outer else optimizer
        self._entered[id(outer)] += 1
        if self._in_step:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._watched_closure(args[1]), *args[2:]), kwargs or {}
        if kwargs and callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._watched_closure(kwargs["closure"])}
        self._step_begins()
        return None

    def _step_begins(self) -> None:
        self._in_step = True
        if not self._in_minibatch:
            self._enter_minibatch()
        if self._explicit and self._turns:
            self._listener.steps_again()
        if self._explicit and self._has_model and self._forward_seen and self._asked_since_forward:
            self._listener.drawn_ahead()
        if not (self._has_model and self._forward_seen):
            # No model was given, or one whose forward nobody calls (but other methods, or parts): the last
            # moment that is known.
            self._listener.forward_ended(self.step + 1)
            self._watch_inside()
        self._listener.step_begun(self.step + 1)
        if self._on_phase is not None:
            self._on_phase(self.step + 1, "optimizer")

    def _watched_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after whose first call the step begins: until then it is forward and backward."""

        def watched() -> Any:
            if self._in_step:
                self._listener.closure_again(self.step + 1)
            result = closure()
            if not self._in_step:
                self._step_begins()
            return result

        return watched

    def _end(self, optimizer: Optimizer, args: object = (), kwargs: dict[str, Any] | None = None) -> None:
        if (captured_graphs.capturing and captured_graphs.is_now()) or (kwargs and is_for_state(kwargs)):
            return
        outer = self._outer.get(id(optimizer), optimizer) if self._outer else optimizer
        # Of two calls one may have been left with an exception, or be that of the base class, with own hooks.
        if self._entered[id(outer)] > 1 and is_in_step(outer, besides=optimizer):
            return
        self._entered[id(outer)] = 0
        if not self._in_step:
            self._step_begins()  # it was given a closure that it did not call
        if self._explicit:
            self._turns += 1
            if self._ends_at_boundary:
                self._listener.forward_ended(self.step + 1)  # this rank may not come to the boundary
            else:
                self._end_minibatch()
            return
        if id(outer) in self._stepped:
            if self._learns:
                self.unexpected = self.unexpected or outer
            else:
                self._listener.unequal_turns(self.step + 1)
                self._stepped.clear()
                self._end_minibatch()  # so that the iterations of the loop are counted
        self._stepped.add(id(outer))
        for one in self._optimizers:
            if (other := one()) is not None and id(other) not in self._stepped:
                return
        self._stepped.clear()
        self._end_minibatch()

    def _end_minibatch(self) -> None:
        self._in_step = self._in_minibatch = self._forward_seen = False
        self._listener.step_ended(self.step + 1)
        self.step += 1
        if self._on_phase is not None:
            self._on_phase(self.step, "between")

    def _begin_any(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if (captured_graphs.capturing and captured_graphs.is_now()) or (kwargs and is_for_state(kwargs)):
            return None
        if not self.watched:
            self._optimizers, self._first_step = [weakref.ref(optimizer)], self.step + 1
        if self._explicit:
            if all(one() is not optimizer for one in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))
            return self._begin(optimizer, args, kwargs)
        if not self._learns:
            return self._begin(optimizer, args, kwargs) if optimizer is self._optimizers[0]() else None
        if any(one() is optimizer for one in self._optimizers):
            if self.step == self._first_step and optimizer is self._optimizers[0]():
                self.is_learned = True
            if self.is_learned or self.step < self._first_step:
                return self._begin(optimizer, args, kwargs)
            self.unexpected = optimizer  # it makes several steps for one of the first
        elif self._in_step and any(is_in_step(one, besides=optimizer) for one in self.watched):
            pass  # such as the optimizer inside a ZeroRedundancyOptimizer
        elif not self.is_learned:
            self._optimizers.append(weakref.ref(optimizer))
        else:
            self.unexpected = optimizer
        return None

    def _end_any(self, optimizer: Optimizer, args: object, kwargs: dict[str, Any]) -> None:
        if (captured_graphs.capturing and captured_graphs.is_now()) or (kwargs and is_for_state(kwargs)):
            return
        if self._explicit:
            self._end(optimizer)
        elif not self._learns:
            if optimizer is self._optimizers[0]():
                self._end(optimizer)
        elif self._entered[id(optimizer)]:
            self._end(optimizer)

    def _wrap_scaler(self, scaler: Any) -> None:
        original = scaler.step

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = (self.step, self._turns, len(self._stepped))
            result = original(optimizer, *args, **kwargs)
            if optimizer in self.watched and before == (self.step, self._turns, len(self._stepped)):
                self._skipped(optimizer)
            return result

        scaler.step = AttachedMethod(step, scaler, "step")

    def _wrap_every_scaler(self) -> None:
        hooks, original = self, GradScaler.step

        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = (hooks.step, hooks._turns, len(hooks._stepped), hooks.watched)
            hooks.found_scaler = self
            result = original(self, optimizer, *args, **kwargs)
            if before == (hooks.step, hooks._turns, len(hooks._stepped), hooks.watched):
                hooks._skipped(optimizer)
            return result

        self._scaler_step = original
        GradScaler.step = step  # type: ignore[method-assign]

    def _skipped(self, optimizer: Optimizer) -> None:
        """A scaler has not let an optimizer make its step, so no hook has run."""
        if optimizer in self.watched:
            self._begin(optimizer)
            self._end(optimizer)
        elif self._learns or not self.watched:
            self._begin_any(optimizer, (), {})
            self._end_any(optimizer, (), {})


def is_in_step(optimizer: Optimizer, besides: Optimizer) -> bool:
    """Return whether this thread is in the optimizer's step, not counting the innermost of `besides`."""
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        # torch's wrapper around every class's step.
        found += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found > (optimizer is besides)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model; of one without a forward of its own (a ModuleList) its parts that have one."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        yield model
        return
    for part in model.children():
        yield from outermost(part)


def _parts_of(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (part for module in modules for child in module.children() for part in outermost(child))


def all_inside(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers inside of one, at any depth, but for torch's own, which call theirs themselves."""
    if type(optimizer).__module__.startswith("torch."):
        return
    for _, inner in inside(optimizer):
        yield inner
        yield from all_inside(inner)


def _tensors_with_gradient(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors_with_gradient(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors_with_gradient(value)
