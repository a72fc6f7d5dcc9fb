"""What the script's loop has made, and what it has changed of what was there before.

All that was there as the loop began is known: what is not has been made in it. Of datasets it is known, too,
what they had, so that a change is seen which the script makes between two passes. What a dataset changes of
itself as it is read (a cache, a count) is no such change.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from jitckpt.data.generators import samplers
from jitckpt.data.kept_values import CONTAINERS, NUMBER, PLAIN, size_of
from jitckpt.system import installed, living

MOST_OBJECTS = 100  # datasets in a dataset
MOST_READ = 1 << 24  # bytes of an array, all of which takes two milliseconds
MOST_PARTS = 1 << 16  # bytes of a list or a dict
# Looked at by themselves, or what every start says anew.
NOT_CHOSEN = frozenset({"dataset", "datasets", "data_source"})
NOT_CHOSEN |= {"rank", "local_rank", "num_replicas", "world_size"}
# What begins a list that may be a dataset.
LISTED = (Tensor, numpy.ndarray, numpy.generic, list, tuple, dict, int, str)
COLLECTED = (Tensor, list, dict)  # a tuple of others is not known to the garbage collector
FINGERPRINT = "_fingerprint"
NEVER_THEMSELVES = (Subset, TensorDataset)  # change nothing of themselves as they are read
_LIBRARIES = installed.folders()


class _ListMark:
    """Tells a list or a tuple from one that has got its id since: there are no weak references to such."""

    def __init__(self, length: int, first: object) -> None:
        self._length = length
        self._first: object = first
        if isinstance(first, Tensor | numpy.ndarray):
            self._first = weakref.ref(first)
        elif isinstance(first, list | tuple | dict):
            self._first = id(first)

    def is_of(self, one: list[Any] | tuple[Any, ...]) -> bool:
        if self._length != len(one):
            return False
        first = self._first() if isinstance(self._first, weakref.ref) else self._first
        return first is one[0] or (isinstance(one[0], list | tuple | dict) and first == id(one[0]))


class _Known:
    """What was there as the loop began."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}  # by id(), as weak references
        self.marks: dict[int, dict[str, object]] = {}  # of datasets, what tells of other samples
        self.changed: dict[int, set[str]] = {}  # of these, the attributes that the script has changed
        self.lists: dict[int, _ListMark] = {}  # of lists that may be datasets


_known: _Known | None = None  # in this process


def watch() -> None:
    """What is made from now on is made in the loop that begins."""
    global _known  # noqa: PLW0603
    _known = known = _Known()
    kinds = {list, Tensor} | living.with_subclasses(Dataset, Sampler, DataLoader)
    # Not isinstance, which asks objects that warn when they are asked.
    kinds |= {one for one in living.with_subclasses(object) if _can_be_known(one)}
    for number, length, first in living.tuples_with(living.with_subclasses(*COLLECTED)):
        known.lists[number] = _ListMark(length, first)
    for one in living.objects_of(kinds):
        if type(one) is list:
            if _may_be_dataset(one):
                known.lists[id(one)] = _ListMark(len(one), one[0])
            continue
        with suppress(TypeError):  # of a class with __slots__
            known.objects[id(one)] = weakref.ref(one)
            if is_dataset(one):
                known.marks[id(one)] = _marks_of(one)


def is_watching() -> bool:
    """Whether a loop has begun."""
    return _known is not None


def is_loader_made_in_loop(loader: object) -> bool:
    """Whether a loader was made since the loop has begun, and none is in it that was not."""
    can_tell = isinstance(loader, DataLoader | list) or _can_be_known(type(loader))
    if _known is None or not (can_tell and is_made_in_loop(loader)):
        return False
    inside = (getattr(loader, "__dict__", None) or {}).values()
    return all(is_made_in_loop(one) for one in inside if isinstance(one, DataLoader))


def is_made_in_loop(one: object) -> bool:
    """Whether a list or an object of a class that is watched is not known from before the loop."""
    if _known is None:
        return False
    if isinstance(one, list | tuple) and type(one) in (list, tuple):
        mark = _known.lists.get(id(one))
        return _may_be_dataset(one) and not (mark is not None and mark.is_of(one))
    reference = _known.objects.get(id(one))
    return reference is None or reference() is not one


def is_dataset(one: object) -> bool:
    """Whether it is one of torch's datasets, or of the script's own that has samples by their numbers."""
    kind = type(one)
    return isinstance(one, Dataset) or (
        hasattr(kind, "__getitem__")
        and _can_be_known(kind)
        and (_is_own(kind) or fingerprint_of(one) is not None)
    )


def fingerprint_of(one: object) -> str | None:
    """Return what tells the rows of a dataset of Hugging Face's."""
    found = getattr(one, "__dict__", {}).get(FINGERPRINT)
    return found if type(found) is str else None


def _is_own(kind: Any) -> bool:
    """Whether a class is the script's."""
    for one in kind.__mro__:
        for function in vars(one).values():
            if isinstance(function, FunctionType):
                return not function.__code__.co_filename.startswith((*_LIBRARIES, "<frozen"))
    return False


