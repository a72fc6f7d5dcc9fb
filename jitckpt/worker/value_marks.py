"""Marks of values of the script's: what is another once its loop has changed a value, in its place too."""

import argparse
import enum
import io
import itertools
import operator
import queue
import random
import threading
import weakref
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from jitckpt.bindings.frame_variables import own_variables
from jitckpt.data.kept_generator import GENERATORS
from jitckpt.state.plain_values import held, slots_of, written
from jitckpt.system import installed
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker import carried_names

MOST_VALUES = 2000  # that are looked at in one variable
MOST_BYTES = 1 << 26  # of an array, which takes some milliseconds
DEPTH = 3  # to which objects of the script's own classes are looked into
OTHERS_AFFAIR = (nn.Module, Optimizer, DataLoader, Dataset, Sampler)
CONTAINERS = (list, tuple, dict, deque, set)
OF_BYTES = (bytearray, array)
AROUND_CONTAINERS = (UserList, UserDict)
VALUES = (type(None), bool, int, float, complex, str, bytes, numpy.ndarray, numpy.generic, Tensor, enum.Enum)
ARRAYS = (numpy.ndarray, Tensor)
NAMESPACES = (argparse.Namespace, SimpleNamespace, threading.local)
NUMBERS = (bool, int, float, complex)
CONSTANTS = (type(None), *NUMBERS, str, bytes)
ITERATORS: tuple[Any, ...] = (
    GeneratorType,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    itertools.count,
    itertools.cycle,
)
# Objects of libraries that training scripts change, and what tells that they have.
OF_LIBRARIES: dict[type, Callable[[Any], object]] = {
    queue.Queue: lambda one: [*map(id, one.queue)],
    io.StringIO: lambda one: None if one.closed else (one.tell(), len(one.getvalue())),
    io.BytesIO: lambda one: None if one.closed else (one.tell(), one.getbuffer().nbytes),
    numpy.random.SeedSequence: operator.attrgetter("n_children_spawned"),
    torch.quasirandom.SobolEngine: operator.attrgetter("num_generated"),
}
WITH_CONTENT = (
    *(*CONTAINERS, *OF_BYTES, *AROUND_CONTAINERS, *ARRAYS, *OF_LIBRARIES),
    *(SynchronizedBase, ContextVar),
)
REFERENCES = (
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    partial,
    type,
)  # which of them it is, no save holds
# Which of them a variable has changes a training; what is in them is others' affair.
THINGS = (*OTHERS_AFFAIR, LRScheduler)
OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in each
_OPAQUE = "*opaque"
_LIBRARIES = installed.folders()


class _InPlace:
    """A mark of a tensor or an array that is another once it was written to; another object tells nothing."""

    def __init__(self, value: Any) -> None:
        self._value = weakref.ref(value)
        self._content: object = None
        if isinstance(value, Tensor):
            self._content = None if value.is_inference() else written(value)
        elif not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            self._content = xxhash.xxh3_64_digest(numpy.ascontiguousarray(value).view(numpy.uint8).data)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _InPlace) and self._value() is other._value() is not None
        return not same or self._content == other._content  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def advanced(iterator: Any) -> object:
    """Return what is another once an iterator has given its next value; a cycle does not tell."""
    if isinstance(iterator, itertools.cycle):
        return object()
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return frame and (
            frame.f_lasti,
            {name: rebound(value) for name, value in own_variables(frame).items()},
        )
    return repr(iterator) if isinstance(iterator, itertools.count) else operator.length_hint(iterator)


class Which:
    """A mark of an object of which only another one is another, whatever becomes of it."""

    def __init__(self, value: Any) -> None:
        method = isinstance(value, MethodType)  # made anew whenever it is asked for
        self._parts = [held(one) for one in ((value.__self__, value.__func__) if method else (value,))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Which) or len(self._parts) != len(other._parts):
            return False
        pairs = zip(map(_of_mark, self._parts), map(_of_mark, other._parts), strict=True)
        return all(one is another is not None for one, another in pairs)

    __hash__ = None  # type: ignore[assignment]


def _which(part: Any) -> object:
    """Return the mark of what an attribute refers to: functions are often made anew, and do the same."""
    return Which(part) if isinstance(part, THINGS) else reference(part)


