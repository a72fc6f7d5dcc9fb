"""What a dataset carries on: generators of random numbers of its own, what it changes, where a stream is.

An IterableDataset may go on in each epoch where it has left off in the one before, by a number among its
attributes. Which these are its code tells: its methods set them, and not only __init__, as they do a rank.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from jitckpt.data.changed_as_read import ChangedAsRead
from jitckpt.data.generators import PLAIN
from jitckpt.data.kept_generator import GENERATORS, KeptGenerator, put_state, state_of
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import packed, tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.installed import is_scripts_class

DEPTH = 4  # to which objects in a dataset's attributes are looked into: transforms, datasets inside
MOST_OBJECTS = 1000
OPAQUE = (str, bytes, int, float, type(None), type)
# What is no reader of a stream's, or begins and goes on by itself.
NO_READERS = (IterableDataset, nn.Module, ModuleType, FunctionType, Iterator)
LIBRARIES = frozenset({"torch", "numpy", "builtins"})


class DatasetGenerators:
    """Takes and puts back their states, in this process."""

    def __init__(self, dataset: object, collate: object = None, *, with_places: bool = False) -> None:
        """collate: what makes batches of its samples. with_places: of streams, too, where they are."""
        objects = [*_objects_in(dataset)]
        known = {id(one): one for one in (*objects, *_objects_in(_held_by(collate)))}
        self._found = [one for one in known.values() if isinstance(one, GENERATORS)]
        is_read_by_number = not isinstance(dataset, IterableDataset)
        used = {id(one): one for one in (*self._found, *_beside(objects))}.values()
        kept = [KeptGenerator(one, f"dataset.{number}") for number, one in enumerate(used)]
        self.changed = ChangedAsRead(objects if is_read_by_number else (), kept, dataset)
        streams = [one for one in objects if isinstance(one, IterableDataset)] if with_places else []
        self._places = [(vars(one), names) for one in streams if (names := places_of(type(one)))]

    def __bool__(self) -> bool:
        return bool(self._found or self._places or self.changed)

    def capture(self) -> Encoded:
        states = [state_of(one) for one in self._found]
        if self.changed:
            own, changed = tree_codec.encode(states, "dataset"), self.changed.capture()
            tree = {"generators": own.tree, "places": [], "changed": changed.tree}
            return Encoded(tree, own.tensors | changed.tensors)
        if not self._places:
            return tree_codec.encode(states, "dataset")
        places = [
            {name: kept[name] for name in sorted(names) if type(kept.get(name)) in PLAIN}
            for kept, names in self._places
        ]
        return tree_codec.encode({"generators": states, "places": places}, "dataset")

    def restore(self, saved: Any) -> None:
        """Put back what `capture` returned, decoded."""
        if isinstance(saved, dict) and "generators" not in saved:
            return  # of a worker, as the loader had before
        if isinstance(saved, dict):
            self.changed.restore(saved.get("changed", ()))
            for (kept, _), place in zip(self._places, saved["places"], strict=True):
                kept.update(place)
            saved = saved["generators"]
        for one, state in zip(self._found, saved, strict=False):  # versions before had none of the collate's
            put_state(one, state)


class WorkerGenerators:
    """In a loader's worker: of its process, and of its own copy of the dataset, with what that changes."""

    def __init__(self, collate: object = None) -> None:
        """collate: the loader's own."""
        worker = get_worker_info()
        self._of_process = RandomState(None)
        self._of_dataset = DatasetGenerators(None if worker is None else worker.dataset, collate)

    def has_read(self, index: Any) -> list[str]:
        """A batch was read. index: of its last sample. Returns the names of what is changed and not kept."""
        self._of_dataset.changed.ended(index)
        return self._of_dataset.changed.lost()

    def capture(self) -> Encoded:
        """Return the states; where the dataset has none, the same object while no generator is used."""
        of_process = self._of_process.capture()
        if not self._of_dataset:
            return of_process
        own = self._of_dataset.capture()
        tree = {"process": of_process.tree, "dataset": own.tree}
        return Encoded(tree, of_process.tensors | own.tensors)

    def restore(self, states: bytes) -> None:
        """Put back what `capture` returned, packed."""
        saved = packed.unpack(states)
        if "dataset" in saved:
            self._of_dataset.restore(saved["dataset"])
        self._of_process.restore(saved.get("process", saved))


