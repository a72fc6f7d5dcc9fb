"""Plain values: marks by which their changes are told, copies, and putting these back where they came from.

Plain are numbers, texts, tensors, arrays, containers of such, and objects of the script's own classes, of
which the plain attributes count: an object is told as a dict of them, and they are put into the one that is
there. What is still the object that the script has built is put back into it, as others may know it; what is
another by now (at any depth) comes back as a new one, as others may know what lies in its place.
"""

import concurrent.futures
import enum
import io
import operator
import socket
import subprocess
import sys
import threading
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from types import MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from jitckpt import _seen
from jitckpt.bindings import memory
from jitckpt.encoding import strides
from jitckpt.state import inner_tensors, parallel, told_tensors
from jitckpt.state.told_tensors import WRAPPED
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
OF_PROCESS = (  # what is waited for, or written to: handles that a restart can't have again
    *(torch.Stream, torch.Event, torch.cuda.Event, torch.futures.Future, concurrent.futures.Future),
    *(
        threading.Thread,
        type(threading.Lock()),
        type(threading.RLock()),
        threading.Condition,
        threading.Event,
    ),
    *(io.IOBase, socket.socket, subprocess.Popen),
    *((torch.distributed.Work,) if torch.distributed.is_available() else ()),
)
BUILT_IN = (list, tuple, dict, set, frozenset, deque, str, bytes, int, float)  # subclasses of these
# The one key of what stands for an object, for an enum's member, for a value that is not the object that the
# script has built, for what is just that, for a list of numbers, for what is kept under another name, and for
# an attribute that the script builds and has deleted.
OBJECT, MEMBER, NEW, AS_BUILT, NUMBERS = "*object", "*member", "*new", "*as built", "*numbers"
SAME, DELETED = "*same", "*deleted"
# In the place of a path: an optimizer's tensor, and what a start builds (named_things.py).
IN_STATE, THING = "*state", "*thing"
_NOWHERE = object()
LEAST_NUMBERS = 16  # in a list that a tensor stands for, as that is copied and written faster

LACKING = (
    "The save has {name}, for which there is no place here: it is put into nothing, so this run may differ "
    "from an undisturbed one. Build it as in the start that has saved."
)

NameOf = Callable[[Any], tuple[Any, ...] | None]  # the name of what goes by that alone
Tensors = dict[int, tuple["TensorMark", Any]]  # copies, by ids of what they are of
Place = tuple[Any, ...]  # (what it lies in, the key or name there); the value itself: ()
Built = dict[Place, object]  # what the script has built, and is still there


def has_no_name(value: object) -> None:
    """NameOf nothing."""


class NotPlain(Exception):
    """It is no plain value."""


class OfProcess(NotPlain):
    """There is something in it that can't outlive the process, and that no training's result depends on."""


class TooMuch(Exception):
    """It is plain, and larger than what is kept."""


def held(value: object) -> object:
    """Return what tells an object from another, and does not keep it in memory if that can be."""
    try:
        return weakref.ref(value)
    except TypeError:  # a list, say
        return value


def is_held(known: object, value: object) -> bool:
    """Whether this is what `held` returned of the value."""
    return value is not None and (known() if type(known) is weakref.ref else known) is value


def written(tensor: Tensor) -> tuple[int, int]:
    """Return what is another once torch has written to a tensor, or `tensor.data` was set to other memory."""
    is_dense = tensor.layout is torch.strided and not tensor.is_meta
    return tensor._version, tensor.data_ptr() if is_dense else 0