def _of_mark(part: Any) -> Any:
    return part() if isinstance(part, weakref.ref) else part


def rebound(value: object) -> object:
    """Return what is another once a variable is set to something else."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    return (id(value), _InPlace(value)) if isinstance(value, ARRAYS) else id(value)


def reference(value: Any) -> object:
    """Return what is another once a function or class is another; where it is an object: its class.

    What a partial function is given is looked at as what it holds.
    """
    if isinstance(value, partial):
        return reference(value.func)
    if isinstance(value, MethodType):
        return type(value.__self__).__qualname__, reference(value.__func__)
    named: Any = value if isinstance(value, REFERENCES) else type(value)
    return named.__module__, named.__qualname__


def marks_inside(
    name: str,
    value: object,
    kept: set[object],
    attributes: frozenset[str] = frozenset(),
    *,
    notes: bool = False,
    draws: Callable[[Any], bool] = lambda iterator: True,
) -> dict[str, object]:
    """Return marks of what an object of the script's changes in its place, by names.

    attributes: those that the loop itself reads before it sets them. notes: other tensors in a container may
    be those of the last forward pass, which nobody reads in the next one. draws: whether an iterator draws
    from a loop of the job, and is not looked at.
    What has objects inside that are no values (events, files) is not looked at.
    """
    left = MOST_VALUES

    def marks_in(one: Any, depth: int) -> Iterator[tuple[str, object]]:
        kind: Any = type(one)
        carried = carried_by(one if isinstance(one, type) else kind)
        if isinstance(one, FunctionType):
            carried = carried_in(one.__code__)
        for key, part in attributes_of(one).items():
            if (id(one), key) in kept:
                continue
            if isinstance(one, nn.Module) and (key in OF_MODULES or isinstance(part, NUMBERS)):
                continue
            lasts = lasts_in(one, key in carried or key in attributes, part)
            if isinstance(part, ITERATORS):
                yield key, mark(part, depth)
            elif lasts and isinstance(part, ARRAYS):
                yield key, None if id(part) in kept else (id(part), _InPlace(part))
            elif lasts:
                yield key, _which(part) if isinstance(part, (*THINGS, *REFERENCES)) else mark(part, depth)
            elif isinstance(part, ARRAYS) and id(part) not in kept:
                yield key, _InPlace(part)

    def mark(one: Any, depth: int) -> object:
        nonlocal left
        left -= 1
        if left < 0 or depth < 0 or id(one) in kept:
            return None
        one = one.data if isinstance(one, AROUND_CONTAINERS) else one
        one = one.get(None) if isinstance(one, ContextVar) else one
        if isinstance(one, CONTAINERS):
            parts = [*one]
            if isinstance(one, dict):
                parts = [part for key, part in one.items() if (id(one), key) not in kept]
            marks = [mark(part, depth - 1) for part in parts[:MOST_VALUES]]
            told = [part for part in marks if part is not _OPAQUE]
            if len(told) == len(marks):
                return len(one), marks
            return told if told and isinstance(one, dict) else _OPAQUE  # settings, among which is a file
        if notes and isinstance(one, ARRAYS):
            return _InPlace(one)
        if is_own(one):
            return [(key, found) for key, found in marks_in(one, depth - 1) if found is not _OPAQUE]
        return _mark_of_one(one, draws)

    found: dict[str, object] = {}
    if isinstance(value, WITH_CONTENT):
        found[name] = mark(value, DEPTH)
    elif _has_attributes(value):
        found = {f"{name}.{key}": one for key, one in marks_in(value, DEPTH)}
    return {key: one for key, one in found.items() if one is not _OPAQUE}


def _of_library(one: Any) -> object:
    return next(tells(one) for kind, tells in OF_LIBRARIES.items() if isinstance(one, kind))


def children_of(generator: Any) -> dict[str, object]:
    """Return the mark of how many others were made of a generator: that is no part of its state."""
    if not isinstance(generator, numpy.random.Generator):
        return {}  # and not asked: a dict's class may look for its attributes among its keys
    made_of: Any = getattr(generator.bit_generator, "seed_seq", None)
    return {".spawn()": made_of.n_children_spawned} if hasattr(made_of, "n_children_spawned") else {}


def _mark_of_one(one: Any, draws: Callable[[Any], bool]) -> object:
    """Return the mark of what has nothing inside."""
    if isinstance(one, (*GENERATORS, *OF_BYTES, SynchronizedBase)):
        return state_of(one)
    if isinstance(one, ITERATORS) and not draws(one):
        return advanced(one)
    if isinstance(one, tuple(OF_LIBRARIES)):
        return _of_library(one)
    if isinstance(one, (*THINGS, *REFERENCES)):
        return Which(one)
    return rebound(one) if isinstance(one, VALUES) else _OPAQUE


def _has_attributes(value: object) -> bool:
    """Whether attributes of it may be the script's."""
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith(_LIBRARIES)
    if isinstance(value, ModuleType):
        return installed.is_scripts_module(value)
    own = is_scripts_class(value) if isinstance(value, type) else is_own(value)
    return own or isinstance(value, nn.Module | Sampler | Dataset)


