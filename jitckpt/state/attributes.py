"""Attributes of an optimizer that change while it trains and are in no state_dict: counters, slow weights.

Which change is learned, not declared: what an attribute is that never changes, the script builds again; and
much of that (a rank, a process group) is another on every rank, so it must not be taken from a replica.
"""

import itertools
import random
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.encoding import tree_codec
from jitckpt.errors import TreeError
from jitckpt.state import parallel

# What torch's own class keeps, beside all that begins with _ and names hooks.
OF_TORCH = frozenset({"state", "param_groups", "defaults", "step"})
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
DEPTH = 3  # to which objects of the script's own classes are looked into
OPAQUE = (nn.Module, Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)


class ChangedAttributes:
    """Of one object, since this was made of it."""

    def __init__(self, owner: object, optimizer: Optimizer, wrappers: Iterable[object] = ()) -> None:
        """optimizer: the one that is saved: what `owner` has of its parameters and state is no more news.

        wrappers: what is around it, each of which is looked at by itself.
        """
        self._owner, self._optimizer = owner, optimizer
        self._wrappers = {*map(id, wrappers)}
        self._first: dict[str, Any] | None = None
        self._changed: dict[str, None] = {}
        self._unsavable: set[str] = set()
        self.problems: list[str] = []  # clauses that name what changes and can't be saved
        if self._is_torchs():
            return
        self._first = self._marks()

    @property
    def looks(self) -> bool:
        """Whether it looks at all; torch's own optimizers keep nothing in attributes."""
        return self._first is not None

    def changed(self) -> dict[str, Any]:
        """Return what has changed by now, by name; what can't be saved is put into `problems` once."""
        if self._first is None:
            return {}
        marks = self._marks()
        for name, mark in marks.items():
            if name not in self._changed and name not in self._unsavable and mark != self._first.get(name):
                self._try(name)
        return {name: vars(self._owner)[name] for name in self._changed if name in marks}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put back what `changed` returned; tensors keep their memory, as others may know them."""
        for name, value in saved.items():
            self._changed[name] = None
            here = vars(self._owner).get(name)
            if not _put(here, value):
                setattr(self._owner, name, value)

    def _is_torchs(self) -> bool:
        return type(self._owner).__module__.startswith("torch.") or not hasattr(self._owner, "__dict__")

    def _try(self, name: str) -> None:
        """Keep the attribute from now on, or name it."""
        value, owner = vars(self._owner)[name], type(self._owner).__qualname__
        try:
            tree_codec.encode(value, name)
        except TreeError:
            self._unsavable.add(name)
            self.problems.append(f"the attribute {name!r} of {owner}, a {type(value).__qualname__}, changes")
        else:
            self._changed[name] = None

    def _marks(self) -> dict[str, Any]:
        known = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        known |= self._wrappers | {
            id(self._optimizer),
            id(self._optimizer.param_groups),
            id(self._optimizer.state),
        }
        return {
            name: _mark(value, known, DEPTH)
            for name, value in vars(self._owner).items()
            if name not in OF_TORCH
            and not (name.startswith("_") and "hook" in name)
            and name[:8] != "_jitckpt"
        }


def _mark(value: Any, known: set[int], depth: int) -> Any:
    """Return what changes when the value does; of what can't be looked into, which object it is."""
    kind = type(value)
    mark: Any = id(value)
    if kind in PLAIN:
        mark = value
    elif id(value) in known or isinstance(value, OPAQUE):
        pass
    elif isinstance(value, Tensor):
        part = parallel.local(value)
        mark = id(value), value._version, tuple(part.shape), part.dtype
    elif isinstance(value, numpy.ndarray):
        mark = id(value) if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, Mapping):
        mark = [(_mark(key, known, depth), _mark(one, known, depth)) for key, one in [*value.items()]]
    elif isinstance(value, list | tuple | deque):
        mark = [_mark(one, known, depth) for one in [*value]]
    elif isinstance(value, set | frozenset):
        mark = sorted(map(repr, value))
    elif (state := _state_of(value)) is not None:
        mark = id(value), state
    elif depth and not kind.__module__.startswith(("torch.", "builtins")):
        kept = [*getattr(value, "__dict__", {}).items(), *slots_of(value)]
        mark = id(value), [(name, _mark(one, known, depth - 1)) for name, one in kept]
    return kind, mark


def _state_of(value: Any) -> Any:
    """Return what tells the state of a generator of random numbers or a counter; None of others."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return repr(value) if isinstance(value, itertools.count) else None


def slots_of(value: Any) -> list[tuple[str, Any]]:
    """Return what an object keeps in __slots__."""
    names = [name for kind in type(value).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _listed(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def _put(here: Any, value: Any) -> bool:
    """Put a value into the memory of what is there; False if something is not alike."""
    if isinstance(here, Tensor) and isinstance(value, Tensor):
        alike = here.shape == value.shape and here.dtype == value.dtype
        if alike and value.device.type != "meta":  # else it is a description alone
            with torch.no_grad():
                here.copy_(value)
        return alike
    if isinstance(here, list) and isinstance(value, list) and len(here) == len(value):
        for index, (old, new) in enumerate(zip(here, value, strict=True)):
            if not _put(old, new):
                here[index] = new
        return True
    if isinstance(here, dict) and isinstance(value, dict):
        for key in _without(here, value):
            del here[key]
        for key, new in value.items():
            if not _put(here.get(key), new):
                here[key] = new
        return True
    return False


def _without(here: Mapping[Any, Any], value: Mapping[Any, Any]) -> Iterable[Any]:
    return [key for key in here if key not in value]