class TensorMark:
    """Of a tensor: equal while it is the same one and torch has not written to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), written(tensor)
        # What is written through `data`, or by numpy, torch counts nowhere; on the host it can be seen.
        is_small = tensor.is_cpu and tensor.layout is torch.strided and tensor.nbytes <= MOST_BYTES
        is_wrapper = inner_tensors.is_wrapper(tensor)
        self._words = _words_of(tensor) if is_small and not is_wrapper else b""
        # What is written through one that is made of others counts there, and what is to these, here.
        leaves = inner_tensors.leaves(tensor, "") if is_wrapper else {}
        self._inside = [TensorMark(leaf) for leaf in leaves.values()]
        self._told = told_tensors.description(tensor) if is_wrapper else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorMark):
            return False
        tensor = self._tensor()
        is_same = tensor is not None and tensor is other._tensor()
        return is_same and self._state() == other._state()

    def _state(self) -> tuple[Any, ...]:
        return self._version, self._words, self._told, self._inside

    __hash__ = None  # type: ignore[assignment]


def is_constant(value: object) -> bool:
    """Whether it is plain, and nothing else as long as it is the same object."""
    return type(value) in SCALARS or (type(value) is tuple and all(map(is_constant, value)))


def mark(
    value: Any,
    visited: set[int],
    names: Mapping[int, Any] = MappingProxyType({}),
    name_of: NameOf = has_no_name,
) -> Any:
    """Return what is another once the value is. visited: ids of objects that are told already; it grows.

    names: of objects that are told under these, by ids. name_of: of what no copy holds. Raises NotPlain or
    TooMuch; what was neither at first and has grown since `copy` finds too much.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if (plain := plain_copy(value)) is not None:
        return plain
    if is_own(value) and id(value) not in visited:
        plain = plain_copy(dict(attributes_of(value)))
        if plain is not None:
            visited.add(id(value))
            return {OBJECT: [kind.__qualname__, plain]}
    return Marks(visited, names, name_of).of(value)


def is_same(mark: Any, known: Any) -> bool:
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
        # Numbers that nobody has changed are the very same.
        return all(map(operator.is_, one, other)) or _have_like_parts(one, other)
    return bool(one) or isinstance(one, set | frozenset) or repr(one) == repr(other)


def _have_like_parts(one: Collection[Any], other: Collection[Any]) -> bool:
    kinds = [*map(type, one)]
    if kinds != [*map(type, other)]:
        return False
    if SCALARS.issuperset(kinds):  # most are such, and long
        return [repr(part) for part in one if not part] == [repr(part) for part in other if not part]
    return all(map(_are_alike, one, other))


def copy(
    value: object,
    visited: Collection[int],
    known: Tensors,
    built: Built | None,
    *,
    lies_in_parameter: Callable[[Tensor], bool] = lambda tensor: False,
    name_in_state: Callable[[Tensor], str | None] = lambda tensor: None,
    others: Mapping[Place, Any] = MappingProxyType({}),
    name_of: NameOf = has_no_name,
) -> tuple[Any, Tensors, Built]:
    """Return a copy that tree_codec can encode, the copies of tensors in it, and what is built of it.

    visited: as of `mark`, before that. known: the copies of the last time. built: what the script has built
    of it, None for all. lies_in_parameter: a tensor that does is no plain value, but where the script has
    built it. name_in_state: of one that is an optimizer's, too, and is put back as that. others: as
    `others_inside` says of it. name_of: as of `mark`. Raises NotPlain or TooMuch.
    """
    tensors: Tensors = {}

    def copied(tensor: Tensor) -> Any:
        written = TensorMark(tensor)
        if walk.is_in_new and (name := name_in_state(tensor)) is not None:
            tensors[id(tensor)] = written, None
            return {SAME: [IN_STATE, name]}
        if walk.is_in_new and lies_in_parameter(tensor):
            raise NotPlain
        mark, copied_before = known.get(id(tensor), (None, None))
        if copied_before is None or mark != written:
            copied_before = told_tensors.told(tensor, lambda one: one.detach().clone())
        tensors[id(tensor)] = written, copied_before
        return copied_before

    walk = Walk({*visited}, copied, numpy.copy, before=built, packs=True, others=others, name_of=name_of)
    return walk.of(value), tensors, walk.built