def lost_places(dataset: object, *, in_workers: bool) -> dict[str, object]:
    """Return what streams know their place by and can't be put back, each with what tells its place.

    That is all in workers, iterators, and what lies in objects that a stream has in its attributes.
    """
    objects = [*_objects_in(dataset)]
    streams = [one for one in objects if isinstance(one, IterableDataset)]
    found: dict[str, object] = {}
    kind: Any
    for one in streams:
        kind, kept = type(one), vars(one)
        iterators = {name for name, value in kept.items() if isinstance(value, Iterator)}
        names = places_of(kind) if in_workers else iterators
        found |= {f"{kind.__qualname__}.{name}": kept.get(name) for name in sorted(names)}
    called = _names_in_iter(*map(type, streams))
    for one in objects if streams else ():
        kind = type(one)
        if isinstance(one, NO_READERS) or kind.__module__.split(".")[0] in LIBRARIES:
            continue
        for name, value in sorted((getattr(one, "__dict__", None) or {}).items()):
            if isinstance(value, Iterator):
                found[f"{kind.__qualname__}.{name}"] = value
            elif type(value) in PLAIN and name in places_of(kind) - _set_afresh(kind, called):
                found[f"{kind.__qualname__}.{name}"] = _At(value)
    return found


class _At(NamedTuple):
    """A place that is told by a value."""

    value: object


def have_gone_on(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Return, of two passes' lost_places in this process, what the second one goes on with."""
    return [
        name
        for name, one in now.items()
        if name in before and (before[name] != one if isinstance(one, _At) else before[name] is one)
    ]


@cache
def _names_in_iter(*kinds: type) -> frozenset[str]:
    """Return the names of what streams' own __iter__ uses, attributes and methods of whatever object."""
    codes = [getattr(getattr(kind, "__iter__", None), "__code__", None) for kind in kinds]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


@cache
def _set_afresh(kind: type, called: frozenset[str]) -> frozenset[str]:
    """Return the attributes that are set anew by what is called as a pass begins."""
    methods = [getattr(kind, name, None) for name in called]
    return frozenset().union(
        *[_set_in(one.__code__, first=True) for one in methods if isinstance(one, FunctionType)]
    )


@cache
def places_of(kind: type) -> frozenset[str]:
    """Return the attributes by which streams of a class may know where they are in their data."""
    every, afresh = set[str](), set[str]()
    for one in kind.__mro__:
        for name, method in vars(one).items() if not one.__module__.startswith("torch.") else ():
            if isinstance(method, FunctionType) and name != "__init__":
                every |= _set_in(method.__code__, first=False)
                afresh |= _set_in(method.__code__, first=True) if name == "__iter__" else set()
    return frozenset(every - afresh)


def _set_in(code: CodeType, *, first: bool) -> set[str]:
    """Return the attributes that a function sets; first: those that it sets before it reads them."""
    read, found = set[str](), set[str]()
    for one in instructions_of(code):
        if one.opname == "STORE_ATTR" and not (first and one.argval in read):
            found.add(one.argval)
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(one.argval)
    return found


def _beside(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield generators that are global where these objects' classes are, of which they may draw."""
    for name in {type(one).__module__ for one in objects if is_scripts_class(type(one))}:
        values = [*getattr(sys.modules.get(name), "__dict__", {}).values()]
        yield from (value for value in values if isinstance(value, GENERATORS))


def _held_by(collate: object) -> object:
    """Return what a function may draw from: what it closes over, defaults, its module's generators."""
    if isinstance(collate, partial):
        return [_held_by(collate.func), *collate.args, *collate.keywords.values()]
    if isinstance(collate, MethodType):
        return [_held_by(collate.__func__), collate.__self__]
    if not isinstance(collate, FunctionType):
        return collate
    cells = [cell.cell_contents for cell in collate.__closure__ or () if _is_filled(cell)]
    used = [collate.__globals__.get(name) for name in collate.__code__.co_names]
    defaults = [*(collate.__defaults__ or ()), *(collate.__kwdefaults__ or {}).values()]
    return [*cells, *defaults, *(one for one in used if isinstance(one, GENERATORS))]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # nothing is there yet
        return False


def _objects_in(dataset: object) -> Iterator[Any]:
    """Yield a dataset and what is in its attributes, each once, in an order that a restart finds again."""
    waiting = [(dataset, DEPTH)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        one, depth = waiting.pop(0)
        if id(one) in seen or isinstance(one, OPAQUE):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, GENERATORS):
            continue
        if depth and isinstance(one, list | tuple | dict):
            parts = one.values() if isinstance(one, dict) else one
            waiting += [(part, depth - 1) for part in parts] if len(one) < MOST_OBJECTS else []
        elif depth and isinstance(getattr(one, "__dict__", None), dict):
            waiting += [(part, depth - 1) for part in vars(one).values()]
