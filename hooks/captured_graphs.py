"""CUDA graphs: what is captured does not happen then, but each time that the graph is replayed.

Hooks that are called during a capture have to be silent (`is_now`). In a replay nobody calls them: who
listens is told of each, and whether an optimizer makes a step in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.cuda import CUDAGraph
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from jitckpt.hooks.attached import Attached
from jitckpt.hooks.untraced import untraced


class GraphListener(Protocol):
    """What is told, by the thread that replays."""

    def replay_begins(self, optimizers: list[Optimizer] | None) -> None:
        """A graph is about to be replayed, in which these make a step. None: its capture was not seen."""

    def replay_ended(self, optimizers: list[Optimizer] | None) -> None:
        """It is enqueued."""


capturing: list[CUDAGraph] = []  # empty in nearly all calls of a hook: then `is_now` need not be asked
_steps_in: WeakKeyDictionary[CUDAGraph, WeakSet[Optimizer]] = WeakKeyDictionary()  # if its capture was seen
_listeners: WeakSet[GraphListener] = WeakSet()


class _Seen:
    replays = 0
    is_watching = False


_seen = _Seen()


def is_now() -> bool:
    """Return whether what this thread puts on its stream becomes a part of a graph."""
    return bool(capturing) and torch.cuda.is_current_stream_capturing()


def replays() -> int:
    """Return how often graphs were replayed: what they write torch does not count."""
    return _seen.replays


def makes_steps() -> bool:
    """Return whether there is a graph in which an optimizer makes a step."""
    return any(_steps_in.values())


def listen(listener: GraphListener) -> None:
    """Tell it of replays for as long as it is alive."""
    watch()
    _listeners.add(listener)


def ignore(listener: GraphListener) -> None:
    _listeners.discard(listener)


def watch() -> None:
    """See all captures from here on."""
    if _seen.is_watching:
        return
    _seen.is_watching = True
    register_optimizer_step_post_hook(untraced(_optimizer_stepped))
    _watch_captures()
    _watch_replays()
    _watch_graphed_callables()


def _optimizer_stepped(optimizer: Optimizer, *_: object) -> None:
    if capturing and is_now():
        for graph in capturing:
            _steps_in[graph].add(optimizer)


def _watch_captures() -> None:
    begin, end = CUDAGraph.capture_begin, CUDAGraph.capture_end

    def capture_begin(self: CUDAGraph, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        _steps_in[self] = WeakSet()
        capturing.append(self)

    def capture_end(self: CUDAGraph) -> None:
        if self in capturing:
            capturing.remove(self)
        end(self)

    CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign]
    CUDAGraph.capture_end = capture_end  # type: ignore[method-assign]


def _watch_replays() -> None:
    original = CUDAGraph.replay

    def replay(self: CUDAGraph) -> None:
        _seen.replays += 1
        optimizers = None if self not in _steps_in else [*_steps_in[self]]
        for listener in tuple(_listeners):
            listener.replay_begins(optimizers)
        original(self)
        for listener in tuple(_listeners):
            listener.replay_ended(optimizers)

    CUDAGraph.replay = replay  # type: ignore[method-assign]


def _watch_graphed_callables() -> None:
    """Torch refuses modules that have hooks before it makes graphs of them, and allows hooks afterwards."""
    original = torch.cuda.make_graphed_callables

    def make_graphed_callables(callables: Any, *arguments: Any, **options: Any) -> Any:
        with without_own_hooks(callables if isinstance(callables, tuple) else (callables,)):
            return original(callables, *arguments, **options)

    torch.cuda.make_graphed_callables = torch.cuda.graphs.make_graphed_callables = make_graphed_callables


@contextmanager
def without_own_hooks(callables: tuple[Any, ...]) -> Iterator[None]:
    modules = [one for one in callables if isinstance(one, nn.Module)]
    all_hooks: list[dict[int, Any]] = [
        hooks for one in modules for hooks in (one._forward_pre_hooks, one._forward_hooks)
    ]
    taken = [{key: hook for key, hook in hooks.items() if isinstance(hook, Attached)} for hooks in all_hooks]
    for hooks, own in zip(all_hooks, taken, strict=True):
        for key in own:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, own in zip(all_hooks, taken, strict=True):
            hooks.update(own)