def objects_in(value: object, name_of: NameOf = has_no_name) -> set[tuple[Any, ...]]:
    """Return where a value has objects that can't be made anew; of what is not plain, nothing."""
    if is_constant(value):
        return set()
    try:
        walk = Walk(set(), lambda _: None, lambda _: None, packs=True, name_of=name_of)
        return cannot_be_made(walk.of(value))
    except (NotPlain, TooMuch):
        return set()


def cannot_be_made(copied: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Return where a copy has an object that only goes into one of its class that is there by then."""
    if isinstance(copied, dict) and [*copied] == [NEW]:
        return cannot_be_made(copied[NEW], path)
    if isinstance(copied, dict) and [*copied] in ([OBJECT], [MEMBER]):
        ((what, (kind, told, *module)),) = copied.items()
        found = set() if module else {(*path, kind)}
        return found | (cannot_be_made(told, path) if what == OBJECT else set())
    if isinstance(copied, dict):
        parts: Any = copied.items()
    else:
        parts = enumerate(copied) if isinstance(copied, list | tuple | deque) else ()
    return {one for key, part in parts for one in cannot_be_made(part, (*path, key))}


def is_whole(value: object, kept: Collection[int] = (), name_of: NameOf = has_no_name) -> bool:
    """Return whether a copy has all that is in the value, also in objects of the script's own classes.

    kept: ids of what others keep wherever it lies, such as generators of random numbers. name_of: as of
    `mark`.
    """
    try:
        _Whole(kept, name_of).of(value)
    except (NotPlain, TooMuch):
        return False
    return True


def is_on_device(value: Any) -> bool:
    """Return whether a tensor in the value lies on a device, as far as the value is plain."""
    found: list[Tensor] = []
    with suppress(NotPlain, TooMuch):
        Walk(set(), found.append, lambda array: array).of(value)
    return not all(tensor.is_cpu for tensor in found)


def size_of(copied: Any) -> int:
    """Return how many bytes the tensors and arrays in a copy have."""
    if isinstance(copied, Tensor | numpy.ndarray):
        return copied.nbytes
    parts = copied.values() if isinstance(copied, dict) else copied
    return sum(map(size_of, parts)) if isinstance(copied, dict | list | tuple | deque) else 0


def put(here: Any, value: Any, *, in_place: bool = True) -> Any:
    """Return a copy's value, for the place of what is there.

    in_place: in the memory of that, if it fits, but for what is told as new. Raises LookupError if it is an
    object's and no such object is there.
    """
    kind = type(value)
    if kind is dict and len(value) == 1:
        ((what, told),) = value.items()
        if what in _MEANINGS:
            return _MEANINGS[what](here, told, in_place)
    how = _put_tensor if isinstance(value, Tensor) else _BY_KIND.get(kind)
    return value if how is None else how(here, value, in_place)


def is_other_name(copied: Any) -> bool:
    """Whether a copy is of what is kept under another name, too."""
    return isinstance(copied, dict) and [*copied] == [SAME]


def is_thing(copied: Any) -> bool:
    """Whether a copy is the name of what a start builds."""
    return is_other_name(copied) and copied[SAME][0] == THING


def is_another_object(copied: Any) -> bool:
    """Whether a copy, by itself, is of an object in the place of that which the script has built."""
    is_new = isinstance(copied, dict) and [*copied] == [NEW]
    one = copied[NEW] if is_new else copied
    is_object = is_thing(one) or (is_new and isinstance(one, dict) and [*one] == [OBJECT])
    return is_object and all(name[0] == THING for name in other_names_in(one))


def is_deleted(copied: Any) -> bool:
    """Whether a copy is of an attribute that the script has deleted."""
    return isinstance(copied, dict) and [*copied] == [DELETED]


def others_inside(value: object, names: Mapping[int, Any], own: object, built: Built) -> dict[Place, Any]:
    """Return where in a value there is what has a name of its own. names: by ids; own: the value's.

    built: as the script has built it. An object that it has built there is put back there, as others may know
    it: of that another variable is no name.
    """
    found: dict[Place, Any] = {}
    seen: set[int] = set()

    def name_of(part: Any, place: Place) -> Any:
        name = names.get(id(part), own)
        is_variable = name != own and len(name) > 1
        return own if is_variable and is_object(part) and is_held(built.get(place), part) else name

    def look(one: Any, place: Place) -> None:
        if id(one) in seen or (parts := _parts_of(one)) is None:
            return
        seen.add(id(one))
        for key, part in parts:
            if type(part) in SCALARS:
                continue
            if (name := name_of(part, (place, key))) != own:
                found[place, key] = name
            else:
                look(part, (place, key))

    look(value, ())
    return found


def part_at(value: Any, place: Place) -> Any:
    """Return what a value has at this place; None if nothing is there."""
    if not place:
        return value
    around, key = place
    return dict(_parts_of(part_at(value, around)) or ()).get(key)


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what a value has inside, by keys; None if nothing there can be changed in its place."""
    kind = type(value)
    if kind in DICTS:
        return [*value.items()]
    if kind in (list, tuple, deque):
        return None if SCALARS.issuperset(map(type, value)) else enumerate([*value])
    return attributes_of(value) if is_own(value) else None


def other_names_in(copied: Any) -> set[Any]:
    """Return the names under which parts of a copy are kept, or all of it."""
    if is_other_name(copied):
        return {tuple(copied[SAME])}
    parts = copied.values() if isinstance(copied, dict) else copied
    return (
        {name for part in parts for name in other_names_in(part)}
        if isinstance(copied, dict | list | tuple | deque)
        else set()
    )


def with_others(copied: Any, find: Callable[..., Any]) -> Any:
    """Return a copy with what is kept under other names. find: returns that, by its name."""
    if not other_names_in(copied):
        return copied
    if is_other_name(copied):
        return {SAME: find(*copied[SAME])}
    if isinstance(copied, dict):
        return type(copied)({key: with_others(one, find) for key, one in copied.items()})
    parts = [with_others(one, find) for one in copied]
    return deque(parts, copied.maxlen) if isinstance(copied, deque) else type(copied)(parts)


def is_changeable(value: object) -> bool:
    """Whether it is plain, as a rule, and other names of it see what is changed in its place.

    Of an object of the script's own classes another name is no plain value.
    """
    return isinstance(value, Tensor | numpy.ndarray) or type(value) in CHANGEABLE


def spelled_out(copied: Any) -> Any:
    """Return a copy without what says how it is put back: objects by their attributes, members by names."""
    if isinstance(copied, dict) and len(copied) == 1:
        ((what, told),) = copied.items()
        if what == NUMBERS:
            return told.tolist()
        if what == WRAPPED:
            return told[1]
        if what in (OBJECT, MEMBER, NEW):
            return spelled_out(told if what == NEW else told[1])
    if type(copied) in DICTS:
        parts = {key: spelled_out(one) for key, one in copied.items() if not is_deleted(one)}
        return type(copied)(parts)
    if type(copied) is deque:
        return deque(map(spelled_out, copied), copied.maxlen)
    return type(copied)(map(spelled_out, copied)) if type(copied) in (list, tuple) else copied


class Walk:
    """Goes through one value, up to what is too much."""

    most_values: float = MOST_VALUES
    most_bytes: float = MOST_BYTES

    def __init__(
        self,
        visited: set[int],
        of_tensor: Callable[[Tensor], Any],
        of_array: Callable[[Any], Any],
        *,
        before: Built | None = None,
        skips: bool = True,
        packs: bool = False,
        others: Mapping[Place, Any] = MappingProxyType({}),
        name_of: NameOf = has_no_name,
    ) -> None:
        """before: what the script has built of the value; None: that is all as it is.

        skips: leave out what is not plain in objects. packs: have a tensor stand for a list of numbers.
        others: places of what is told under names of its own, with these. name_of: as of `mark`.
        """
        self._skips, self._packs, self._others = skips, packs, others
        self._name_of = name_of
        self._visited, self._of_tensor, self._of_array = visited, of_tensor, of_array
        self._values, self._bytes, self.depth = self.most_values, self.most_bytes, DEPTH
        self._in_container = False
        self.before, self.is_in_new = before, False
        self.built: Built = {}  # what of `before` is there still
        self._left_out = 0  # attributes that are not plain

    def of(self, value: Any, place: Place = ()) -> Any:
        """Return what stands for the value."""
        kind = type(value)
        if kind in SCALARS:
            if kind is str or kind is bytes:
                self.take(0, len(value))
            return value
        if place in self._others:
            return {SAME: [*self._others[place]]}
        if self.is_in_new or not (is_changeable(value) or is_object(value)):
            return self._of_any(value, place)
        if self.before is None or is_held(self.before.get(place), value):
            self.built[place] = held(value)
            return self._of_any(value, place)
        self.is_in_new = True
        try:
            return {NEW: self._of_any(value, place)}
        finally:
            self.is_in_new = False

    def other(self, value: Any, place: Place) -> Any:
        """Return what stands for what is no number, text, tensor, array or container of such."""
        if isinstance(value, OF_PROCESS):
            raise OfProcess
        if self.depth == 0 or not is_own(value):
            if (name := self._name_of(value)) is None:
                raise NotPlain
            return {SAME: [THING, *name]}
        kind: Any = type(value)
        is_told = id(value) in self._visited
        by_name = (self._name_of(value) or ()) if self.is_in_new or is_told else ()
        if by_name and is_told:
            return {SAME: [THING, *by_name]}
        left_out, told = self._left_out, self._attributes(value, place)
        is_all = left_out == self._left_out
        if by_name:
            return {OBJECT: [kind.__qualname__, told, {SAME: [THING, *by_name]}]}
        return {OBJECT: [kind.__qualname__, told, *(self._module_of(kind) if is_all else ())]}

    def key(self, key: Any) -> Any:
        """Return what stands for a dict's key or a set's element."""
        if type(key) is tuple:
            return tuple(map(self.key, key))
        if type(key) not in SCALARS:
            raise NotPlain
        return key

    def take(self, values: int, size: int) -> None:
        """Count what has come. Raises TooMuch."""
        self._values -= values
        self._bytes -= size
        if self._values < 0 or self._bytes < 0:
            raise TooMuch

    def _of_any(self, value: Any, place: Place) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            is_plain = kind is Tensor and is_dense(value)
            if not (is_plain or told_tensors.can_be_told(value)) or _is_trained(value):
                return self.other(value, place)
            self.take(1, parallel.held_bytes(value))
            return self._of_tensor(value)
        if isinstance(value, numpy.ndarray | numpy.generic):
            return self._of_numpy(value, place)
        # A new one in a container would come back as a plain dict, without what makes its values.
        if self.depth == 0 or (kind is defaultdict and self._in_container and self.is_in_new):
            return self.other(value, place)
        self.depth -= 1
        was_in_container, self._in_container = self._in_container, kind in DICTS or kind in SEQUENCES
        try:
            return self._of_many(kind, value, place)
        finally:
            self.depth += 1
            self._in_container = was_in_container

    def _of_numpy(self, value: Any, place: Place) -> Any:
        if value.dtype.hasobject or value.dtype.fields or value.dtype.subdtype:
            return self.other(value, place)
        if isinstance(value, numpy.generic):
            return value
        self.take(1, value.nbytes)
        return self._of_array(value)

    def _of_many(self, kind: type, value: Any, place: Place) -> Any:
        if kind in DICTS:
            self.take(len(value), 0)
            told = {self.key(key): self.of(one, (place, key)) for key, one in [*value.items()]}
            return told if kind is defaultdict else kind(told)
        if kind in (set, frozenset):
            self.take(len(value), 0)
            return kind(map(self.key, [*value]))
        if kind in SEQUENCES:
            self.take(len(value), 0)
            if self._packs and kind is list and (numbers := _numbers(value)) is not None:
                return {NUMBERS: numbers}
            parts = (self.of(one, (place, number)) for number, one in enumerate([*value]))
            return deque(parts, value.maxlen) if kind is deque else kind(parts)
        if isinstance(value, enum.Enum):
            # A flag may be several members at once, or none: its value tells which.
            which = value.value if isinstance(value, enum.Flag) else value.name
            return {MEMBER: [kind.__qualname__, which, *self._module_of(kind)]}
        return self.other(value, place)

    def _module_of(self, kind: type) -> list[str]:
        """Return, for a copy, where a restart finds the class to make an object of it; or nothing."""
        found = _class_called(kind.__module__, kind.__qualname__) if self._packs else None
        return [kind.__module__] if found is kind else []

    def _attributes(self, value: Any, place: Place) -> dict[str, Any]:
        """Return what stands for an object's plain attributes."""
        if id(value) in self._visited:
            raise NotPlain  # another name of what is told already
        self._visited.add(id(value))
        found = {}
        for name, one in attributes_of(value):
            self.take(1, 0)
            try:
                found[name] = self.of(one, (place, name))
                if self._packs and not self.is_in_new and is_thing(found[name]):
                    del found[name]  # it is looked at by itself, where the script changes it
                    raise NotPlain
            except NotPlain:
                if not self._skips:
                    raise
                self._left_out += 1
        return found


class _Whole(Walk):
    def __init__(self, kept: Collection[int], name_of: NameOf) -> None:
        super().__init__(set(), lambda tensor: tensor, lambda array: array, skips=False, name_of=name_of)
        self._kept = kept

    def other(self, value: Any, place: Place) -> Any:
        return None if id(value) in self._kept else super().other(value, place)


class Marks(Walk):
    """Marks of what may be as large as it will."""

    def __init__(
        self,
        visited: set[int],
        names: Mapping[int, Any] = MappingProxyType({}),
        name_of: NameOf = has_no_name,
    ) -> None:
        super().__init__(visited, TensorMark, digest, name_of=name_of)
        self._names = names

    def other(self, value: Any, place: Place) -> Any:
        if place and id(value) in self._names:
            return {SAME: [*self._names[id(value)]]}
        return super().other(value, place)


def is_own(value: object) -> bool:
    """Whether it is an object of the script's own classes, whose attributes are the script's affair alone."""
    kind: Any = type(value)
    if isinstance(value, (*OTHERS_AFFAIR, *BUILT_IN)) or getattr(
        getattr(kind, "__dataclass_params__", None), "frozen", False
    ):
        return False  # a frozen one may stand in many places
    return kind in (Namespace, SimpleNamespace, threading.local) or installed.is_scripts_class(kind)


def is_object(value: object) -> bool:
    """Whether it is such an object, and no member of an enum."""
    return is_own(value) and not isinstance(value, enum.Enum)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return what an object has in attributes. Raises NotPlain if its own code for these fails."""
    try:
        return [*getattr(value, "__dict__", {}).items(), *slots_of(value)]
    except Exception as error:
        raise NotPlain from error


def slots_of(value: Any) -> list[tuple[str, Any]]:
    """Return what an object keeps in __slots__."""
    kind: Any = type(value)
    found = [(name, _attribute_of(value, name)) for name in _slots_in(kind)]
    return [(name, one) for name, one in found if one is not _NOWHERE]


def _attribute_of(value: Any, name: str) -> Any:
    """Return an attribute that is there; of what is not, the class's own __getattr__ might raise anything."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _NOWHERE


@cache
def _slots_in(kind: type) -> list[str]:
    """Return the names of a class's slots, as it calls them: a private one has the class's name before it."""
    return [
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, one in vars(base).items()
        if isinstance(one, MemberDescriptorType)
    ]


def plain_copy(value: Any) -> Any:
    """Return a copy of a list, dict or tuple of numbers and texts alone; None of others."""
    try:
        return _seen.plain_copy(value) if type(value) in (list, dict, tuple) else None
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


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has all its values in memory of its own, and torch counts what is written there."""
    is_odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested
    return not (is_odd or tensor.is_inference())


def _is_trained(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def digest(array: Any) -> tuple[Any, ...]:
    """Return the mark of an array."""
    words = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return array.shape, array.dtype.str, xxhash.xxh3_64_digest(words.data)


def _words_of(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's memory on the host; without torch, as a step may have hundreds."""
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return xxhash.xxh3_64_digest(memory.at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")


def _put_tensor(here: Any, value: Tensor, in_place: bool) -> Tensor:
    if not isinstance(here, Tensor):
        return value
    fits = here.shape == value.shape and here.dtype == value.dtype and strides.is_apart(here)
    if in_place and fits and not here.is_inference():
        if not value.is_meta:  # else it is a description alone
            with torch.no_grad():
                here.copy_(value)
        return here
    if in_place and type(here) is not Tensor:
        raise LookupError("a parameter of another shape or type")
    return value.to(here.device) if value.device.type == here.device.type else value


def _put_object(here: Any, told: list[Any], in_place: bool) -> Any:
    kind, attributes, *module = told
    if module and isinstance(module[0], dict):
        ((_, here),), in_place = module.pop().items(), True
    is_alike = type(here).__qualname__ == kind and is_own(here)
    if not is_alike or (module and not in_place):
        here = _made(_class_called(module[0], kind) if module else None)
    for name, value in attributes.items():
        old = _attribute_of(here, name)
        object.__setattr__(here, name, put(None if old is _NOWHERE else old, value, in_place=in_place))
    return here


def _put_member(here: Any, told: list[Any], in_place: bool) -> Any:
    kind, name, *module = told
    if type(here).__qualname__ == kind and isinstance(here, enum.Enum):
        found: Any = type(here)
    else:
        found = _class_called(module[0], kind) if module else None
    if found is None or not issubclass(found, enum.Enum):
        raise LookupError(kind)
    return found[name] if isinstance(name, str) else found(name)


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


def _put_numbers(here: Any, told: Tensor, in_place: bool) -> Any:
    return _put_list(here, told.tolist(), in_place)


def _put_new(here: Any, told: Any, in_place: bool) -> Any:
    return put(here, told, in_place=False)


def _put_same(here: Any, told: Any, in_place: bool) -> Any:
    return told


def _leave(here: Any, told: str, in_place: bool) -> Any:
    if type(here).__qualname__ != told:
        raise LookupError(told)
    return here


def _put_array(here: Any, value: Any, in_place: bool) -> Any:
    alike = isinstance(here, numpy.ndarray) and (here.shape, here.dtype) == (value.shape, value.dtype)
    if not (in_place and alike and here.flags.writeable):
        return value
    here[...] = value
    return here


def _put_dict(here: Any, value: dict[Any, Any], in_place: bool) -> Any:
    there = here if isinstance(here, dict) else {}
    new = {key: put(there.get(key), one, in_place=in_place) for key, one in value.items()}
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
    parts = [put(None if old is missing else old, new, in_place=in_place) for old, new in pairs]
    if not in_place or type(here) is not type(value) or isinstance(value, tuple):
        return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
    here.clear()
    here.extend(parts)
    return here


def _put_set(here: Any, value: set[Any], in_place: bool) -> Any:
    if not in_place or type(here) is not set:
        return value
    here.clear()
    here.update(value)
    return here


_MEANINGS: dict[Any, Callable[[Any, Any, bool], Any]] = {
    OBJECT: _put_object,
    MEMBER: _put_member,
    NEW: _put_new,
    AS_BUILT: _leave,
    NUMBERS: _put_numbers,
    SAME: _put_same,
    WRAPPED: told_tensors.put,
}
_BY_KIND: dict[type, Callable[[Any, Any, bool], Any]] = {
    numpy.ndarray: _put_array,
    set: _put_set,
    **dict.fromkeys((list, tuple, deque), _put_list),
    **dict.fromkeys(DICTS, _put_dict),
}
