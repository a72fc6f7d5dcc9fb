"""Plain values: marks by which their changes are told, copies, and putting these back where they came from.

Plain are numbers, texts, tensors, arrays, containers of such, and objects of the script's own classes, of
which the plain attributes count: an object is told as a dict of them, and they are put into the one that is
there.
"""

import enum
import sys
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from jitckpt import _seen
from jitckpt.state.attributes import slots_of
from jitckpt.system import installed

MOST_VALUES = 1000  # in one value
MOST_BYTES = 100_000  # the same; all that a rank knows alone has to fit into some hundred kB
DEPTH = 8
SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
SEQUENCES = frozenset({list, tuple, deque, set, frozenset})
DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
CHANGEABLE = (SEQUENCES - {tuple, frozenset}) | DICTS  # containers
OTHERS_AFFAIR = (nn.Module, Optimizer, DataLoader, Dataset, Sampler, type)
BUILT_IN = (list, tuple, dict, set, frozenset, deque, str, bytes, int, float)  # subclasses of these
# The one key of what stands for an object, for an enum's member, or for a list of numbers.
OBJECT, MEMBER, NUMBERS = "*object", "*member", "*numbers"
LEAST_NUMBERS = 16  # in a list that a tensor stands for, as that is copied and written faster

Tensors = dict[int, tuple["_Written", Tensor]]  # copies, by the ids of what they were made of


class NotPlain(Exception):
    """It is no plain value."""


class TooMuch(Exception):
    """It is plain, and larger than what is kept."""


class _Written:
    """Of a tensor: equal while it is the same one and torch has not written to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version
        # What is written through `data`, or by numpy, torch counts nowhere; on the host it can be seen.
        self._words = _words_of(tensor) if tensor.is_cpu else b""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written):
            return False
        tensor = self._tensor()
        is_same = tensor is not None and tensor is other._tensor()
        return is_same and (self._version, self._words) == (other._version, other._words)

    __hash__ = None  # type: ignore[assignment]


def is_constant(value: object) -> bool:
    """Whether it is plain, and nothing else as long as it is the same object."""
    return type(value) in SCALARS or (type(value) is tuple and all(map(is_constant, value)))


def mark(value: Any, visited: set[int]) -> Any:
    """Return what is another once the value is. visited: ids of objects that are told already; it grows.

    Raises NotPlain or TooMuch; what was neither at first and has grown since `copy` finds too much.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in (list, dict, tuple) and (plain := _plain_copy(value)) is not None:
        return plain
    is_new_object = is_own(value) and id(value) not in visited and hasattr(value, "__dict__")
    if is_new_object and (plain := _plain_copy(value.__dict__)) is not None:
        visited.add(id(value))
        return {OBJECT: [kind.__qualname__, plain | dict(slots_of(value))]}
    return bounded_mark(value, visited)


def bounded_mark(value: object, visited: set[int]) -> Any:
    """Return the same, of what may be as large as it will."""
    return _Walk(visited, _Written, _digest).of(value)


def are_same_marks(mark: Any, known: Any) -> bool:
    """Return whether two marks tell the same, bit for bit: 0, 0.0, -0.0 and False are equal, too."""
    return bool(mark == known) and _are_alike(mark, known)


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two values that are equal have parts of the same types, signs of zero, and order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            [*one] == [*other]
            and _are_alike([*one], [*other])
            and _are_alike([*one.values()], [*other.values()])
        )
    if isinstance(one, list | tuple | deque):
        kinds = [*map(type, one)]
        if kinds != [*map(type, other)]:
            return False
        if SCALARS.issuperset(kinds):  # most are such, and long
            return [repr(part) for part in one if not part] == [repr(part) for part in other if not part]
        return all(map(_are_alike, one, other))
    return bool(one) or isinstance(one, set | frozenset) or repr(one) == repr(other)


def copy(value: object, visited: Collection[int], known: Tensors) -> tuple[Any, Tensors]:
    """Return a copy that tree_codec can encode, and the copies of tensors in it.

    visited: as of `mark`, before that. known: the copies of the last time. Raises NotPlain or TooMuch.
    """
    tensors: Tensors = {}

    def copied(tensor: Tensor) -> Tensor:
        written = _Written(tensor)
        before = known.get(id(tensor))
        if before is None or before[0] != written:
            before = written, tensor.detach().clone()
        tensors[id(tensor)] = before
        return before[1]

    return _Walk({*visited}, copied, numpy.copy, packs=True).of(value), tensors


def objects_in(value: object) -> set[tuple[Any, ...]]:
    """Return where a value has objects that can't be made anew; of what is not plain, nothing."""
    if is_constant(value):
        return set()
    try:
        return cannot_be_made(_Walk(set(), lambda _: None, lambda _: None, packs=True).of(value))
    except (NotPlain, TooMuch):
        return set()


