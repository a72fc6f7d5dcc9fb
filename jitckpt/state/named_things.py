"""What a start builds and no save can hold: optimizers, modules, loaders, functions. A save says which it is.

Each goes by a name of the script's that it has as a loop begins, which is so in a restart, too; a function or
a class of a module by its place there.
"""

import asyncio
import inspect
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

import numpy
from torch import Tensor, nn

from jitckpt.data.kept_generator import GENERATORS
from jitckpt.state import plain_values

Name = tuple[Any, ...]

DEPTH = 3
MOST_PARTS = 1000  # of one value
MOST_OF_CONTAINER = 100
IN_MODULE, OF_METHOD, BY_NAME = "module", "method", "name"
# What is plain, or goes on by itself, or belongs to the process.
NO_THINGS = (
    *(*plain_values.SCALARS, *plain_values.SEQUENCES, *plain_values.DICTS, *plain_values.OF_PROCESS),
    *(Tensor, numpy.ndarray, numpy.generic, GeneratorType, ModuleType, weakref.ref),
    *(BaseException, TracebackType, FrameType, CodeType, itertools.count, itertools.cycle, asyncio.Future),
)
OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in each


class NamedThings:
    """Of the outermost loop in which the training is, as that has begun."""

    def __init__(self) -> None:
        self._by_name: dict[Name, Callable[[], Any]] = {}
        self._names: dict[int, list[Name]] = {}  # by ids, the best one first

    def note(self, scopes: Mapping[str, Mapping[str, Any]], set_again: Mapping[str, Collection[str]]) -> None:
        """Learn what there is as a loop begins, by places and variables.

        set_again: names of a place's variables that its code sets more than once: others are better names.
        """
        self._by_name, self._names = {}, {}
        for place, scope in scopes.items():
            for name, value in scope.items():
                if not name.startswith("__"):
                    known: set[int] = set()
                    for path, one in itertools.islice(_inside((name,), value, DEPTH, known), MOST_PARTS):
                        self._note((place, *path), one)
        worse = {(place, name) for place, names in set_again.items() for name in names}
        for names in self._names.values():
            names.sort(key=lambda name: (name[:2] in worse, len(name), repr(name)))

    def _note(self, name: Name, value: object) -> None:
        try:
            self._by_name[name] = weakref.ref(value)
        except TypeError:  # some can't be referred to so
            if not isinstance(value, GENERATORS):
                return
            self._by_name[name] = partial(_itself, value)
        self._names.setdefault(id(value), []).append(name)

    def name_of(self, value: Any) -> Name | None:
        """Return a name under which a restart has the same; None if nothing tells it."""
        if not is_thing(value):
            return None
        if isinstance(value, MethodType):
            owner, called = self.name_of(value.__self__), getattr(value.__func__, "__name__", "")
            is_found = owner is not None and getattr(value.__self__, called, None) == value
            return (OF_METHOD, called, *owner) if owner is not None and is_found else None
        if isinstance(value, FunctionType | BuiltinFunctionType | type) and (name := _in_module(value)):
            return name
        for name in self._names.get(id(value), ()):
            if self._by_name[name]() is value:
                return (BY_NAME, *name)
        return None

    def thing_of(self, how: str, *name: Any) -> Any:
        """Return what has this name. Raises LookupError."""
        if how == OF_METHOD:
            called, *owner = name
            found = getattr(self.thing_of(*owner), called, None)
        elif how == IN_MODULE:
            found = _of_module(*name)
        else:
            reference = self._by_name.get(name)
            found = None if reference is None else reference()
        if found is None:
            raise LookupError(name)
        return found


def _itself(value: Any) -> Any:
    return value


def is_thing(value: Any) -> bool:
    """Whether it may be told by a name alone."""
    return not (isinstance(value, NO_THINGS) or hasattr(type(value), "__next__"))


class NoThings(NamedThings):
    """Nothing goes by its name."""

    def name_of(self, value: Any) -> Name | None:
        return None


NOTHING_NAMED = NoThings()


def _inside(path: Name, value: Any, depth: int, known: set[int]) -> Iterator[tuple[Name, object]]:
    """Yield what lies in a value, with the ways there, and the value itself."""
    if isinstance(value, Tensor) or id(value) in known:
        return
    known.add(id(value))
    if is_thing(value):
        yield path, value
    for key, part in _parts(value) if depth else ():
        yield from _inside((*path, key), part, depth - 1, known)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) in (list, tuple, deque):
        return itertools.islice(enumerate(value), MOST_OF_CONTAINER)
    if type(value) in plain_values.DICTS:
        named = ((key, one) for key, one in value.items() if type(key) in (str, int))
        return itertools.islice(named, MOST_OF_CONTAINER)
    if isinstance(value, nn.Module):
        own = [(name, one) for name, one in vars(value).items() if name not in OF_MODULES]
        return [*own, *value._modules.items()]
    if plain_values.is_own(value):
        with suppress(plain_values.NotPlain):
            return plain_values.attributes_of(value)
    return ()


def _in_module(value: Any) -> Name | None:
    """Return where a module has a function or a class; None if it is found nowhere."""
    module = getattr(value, "__module__", None) or ""
    paths = (value.__qualname__, value.__name__)  # of torch's own functions the first is of a hidden class
    return next(((IN_MODULE, module, one) for one in paths if _of_module(module, one) is value), None)


def _of_module(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
    return found
