"""Which samples a pass has that the script chooses inside of its loop, by the model's losses, say.

A Subset, a sampler, a dataset of some tensors, a list: after a restart in the middle of the epoch the same
lines would make others. So what was made in the loop is kept with the pass, up to MOST_BYTES, and so are a
Subset and a TensorDataset from before it that have other samples now. What else is from before the loop every
start makes alike.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from jitckpt.data.generators import samplers
from jitckpt.encoding import packed, tree_codec
from jitckpt.errors import TreeError

MOST_BYTES = 1 << 19  # more would be copied in each step for too long
MOST_OBJECTS = 100  # datasets in a dataset
NUMBER = 4  # bytes, of an index
TOO_MUCH = (
    "{names}: made or changed inside of the loop, and only numbers, texts and tensors of up to {most} KiB "
    "are kept of such. If it follows from the training's values, and not from the epoch's number alone, a "
    "restart in the middle of the epoch would make another one. Choose by a Subset of fewer samples, or keep "
    "in `extra` what is chosen."
)
OTHERS = (
    "The script makes other datasets and samplers in its loop than before the failure ({now}, not {before}), "
    "so the rest of this pass may differ from an undisturbed one."
)
PLAIN = (bool, int, float, str, type(None))
CONTAINERS = (list, tuple, dict, set, range)
# Looked at by themselves, or what every start says anew.
NOT_CHOSEN = frozenset({"dataset", "datasets", "data_source"})
NOT_CHOSEN |= {"rank", "local_rank", "num_replicas", "world_size"}
# What begins a list that may be a dataset.
LISTED = (Tensor, numpy.ndarray, numpy.generic, list, tuple, dict, int, str)
COLLECTED = (Tensor, list, dict)  # a tuple of others is not known to the garbage collector


class _Known:
    """What was there as the loop began."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}  # by id(), as weak references
        self.marks: dict[int, list[object]] = {}  # of some of them, what tells of other samples
        self.lists: dict[int, int] = {}  # the lengths of lists that may be datasets


_known: _Known | None = None  # in this process


def watch() -> None:
    """What is made from now on is made in the loop that begins."""
    global _known  # noqa: PLW0603
    _known = known = _Known()
    objects = gc.get_objects()  # a million of them
    kinds = {list, tuple}.union(*map(_with_subclasses, (Dataset, Sampler, DataLoader)))
    # Not isinstance, which asks objects that warn when they are asked.
    kinds |= {one for one in objects if issubclass(type(one), type) and _makes_loaders(one)}
    for one in [one for one in objects if type(one) in kinds]:
        if type(one) in (list, tuple):
            if _may_be_dataset(one):
                known.lists[id(one)] = len(one)
            continue
        with suppress(TypeError):  # of a class with __slots__
            known.objects[id(one)] = weakref.ref(one)
            known.marks[id(one)] = _marks_of(one)


def is_made_in_loop(loader: object) -> bool:
    """Whether a DataLoader, a list or what has a state of its own was made since the loop has begun."""
    can_tell = isinstance(loader, DataLoader | list) or _makes_loaders(type(loader))
    return _known is not None and can_tell and _is_new(loader, _known)


def _makes_loaders(kind: type) -> bool:
    """Whether its instances may be loaders that go on by their own state."""
    names = {name for one in kind.__mro__ for name in ("state_dict", "__iter__") if name in vars(one)}
    return len(names) == len(("state_dict", "__iter__")) and not issubclass(kind, nn.Module)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def chosen(loader: Iterable[Any], warn: Callable[[str], None]) -> bytes:
    """Return what was chosen for a pass that begins, packed; nothing of what is no choice of the loop's."""
    if _known is None:
        return b""
    kept: list[Any] = []
    too_much: list[str] = []
    left = MOST_BYTES
    for one in _objects_of(loader):
        values: dict[str, Any] = {}
        for name, value in _chosen_of(one, _known):
            size, short = _size(value, left), None
            if size is not None and size >= 0:
                with suppress(TreeError):  # of what has a class of its own inside
                    candidate = _short(value)
                    tree_codec.encode(candidate, name)
                    short = candidate
            if size is None or (short is None and isinstance(value, list)) or type(one) is tuple:
                too_much.append(type(one).__qualname__ + f".{name}" * bool(name))
            elif short is not None:
                values[name], left = short, left - size
        kept.append([type(one).__qualname__, values])
    if too_much:
        warn(TOO_MUCH.format(names=", ".join(dict.fromkeys(too_much)), most=MOST_BYTES >> 10))
    if not any(values for _, values in kept):
        return b""
    return packed.pack(tree_codec.encode(kept, "chosen"))


