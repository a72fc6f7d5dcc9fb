"""What torch says of many tensors: how often it has written to them, where they lie, which require gradients.

In each step that is asked of all parameters and all state, so it is read in C++ (native/seen), by a part
that is built with one torch and knows no other. With any other torch, and of tensors that are not plain, it
is what torch's own interface says, one tensor after the other.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from jitckpt import _seen

try:
    from jitckpt import _tensors
except ImportError:  # it was built without torch, or this torch lacks what it was built with
    is_known_torch = False
else:
    is_known_torch = _tensors.torch_version == torch.__version__.split("+")[0]

NO_GRADIENT, DENSE, SPARSE = range(3)
Tensors = tuple[Tensor, ...]
LOOK_BYTES = 16  # a tensor: how often it was written to, and where it lies


class Writes(Protocol):
    """Which of some tensors were written to, or have come to lie elsewhere, since they were looked at."""

    def look(self) -> None:
        """Look at all of them."""

    def changed(self) -> list[int]:
        """Return the numbers of those that are not as they were looked at last."""


class OneByOne:
    """Writes as torch's interface tells."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [*tensors]
        self._versions = b""

    def look(self) -> None:
        self._versions = _seen.versions(self._tensors)

    def changed(self) -> list[int]:
        now, before = _seen.versions(self._tensors), self._versions
        places = range(0, len(now), LOOK_BYTES)
        return [
            number
            for number, place in enumerate(places)
            if now[place : place + LOOK_BYTES] != before[place : place + LOOK_BYTES]
        ]


def writes(tensors: Iterable[Tensor]) -> Writes:
    """Return what tells of writes to these tensors once they were looked at."""
    return _tensors.Writes(tuple(tensors), _seen.versions) if is_known_torch else OneByOne(tensors)


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """Return where each tensor lies, 64 bits each."""
    if is_known_torch:
        return _tensors.addresses(tuple(tensors), Tensor.data_ptr)
    return struct.pack(f"{len(tensors)}Q", *map(Tensor.data_ptr, tensors))


def numbers(tensors: Tensors) -> bytes:
    """Return the bytes of tensors of one number each, on the host, one behind the other."""
    return _tensors.numbers(tensors, _seen.numbers) if is_known_torch else _seen.numbers([*tensors])


def counter_of(generator: torch.Generator) -> Callable[[], bytes] | None:
    """Return what returns a GPU's generator's seed and how far it has come, if that can be read at once."""
    if not is_known_torch or _tensors.drawn(generator) is None:
        return None
    return cast(Callable[[], bytes], partial(_tensors.drawn, generator))


def required_one_by_one(tensors: Tensors) -> bytes:
    """Return whether each tensor requires gradients, a byte each."""
    return bytes([tensor.requires_grad for tensor in tensors])


def there_one_by_one(tensors: Tensors) -> bytes:
    """Return whether each tensor has NO_GRADIENT, one that is SPARSE or another, a byte each."""
    gradients = [tensor.grad for tensor in tensors]
    return bytes([NO_GRADIENT if one is None else SPARSE if one.is_sparse else DENSE for one in gradients])


def fetch_none(tensors: Tensors) -> None:
    """Have the caches hold what is asked of these tensors next: all at once, as each is far away."""


# In C++ with no function of Python in between, which would cost as much.
gradients_required: Callable[[Tensors], bytes] = required_one_by_one
gradients_there: Callable[[Tensors], bytes] = there_one_by_one
fetch: Callable[[Tensors], None] = fetch_none
if is_known_torch:
    gradients_required, gradients_there = _tensors.gradients_required, _tensors.gradients_there
    fetch = _tensors.fetch
