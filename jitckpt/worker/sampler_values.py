"""What the script sets in samplers of its own, at any time: numbers, texts, and containers of such.

A pass begins with what its sampler has, and keeps that. What is set while no pass draws from the sampler, or
another loader's does, no pass keeps. What a sampler sets itself as it draws is made again by the pass.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dis import Instruction
from functools import cache
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Sampler

from jitckpt.data.generators import PLAIN
from jitckpt.state.kept_variables import place_inside
from jitckpt.system.bytecode import instructions
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker.frames import place_of
from jitckpt.worker.value_marks import ARRAYS, CONTAINERS, attributes_of, is_own
from jitckpt.worker.variable_keeper import VariableKeeper

DRAWS = ("__iter__", "__next__", "__len__")
CHANGE = {"STORE_SUBSCR", "DELETE_SUBSCR"}
# What changes a container or an array in its place: methods that its fixed twin has not, and functions.
TWINS: Any = ((list, tuple), (deque, tuple), (set, frozenset), (dict, MappingProxyType))
METHODS = {name for kind, fixed in TWINS for name in {*dir(kind)} - {*dir(fixed)} if name.isalpha()}
CHANGES = METHODS | {"fill", "heapify", "heappop", "heappush", "put", "resize", "shuffle"}
ANY = "*"
OF_LOADERS = ("batch_sampler", "sampler")


class SetValue(NamedTuple):
    """place, key: where it lies. owner: the sampler's id."""

    name: str
    place: str
    key: str
    owner: int


def follow(
    keeper: VariableKeeper | None, frame: FrameType, scope: Mapping[str, object], kept: set[object]
) -> set[tuple[int, str]]:
    """Keep it; return which attributes are kept, by owners' ids. The arguments: as in `set_in`."""
    if keeper is None:
        return set()
    found = set_in(frame, scope, kept)
    keeper.note({one.name: (one.place, one.key) for one in found})
    keeper.follow(frame, [one.name for one in found])
    return {(one.owner, one.key) for one in found if keeper.keeps(frame, one.name)}


def set_in(frame: FrameType, scope: Mapping[str, object], kept: set[object]) -> list[SetValue]:
    """Return what it is: of samplers, and of loaders, in variables and in the script's objects.

    scope: the frame's variables. kept: ids of objects that others look after, or such with an attribute.
    """
    found: list[SetValue] = []
    known: set[int] = set()
    for name, place, sampler in _samplers(frame, scope):
        if id(sampler) in known or id(sampler) in kept:
            continue
        known.add(id(sampler))
        kind: Any = type(sampler)
        drawn = _drawn_by(kind)
        for key, part in attributes_of(sampler).items():
            is_set = type(part) in PLAIN or (ANY not in drawn and isinstance(part, (*CONTAINERS, *ARRAYS)))
            if is_set and key not in drawn and (id(sampler), key) not in kept:
                found.append(SetValue(f"{name}.{key}", place, key, id(sampler)))
    return found


def _samplers(frame: FrameType, scope: Mapping[str, object]) -> Iterator[tuple[str, str, Any]]:
    """Yield the script's own with a name and a place: those of variables before those in objects."""
    of_objects: list[tuple[str, str, object]] = []
    for name, value in scope.items():
        place = place_inside(place_of(frame, name), name)
        yield from _in_one(name, place, value)
        if is_own(value):
            inside = attributes_of(value).items()
            of_objects += [(f"{name}.{key}", f"{place}.{key}", part) for key, part in inside]
    for one in of_objects:
        yield from _in_one(*one)


def _in_one(name: str, place: str, value: Any) -> Iterable[tuple[str, str, Any]]:
    ways = [(name, place, value)]
    if isinstance(value, DataLoader):
        ways = [(f"{name}.{one}", f"{place}.{one}", getattr(value, one)) for one in OF_LOADERS]
    return [way for way in ways if isinstance(way[2], Sampler) and is_scripts_class(type(way[2]))]


@cache
def _drawn_by(kind: type) -> frozenset[str]:
    """Return the attributes that a sampler's class sets as it draws, or in what it calls for that.

    ANY is among them if it may change containers.
    """
    functions = {
        name: function
        for one in reversed(kind.__mro__)
        for name, function in vars(one).items()
        if isinstance(function, FunctionType) and is_scripts_class(one)
    }
    waiting, called, found = [*DRAWS], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in functions and name not in called:
            called.add(name)
            for code in _codes(functions[name].__code__):
                for one in instructions(code):
                    if one.opname == "STORE_ATTR":
                        found.add(one.argval)
                    elif one.opname in CHANGE or one.argval in CHANGES or _is_in_place(one):
                        found.add(ANY)
                    elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                        waiting.append(one.argval)
    return frozenset(found)


def _is_in_place(one: Instruction) -> bool:
    """Whether it is an operation such as +=, or a method of tensors that ends in _, as those do."""
    is_method = one.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(one.argval, str)
    of_tensors = is_method and one.argval.endswith("_") and not one.argval.endswith("__")
    return of_tensors or (one.opname == "BINARY_OP" and one.argrepr.endswith("="))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