def cannot_be_made(copied: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Return where a copy has an object that only goes into one of its class that is there by then."""
    if isinstance(copied, dict) and [*copied] in ([OBJECT], [MEMBER]):
        ((what, (kind, told, *module)),) = copied.items()
        found = set() if module else {(*path, kind)}
        return found | (cannot_be_made(told, path) if what == OBJECT else set())
    if isinstance(copied, dict):
        parts: Any = copied.items()
    else:
        parts = enumerate(copied) if isinstance(copied, list | tuple | deque) else ()
    return {one for key, part in parts for one in cannot_be_made(part, (*path, key))}


def is_whole(value: object) -> bool:
    """Return whether a copy has all that is in the value, also in objects of the script's own classes."""
    try:
        _Walk(set(), lambda tensor: tensor, lambda array: array, skips=False).of(value)
    except (NotPlain, TooMuch):
        return False
    return True


def size_of(copied: Any) -> int:
    """Return how many bytes the tensors and arrays in a copy have."""
    if isinstance(copied, Tensor | numpy.ndarray):
        return copied.nbytes
    parts = copied.values() if isinstance(copied, dict) else copied
    return sum(map(size_of, parts)) if isinstance(copied, dict | list | tuple | deque) else 0


def put(here: Any, value: Any, *, in_place: bool) -> Any:
    """Return a copy's value, for the place of what is there.

    in_place: in the memory of that, if it fits, as others may know it; what is inside is new in any case, but
    for objects. Raises LookupError if it is an object's and no such object is there.
    """
    kind = type(value)
    if kind is dict and [*value] == [NUMBERS]:
        return _put_list(here, value[NUMBERS].tolist(), in_place)
    if kind is dict and [*value] in ([OBJECT], [MEMBER]):
        ((what, told),) = value.items()
        return (_put_object if what == OBJECT else _put_member)(here, told)
    return _put_plain(here, value, in_place)


def _put_plain(here: Any, value: Any, in_place: bool) -> Any:
    kind = type(value)
    if kind is numpy.ndarray:
        return _put_array(here, value) if in_place else value
    if kind in DICTS:
        return _put_dict(here, value, in_place)
    if kind in (list, tuple, deque):
        return _put_list(here, value, in_place)
    if kind is set and in_place:
        return _put_set(here, value)
    return _put_tensor(here, value, in_place) if isinstance(value, Tensor) else value


class _Walk:
    """Goes through one value, up to what is too much."""

    def __init__(
        self,
        visited: set[int],
        of_tensor: Callable[[Tensor], Any],
        of_array: Callable[[Any], Any],
        *,
        skips: bool = True,
        packs: bool = False,
    ) -> None:
        """skips: leave out what is not plain in objects. packs: have a tensor stand for a list of numbers."""
        self._skips, self._packs = skips, packs
        self._visited, self._of_tensor, self._of_array = visited, of_tensor, of_array
        self._values, self._bytes, self._depth = MOST_VALUES, MOST_BYTES, DEPTH
        self._in_container = False
        self._left_out = 0  # attributes that are not plain

    def of(self, value: Any) -> Any:
        """Return what stands for the value."""
        kind = type(value)
        if kind in SCALARS:
            if kind is str or kind is bytes:
                self._take(0, len(value))
            return value
        if kind is Tensor:
            return self._tensor(value)
        if kind is numpy.ndarray:
            if value.dtype.hasobject or value.dtype.fields:
                raise NotPlain
            self._take(1, value.nbytes)
            return self._of_array(value)
        if isinstance(value, numpy.generic):
            if value.dtype.fields or value.dtype.hasobject or value.dtype.subdtype:
                raise NotPlain
            return value
        # One in a container would come back as a plain dict, without what makes its values.
        if self._depth == 0 or (kind is defaultdict and self._in_container):
            raise NotPlain
        self._depth -= 1
        was_in_container, self._in_container = self._in_container, kind in DICTS or kind in SEQUENCES
        try:
            return self._of_many(kind, value)
        finally:
            self._depth += 1
            self._in_container = was_in_container

    def _of_many(self, kind: type, value: Any) -> Any:
        if kind in DICTS:
            self._take(len(value), 0)
            told = {self._key(key): self.of(one) for key, one in [*value.items()]}
            return told if kind is defaultdict else kind(told)
        if kind in SEQUENCES:
            self._take(len(value), 0)
            if self._packs and kind is list and (numbers := _numbers(value)) is not None:
                return {NUMBERS: numbers}
            parts = map(self._key if kind in (set, frozenset) else self.of, [*value])
            return deque(parts, value.maxlen) if kind is deque else kind(parts)
        if isinstance(value, enum.Enum):
            return {MEMBER: [kind.__qualname__, value.name, *self._module_of(kind)]}
        if not is_own(value):
            raise NotPlain
        left_out, told = self._left_out, self._attributes(value)
        is_all = left_out == self._left_out
        return {OBJECT: [kind.__qualname__, told, *(self._module_of(kind) if is_all else ())]}

    def _module_of(self, kind: type) -> list[str]:
        """Return, for a copy, where a restart finds the class to make an object of it; or nothing."""
        found = _class_called(kind.__module__, kind.__qualname__) if self._packs else None
        return [kind.__module__] if found is kind else []

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return what stands for an object's plain attributes."""
        if id(value) in self._visited:
            raise NotPlain  # another name of what is told already
        self._visited.add(id(value))
        found = {}
        for name, one in [*getattr(value, "__dict__", {}).items(), *slots_of(value)]:
            self._take(1, 0)
            try:
                found[name] = self.of(one)
            except NotPlain:
                if not self._skips:
                    raise
                self._left_out += 1
        return found

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise NotPlain
        is_trained = tensor.is_leaf and tensor.requires_grad
        if tensor.is_nested or tensor.is_inference() or is_trained:
            raise NotPlain
        self._take(1, tensor.nbytes)
        return self._of_tensor(tensor)

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            return tuple(map(self._key, key))
        if type(key) not in SCALARS:
            raise NotPlain
        return key

    def _take(self, values: int, size: int) -> None:
        self._values -= values
        self._bytes -= size
        if self._values < 0 or self._bytes < 0:
            raise TooMuch


def is_own(value: object) -> bool:
    """Whether it is an object of the script's own classes, whose attributes are the script's affair alone."""
    kind: Any = type(value)
    if isinstance(value, (*OTHERS_AFFAIR, *BUILT_IN)) or getattr(
        getattr(kind, "__dataclass_params__", None), "frozen", False
    ):
        return False  # a frozen one may stand in many places
    return kind in (Namespace, SimpleNamespace) or installed.is_scripts_class(kind)


def _plain_copy(value: Any) -> Any:
    try:
        return _seen.plain_copy(value)
    except RecursionError:  # it contains itself
        return None


def _numbers(value: list[Any]) -> Tensor | None:
    """Return the numbers of a list of such, if all are of one type, and there are some."""
    kinds = {*map(type, value)} if len(value) >= LEAST_NUMBERS else set()
    if kinds == {float}:
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63:
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    return None


def _digest(array: Any) -> tuple[Any, ...]:
    words = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return array.shape, array.dtype.str, xxhash.xxh3_64_digest(words.data)


def _words_of(tensor: Tensor) -> bytes:
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_digest(words.numpy().data)


def _put_tensor(here: Any, value: Tensor, in_place: bool) -> Tensor:
    if type(here) is not Tensor:
        return value
    value = value.to(here.device)
    alike = here.shape == value.shape and here.dtype == value.dtype and here.is_contiguous()
    if in_place and alike and not here.is_inference():
        with torch.no_grad():
            return here.copy_(value)
    return value


def _put_object(here: Any, told: list[Any]) -> Any:
    kind, attributes, *module = told
    if type(here).__qualname__ != kind or not is_own(here):
        here = _made(_class_called(module[0], kind) if module else None)
    for name, value in attributes.items():
        object.__setattr__(here, name, put(getattr(here, name, None), value, in_place=False))
    return here


def _put_member(here: Any, told: list[str]) -> Any:
    kind, name, *module = told
    if type(here).__qualname__ == kind and isinstance(here, enum.Enum):
        return type(here)[name]
    found = _class_called(module[0], kind) if module else None
    if found is None or not issubclass(found, enum.Enum):
        raise LookupError(kind)
    return found[name]


def _class_called(module: str, kind: str) -> type | None:
    """Return a class that a module has, if it is loaded; one of a function's is nowhere to be found."""
    found: Any = sys.modules.get(module)
    for name in kind.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None


def _made(kind: type | None) -> Any:
    """Return an object that has no attributes yet."""
    if kind is None or not installed.is_scripts_class(kind):
        raise LookupError(kind)
    try:
        return object.__new__(kind)
    except TypeError as error:
        raise LookupError(kind) from error


def _put_array(here: Any, value: Any) -> Any:
    alike = isinstance(here, numpy.ndarray) and (here.shape, here.dtype) == (value.shape, value.dtype)
    if not (alike and here.flags.writeable):
        return value
    here[...] = value
    return here


def _put_dict(here: Any, value: dict[Any, Any], in_place: bool) -> Any:
    there = here if isinstance(here, dict) else {}
    new = {key: put(there.get(key), one, in_place=False) for key, one in value.items()}
    # One that makes its values is put into that which is there: what makes them is in no save.
    if not ((in_place and type(here) is type(value)) or type(here) is defaultdict):
        return type(value)(new)
    here.clear()
    for key, one in new.items():
        here[key] = one
    return here


def _put_list(here: Any, value: Any, in_place: bool) -> Any:
    missing = object()
    there = here if isinstance(here, list | tuple | deque) else ()
    pairs = [*zip_longest(there, value, fillvalue=missing)][: len(value)]
    parts = [put(None if old is missing else old, new, in_place=False) for old, new in pairs]
    if not in_place or type(here) is not type(value) or isinstance(value, tuple):
        return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
    here.clear()
    here.extend(parts)
    return here


def _put_set(here: Any, value: Any) -> Any:
    if type(here) is not set or type(value) is not set:
        return value
    here.clear()
    here.update(value)
    return here
