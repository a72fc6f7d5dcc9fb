"""Values that a dataset or a sampler has, as they are kept: numbers, texts, tensors, and lists of such.

They are encoded fast and in little space, and put back into the memory of what is there.
"""

from typing import Any

import numpy
import torch
from torch import Tensor

NUMBER = 4  # bytes, of an index
PLAIN = (bool, int, float, str, type(None))
CONTAINERS = (list, tuple, dict, set, range)


def size_of(value: Any, most: int) -> int | None:
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
            if left < 0:
                return True
            parts = [*one, *one.values()] if isinstance(one, dict) else one
            return all(left < 0 or take(part) for part in parts)
        elif not isinstance(one, PLAIN):
            return False
        return True

    is_kept = take(value)
    if left < 0:
        return None
    return most - left if is_kept else -1


def shortened(value: Any) -> Any:
    """Return what is encoded fast, and in little space, in a value's place; a tensor of the host's."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, range):
        value = [*value]
    if isinstance(value, list):
        return _numbers_of(value) or [*map(shortened, value)]
    if isinstance(value, tuple):
        return tuple([*map(shortened, value)])
    return {key: shortened(one) for key, one in value.items()} if isinstance(value, dict) else value


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


def lengthened(value: Any) -> Any:
    """Return the value of which `shortened` was made, but for where its tensors lay."""
    if isinstance(value, list):
        return [*map(lengthened, value)]
    if isinstance(value, tuple):
        return tuple([*map(lengthened, value)])
    if isinstance(value, dict):
        if [*value] == ["*list"]:
            return value["*list"].tolist()
        if [*value] == ["*numpy"]:
            return [*value["*numpy"].numpy()]
        return {key: lengthened(one) for key, one in value.items()}
    return value


def put(here: Any, value: Any) -> Any:
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
            found.append(put(old, new.to(device)))
        else:
            found.append(put(old, new))
    return found