def objects_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the datasets of a loader, and those in them, and its samplers."""
    waiting: list[Any] = [loader.dataset] if isinstance(loader, DataLoader) else [loader]
    found: list[Any] = []
    while waiting and len(found) < MOST_OBJECTS:
        one = waiting.pop(0)
        is_listed = type(one) in (list, tuple, Tensor)
        if any(one is other for other in found) or not (is_dataset(one) or is_listed):
            continue
        if one is loader and not (isinstance(one, Dataset) or is_listed):
            continue  # a loader of the script's own
        found.append(one)
        if not is_listed:
            waiting += _datasets_in(one)
    yield from found
    yield from samplers(loader) if isinstance(loader, DataLoader | Sampler) else ()


def changed(one: Any) -> frozenset[str]:
    """Return the attributes of a dataset from before the loop that the script has changed in it."""
    if _known is None:
        return frozenset()
    before = _known.marks.get(id(one), {})
    now = _marks_of(one) if before else {}
    names = _known.changed.setdefault(id(one), set()) if before else set()
    names |= {name for name, mark in now.items() if before.get(name) != mark}
    return frozenset(names)


def is_changed(one: Any, names: Iterable[str]) -> None:
    """It is known of a dataset that its script had changed these before a failure."""
    if _known is not None and id(one) in _known.marks:
        _known.changed.setdefault(id(one), set()).update(names)


def pass_ended(loader: Iterable[Any]) -> None:
    """What datasets have changed of themselves as they were read is no change of the script's."""
    if _known is None:
        return
    for one in objects_of(loader):
        if id(one) in _known.marks and not (isinstance(one, NEVER_THEMSELVES) or is_made_in_loop(one)):
            _known.marks[id(one)] = _marks_of(one)


def attributes_of(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes by which an object may choose samples, by names."""
    for name, value in getattr(one, "__dict__", {}).items():
        is_value = isinstance(value, (*PLAIN, *CONTAINERS, Tensor, numpy.ndarray))
        if is_value and name not in NOT_CHOSEN and not _are_datasets(value):
            yield name, value


def _can_be_known(kind: type) -> bool:
    """Whether its instances may be loaders or datasets of another's making, and can be told apart."""
    if issubclass(kind, nn.Module) or not kind.__weakrefoffset__:
        return False
    names = {"__iter__", "__getitem__"}
    return any(isinstance(vars(one).get(name), FunctionType) for one in kind.__mro__ for name in names)


def _datasets_in(one: Any) -> Iterator[Any]:
    """Yield the datasets that a dataset has in its attributes, and lists that it calls datasets."""
    for name, value in getattr(one, "__dict__", {}).items():
        if is_dataset(value) or (name in NOT_CHOSEN and type(value) is list):
            yield value
        if isinstance(value, list | tuple) and len(value) <= MOST_OBJECTS:
            yield from (part for part in value if isinstance(part, Dataset))


def _are_datasets(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Dataset) for one in value)


def _may_be_dataset(one: list[Any] | tuple[Any, ...]) -> bool:
    return len(one) > 1 and isinstance(one[0], LISTED if type(one) is list else COLLECTED)


def _marks_of(one: Any) -> dict[str, object]:
    """Return what is another once a dataset has got other samples, by attributes."""
    if isinstance(one, TensorDataset):
        return {str(number): _mark(tensor) for number, tensor in enumerate(one.tensors)}
    if isinstance(one, Subset):
        indices: Any = one.indices
        few = len(indices) * NUMBER <= MOST_READ
        return {
            "indices": (len(indices), xxhash.xxh3_64_digest(numbers_of(indices).data) if few else id(indices))
        }
    return {name: _mark(value) for name, value in attributes_of(one)}


def _mark(value: Any) -> object:
    if isinstance(value, Tensor):
        return _mark_of_tensor(value)
    if isinstance(value, numpy.ndarray):
        if value.dtype.hasobject or value.nbytes > MOST_READ:
            return id(value)
        return xxhash.xxh3_64_digest(numpy.ascontiguousarray(value).view(numpy.uint8).data)
    if isinstance(value, CONTAINERS):
        size = size_of(value, MOST_PARTS)
        with suppress(Exception):  # of a class of tensors, which may do anything
            return (id(value), len(value)) if size is None or size < 0 else repr(value)
        return id(value), len(value)
    return value


def _mark_of_tensor(tensor: Tensor) -> object:
    is_plain = type(tensor) in (Tensor, nn.Parameter)  # else it need not have memory of its own
    if not (is_plain and tensor.is_cpu and tensor.layout is torch.strided) or tensor.nbytes > MOST_READ:
        return id(tensor), None if tensor.is_inference() else tensor._version
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_digest(words.numpy().data)


def numbers_of(indices: Any) -> Any:
    """Return indices as an array."""
    values = indices.cpu() if isinstance(indices, Tensor) else indices
    return numpy.ascontiguousarray(values)
