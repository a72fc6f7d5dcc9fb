"""Marks of what modules, datasets and samplers keep in attributes."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from jitckpt.data.generators import samplers
from jitckpt.state import module_attributes
from jitckpt.state.kept_variables import place_inside
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker.frames import place_of
from jitckpt.worker.reached_values import attributes_in, attributes_set_in
from jitckpt.worker.value_marks import (
    ARRAYS,
    CONTAINERS,
    NUMBERS,
    REFERENCES,
    attributes_of,
    carried_by,
    dict_of,
    is_own,
    lasts_in,
    marks_inside,
    rebound,
    reference,
    state_of,
)

MOST_PARTS = 16  # of a module that was not given, such as one that computes losses


def in_modules(models: Iterable[nn.Module], kept: set[object]) -> dict[str, object]:
    """Return marks of what modules of the script's own classes keep in attributes, but for numbers.

    Of these those that the training changes are named by who looks after the model.
    """
    marks: dict[str, list[object]] = {}
    for module in {id(one): one for model in models for one in model.modules()}.values():
        kind: Any = type(module)
        if not is_scripts_class(kind) or kind.get_extra_state is not nn.Module.get_extra_state:
            continue
        for name, mark in marks_inside(kind.__qualname__, module, kept, notes=True).items():
            marks.setdefault(name, []).append(mark)
    return {**marks}


def not_given(
    scope: Mapping[str, object], read: Collection[str], given: Iterable[object], frame: FrameType
) -> list[tuple[str, str, nn.Module]]:
    """Return the modules that are no part of the models given, with names and the places of what they hold.

    Those in variables, and in attributes of objects of the script's.
    """
    known = {id(part) for one in given if isinstance(one, nn.Module) for part in one.modules()}
    ways = [(name, place_inside(place_of(frame, name), name), scope[name]) for name in read if name in scope]
    for name, place, value in [*ways]:
        if is_own(value):
            inside = attributes_of(value).items()
            ways += [(f"{name}.{key}", f"{place}.{key}", part) for key, part in inside]
    found = []
    for name, place, value in ways:
        if isinstance(value, nn.Module) and id(value) not in known:
            known.add(id(value))
            parts = [*islice(value.named_modules(), MOST_PARTS)]
            found += [
                (f"{name}.{path}".rstrip("."), f"{place}.{path}".rstrip("."), part)
                for path, part in parts
                if part is value or id(part) not in known
            ]
    return found


def in_other_modules(
    modules: Iterable[tuple[str, str, nn.Module]], kept: set[object]
) -> tuple[dict[str, object], dict[str, tuple[str, str]]]:
    """Return marks of what these modules keep in attributes, and the places of that."""
    marks: dict[str, object] = {}
    places: dict[str, tuple[str, str]] = {}
    for name, place, module in modules:
        may_keep = module_attributes.may_keep(module)
        kind: Any = type(module)
        is_scripts, carried = is_scripts_class(kind), carried_by(kind)
        found = marks_inside(name, module, kept, notes=True) if is_scripts else {}
        for key, value in vars(module).items():
            called = f"{name}.{key}"
            if key == module_attributes.MODE or not may_keep(key, value):
                continue
            if type(value) in NUMBERS:
                places[called] = place, key
                if not is_scripts or lasts_in(module, key in carried, value):
                    marks[called] = rebound(value)
            elif called in found:
                places[called] = place, key
        marks |= found
    return marks, places


def in_loaders(
    loaders: Iterable[DataLoader[Any]],
    kept: set[object],
    attributes: frozenset[str],
    code: CodeType,
    *,
    tells_nothing: bool,
) -> dict[str, object]:
    """Return marks of what datasets and samplers keep in attributes; several may be of one class.

    code: the loop's.
    """
    marks: dict[str, list[object]] = {}
    objects = [one for loader in loaders for one in (loader.dataset, *samplers(loader))]
    # A sampler of the script's own need not be of torch's class: what it changes in a pass is made again.
    own_samplers = {id(one) for loader in loaders for one in samplers(loader) if is_own(one)}
    for one in {id(one): one for one in objects}.values():
        kind = type(one).__qualname__
        is_placed = isinstance(one, IterableDataset) and not tells_nothing  # its place is kept
        kinds = CONTAINERS if id(one) in own_samplers else (int,) if is_placed else ()
        kept_there = {f"{kind}.{name}" for name, part in dict_of(one).items() if type(part) in kinds}
        found = {
            name: mark
            for name, mark in marks_inside(kind, one, kept, attributes, notes=True).items()
            if name not in kept_there
        }
        if id(one) in own_samplers or isinstance(one, Sampler):
            found |= _used_of(one, code, kept) | _set_of(one, code, attributes, kept)
        for name, mark in found.items():
            marks.setdefault(name, []).append(mark)
    return {**marks}


def _used_of(sampler: Any, code: CodeType, kept: set[object]) -> dict[str, object]:
    """Return marks of what a sampler has in containers that a loop's code names, or a method that it calls.

    The loop may change them while the sampler draws.
    """
    used = attributes_in(code)
    methods = (getattr(type(sampler), name, None) for name in used)
    used = used.union(*(attributes_in(one.__code__) for one in methods if isinstance(one, FunctionType)))
    kind, found = type(sampler).__qualname__, dict_of(sampler)
    return {
        f"{kind}.{name}": mark
        for name in used & found.keys()
        if type(found[name]) in CONTAINERS and (id(sampler), name) not in kept
        for mark in marks_inside(name, found[name], set()).values()
    }


def _set_of(sampler: Any, code: CodeType, carried: frozenset[str], kept: set[object]) -> dict[str, object]:
    """Return marks of a sampler's numbers, texts and arrays that a loop sets, or a method that it calls.

    carried: attributes that the loop and the functions that it calls carry on. What the sampler's own code
    sets as it draws, a pass makes again.
    """
    kind: Any = type(sampler)
    called = [getattr(kind, name, None) for name in attributes_in(code)]
    methods = [one.__code__ for one in called if isinstance(one, FunctionType)]
    drawing = getattr(kind, "__iter__", None)
    as_drawn = attributes_set_in(drawing.__code__) if isinstance(drawing, FunctionType) else frozenset()
    by_others = frozenset().union(carried, *map(attributes_set_in, methods)) - as_drawn
    found = dict_of(sampler)
    return {
        f"{kind.__qualname__}.{name}": rebound(found[name])
        for name in (by_others | attributes_set_in(code)) & found.keys()
        if isinstance(found[name], (*NUMBERS, str, *ARRAYS)) and (id(sampler), name) not in kept
    }


class _References(dict[int, object]):
    """Of one attribute, by ids of the objects that have it: another one tells nothing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _References) and all(self[one] == other[one] for one in self.keys() & other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def references_in(
    models: Iterable[nn.Module], loaders: Iterable[DataLoader[Any]], attributes: frozenset[str]
) -> dict[str, object]:
    """Return marks of what models, loaders and datasets refer to: functions, modules, and objects' classes.

    attributes: those that the loop, or a function that it calls, sets now and then. What it sets each time,
    a restart does.
    """
    marks: dict[str, _References] = {}
    owners: list[object] = [part for model in models for part in model.modules()]
    owners += [one for loader in loaders for one in (loader, loader.dataset)]
    for owner in {id(one): one for one in owners}.values():
        found = dict_of(owner)
        parts = {**found, **owner._modules} if isinstance(owner, nn.Module) else found
        for key in attributes & parts.keys():
            if isinstance(parts[key], (*REFERENCES, nn.Module)) or is_own(parts[key]):
                found_here = marks.setdefault(f"{type(owner).__qualname__}.{key}", _References())
                found_here[id(owner)] = reference(parts[key])
    return {**marks}


def shared_in(loaders: Iterable[DataLoader[Any]]) -> dict[str, object]:
    """Return marks of the numbers in datasets that all of a loader's processes share: nobody keeps these."""
    return {
        f"{type(loader.dataset).__qualname__}.{name}": state_of(part)
        for loader in loaders
        for name, part in getattr(loader.dataset, "__dict__", {}).items()
        if isinstance(part, SynchronizedBase)
    }