def attributes_of(value: Any) -> dict[str, Any]:
    found = {**dict_of(value), **dict(slots_of(value))}
    if isinstance(value, type | FunctionType | ModuleType):
        return {name: one for name, one in found.items() if not name.startswith("__")}
    return found


@cache
def carried_by(kind: type) -> frozenset[str]:
    """Return the attributes that a class's own functions carry on, as `carried_in` says."""
    carried: set[str] = set()
    for one in kind.__mro__ if is_scripts_class(kind) else ():
        for function in vars(one).values() if is_scripts_class(one) else ():
            if isinstance(function, FunctionType):
                carried |= carried_in(function.__code__)
    return frozenset(carried)


@cache
def carried_in(code: CodeType) -> frozenset[str]:
    """Return the attributes that code reads before it sets them, and those that it sets now and then alone.

    Such as the best result by now, which another function reads.
    """
    read: set[str] = set()
    written: set[str] = set()
    for one in instructions_of(code):
        if one.opname == "LOAD_ATTR" and one.argval not in written:
            read.add(one.argval)
        elif one.opname == "STORE_ATTR":
            written.add(one.argval)
    return frozenset(read & written) | carried_names.attributes_set_now_and_then(code)


def lasts_in(owner: object, is_carried: bool, part: object) -> bool:
    """Whether an attribute of this owner that changes is more than a note. is_carried: code carries it on.

    What a sampler of the script's own changes in a pass is made again by the pass; a dataset's generators are
    kept, and a dict of its is a cache as a rule.
    """
    if isinstance(part, SynchronizedBase):
        return True
    if isinstance(owner, Dataset):
        of_tensors = isinstance(part, tuple) and any(isinstance(one, ARRAYS) for one in part)
        is_number = type(part) is int or (type(part) is float and is_carried)
        return isinstance(part, list | deque) or is_number or of_tensors
    if isinstance(owner, Sampler):
        kind: Any = type(owner)
        return isinstance(part, CONTAINERS) and not is_scripts_class(kind)
    return is_carried or _lasts(part)


def _lasts(value: object) -> bool:
    """Whether an attribute that changes is more than a note of the last iteration's result."""
    return (type(value) is int or isinstance(value, (*CONTAINERS, *GENERATORS)) or is_own(value)) and not (
        isinstance(value, OTHERS_AFFAIR)
    )


def is_own(value: object) -> bool:
    kind: Any = type(value)
    others = (*OTHERS_AFFAIR, type, enum.Enum)  # a member of an enum is a value
    return (is_scripts_class(kind) or kind in NAMESPACES) and not isinstance(value, others)


def dict_of(value: object) -> Mapping[str, Any]:
    """Return an object's attributes, or nothing if its own code for them fails."""
    with suppress(Exception):
        return getattr(value, "__dict__", None) or {}
    return {}


def state_of(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, OF_BYTES):
        return len(generator), xxhash.xxh3_64_digest(memoryview(generator))
    if isinstance(generator, SynchronizedBase):  # of multiprocessing, which a loader's workers see, too
        return bytes(generator.get_obj())
    state = (
        generator.bit_generator.state
        if isinstance(generator, numpy.random.Generator)
        else generator.get_state()
    )
    return repr(state)