def choose_again(loader: Iterable[Any], kept: bytes, warn: Callable[[str], None]) -> None:
    """Have a loader's datasets and samplers what `chosen` returned."""
    if not kept:
        return
    saved, here = packed.unpack(kept), [*_objects_of(loader)]
    before, now = [name for name, _ in saved], [type(one).__qualname__ for one in here]
    if before != now:
        warn(OTHERS.format(now=", ".join(now), before=", ".join(before)))
        return
    for one, (_, values) in zip(here, saved, strict=True):
        for name, value in values.items():
            if name:
                old = getattr(one, name, None)
                new = _put(old, _long(value))
                if new is not old:
                    setattr(one, name, new)
            else:
                one[:] = _put([*one], _long(value))
    for one in here:
        if isinstance(one, DistributedSampler):  # it has counted the others
            epoch = one.epoch
            DistributedSampler.__init__(
                one, one.dataset, one.num_replicas, one.rank, one.shuffle, one.seed, one.drop_last
            )
            one.epoch = epoch


def _objects_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the datasets of a loader, and those in them, and its samplers."""
    waiting: list[Any] = [loader.dataset] if isinstance(loader, DataLoader) else [loader]
    found: list[Any] = []
    while waiting and len(found) < MOST_OBJECTS:
        one = waiting.pop(0)
        is_listed = type(one) in (list, tuple)
        if any(one is other for other in found) or not (isinstance(one, Dataset) or is_listed):
            continue
        found.append(one)
        if isinstance(one, Dataset):
            waiting += _datasets_in(one)
    yield from found
    yield from samplers(loader) if isinstance(loader, DataLoader) else ()


def _datasets_in(one: Any) -> Iterator[Any]:
    """Yield the datasets that a dataset has in its attributes, and lists that it calls datasets."""
    for name, value in getattr(one, "__dict__", {}).items():
        if isinstance(value, Dataset) or (name in NOT_CHOSEN and type(value) is list):
            yield value
        if isinstance(value, list | tuple) and len(value) <= MOST_OBJECTS:
            yield from (part for part in value if isinstance(part, Dataset))


def _are_datasets(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Dataset) for one in value)


def _may_be_dataset(one: list[Any] | tuple[Any, ...]) -> bool:
    return len(one) > 1 and isinstance(one[0], LISTED if type(one) is list else COLLECTED)


def _is_new(one: Any, known: _Known) -> bool:
    if type(one) in (list, tuple):
        return _may_be_dataset(one) and known.lists.get(id(one)) != len(one)
    reference = known.objects.get(id(one))
    return reference is None or reference() is not one


def _chosen_of(one: Any, known: _Known) -> Iterator[tuple[str, Any]]:
    """Yield, by the names of attributes, what the loop has chosen of an object; "" is its content."""
    if not _is_new(one, known):
        before, now = known.marks.get(id(one), []), _marks_of(one)
        if before != now and isinstance(one, Subset):
            yield "indices", one.indices
        elif before != now and isinstance(one, TensorDataset):
            pairs = zip(one.tensors, [*before, *[None] * len(now)], now, strict=False)
            yield "tensors", [None if was == mark else tensor for tensor, was, mark in pairs]
    elif type(one) in (list, tuple):
        yield "", one
    elif isinstance(one, Subset):
        yield "indices", one.indices
    elif not isinstance(one, DistributedSampler):
        for name, value in getattr(one, "__dict__", {}).items():
            is_value = isinstance(value, (*PLAIN, *CONTAINERS, Tensor, numpy.ndarray))
            if is_value and name not in NOT_CHOSEN and not _are_datasets(value):
                yield name, value


def _marks_of(one: Any) -> list[object]:
    """Return what is another once a dataset has got other samples."""
    if isinstance(one, TensorDataset):
        return [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in one.tensors]
    if isinstance(one, Subset):
        indices: Any = one.indices
        few = len(indices) * NUMBER <= MOST_BYTES
        return [id(indices), len(indices), xxhash.xxh3_64_digest(_numbers(indices).data) if few else None]
    return []


def _numbers(indices: Any) -> Any:
    values = indices.cpu() if isinstance(indices, Tensor) else indices
    return numpy.ascontiguousarray(values)


def _size(value: Any, most: int) -> int | None:
    """Return how many bytes a value takes; None if more than that, -1 if it can't be kept."""
    left = most

    def take(one: Any) -> bool:
        nonlocal left
        if isinstance(one, Tensor | numpy.ndarray):
            left -= one.nbytes
            return isinstance(one, Tensor) or not one.dtype.hasobject
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, numpy.generic):
            left -= one.nbytes
            return one.dtype.kind in "biuf"
        elif isinstance(one, list | range) and len(one) and type(one[0]) in (int, float):
            left -= NUMBER * len(one) if type(one[0]) is int else 8 * len(one)
        elif isinstance(one, CONTAINERS):
            left -= 8 * len(one)
            parts = [*one, *one.values()] if isinstance(one, dict) else one
            return left < 0 or all(left < 0 or take(part) for part in parts)
        elif not isinstance(one, PLAIN):
            return False
        return True

    is_kept = take(value)
    if left < 0:
        return None
    return most - left if is_kept else -1


def _short(value: Any) -> Any:
    """Return what is encoded fast, and in little space, in a value's place; a tensor of the host's."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, range):
        value = [*value]
    if isinstance(value, list):
        return _numbers_of(value) or [*map(_short, value)]
    if isinstance(value, tuple):
        return tuple([*map(_short, value)])
    return {key: _short(one) for key, one in value.items()} if isinstance(value, dict) else value


def _numbers_of(values: list[Any]) -> dict[str, Tensor] | None:
    """Return numbers of one type, and what they were: Python's or numpy's."""
    if not values or not isinstance(values[0], int | float | numpy.generic):
        return None
    if len({*map(type, values)}) > 1:
        return None
    found = numpy.asarray(values)
    if isinstance(values[0], numpy.generic):
        return {"*numpy": torch.from_numpy(found)} if found.dtype.kind in "biuf" else None
    if found.dtype.kind == "i" and found.min() >= -(1 << 31) and found.max() < 1 << 31:
        found = found.astype(numpy.int32)
    return {"*list": torch.from_numpy(found)} if found.dtype.kind in "if" else None


def _long(value: Any) -> Any:
    """Return the value of which `_short` was made, but for where its tensors lay."""
    if isinstance(value, list):
        return [*map(_long, value)]
    if isinstance(value, tuple):
        return tuple([*map(_long, value)])
    if isinstance(value, dict):
        if [*value] == ["*list"]:
            return value["*list"].tolist()
        if [*value] == ["*numpy"]:
            return [*value["*numpy"].numpy()]
        return {key: _long(one) for key, one in value.items()}
    return value


def _put(here: Any, value: Any) -> Any:
    """Return a value in the memory of what is there, if it fits, as the script may know that."""
    if isinstance(here, Tensor) and isinstance(value, Tensor):
        value = value.to(here.device)
        if here.shape == value.shape and here.dtype == value.dtype and not here.is_inference():
            with torch.no_grad():
                value = here.copy_(value)
    elif isinstance(here, numpy.ndarray) and isinstance(value, numpy.ndarray):
        if here.shape == value.shape and here.dtype == value.dtype and here.flags.writeable:
            here[...] = value
            value = here
    elif isinstance(here, list) and isinstance(value, list):
        here[:] = _put_each(here, value)
        value = here
    elif isinstance(here, tuple) and isinstance(value, list | tuple):
        value = tuple(_put_each(here, value))
    return value


def _put_each(here: Any, value: Any) -> list[Any]:
    """The same of each; None stands for what is left as it is."""
    device = next((one.device for one in here if isinstance(one, Tensor)), None)
    there = [*here, *[None] * len(value)]
    found = []
    for old, new in zip(there, value, strict=False):
        if new is None and isinstance(old, Tensor):
            found.append(old)
        elif isinstance(new, Tensor) and device is not None:
            found.append(_put(old, new.to(device)))
        else:
            found.append(_put(old, new))
    return found
