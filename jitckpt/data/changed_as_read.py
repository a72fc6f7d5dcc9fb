"""What a dataset changes of itself as it is read: a counter, a buffer, a cache of samples.

Numbers, lists, dicts, sets, arrays and tensors in its attributes, and in those of datasets and transforms
inside of it. They are kept up to a size. What is larger is named, but for a cache of samples that come out
the same whenever they are made: a restart fills it again. What the script's loop changes as well is left to
who names that.
"""

import operator
import random
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from jitckpt.data import kept_values
from jitckpt.data.kept_generator import KeptGenerator
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, to_json
from jitckpt.errors import TreeError
from jitckpt.system.installed import is_scripts_class

MOST_BYTES = 100_000  # of all, as they are written behind each batch that changes one
MOST_TENSORS = 1000
MOST_PARTS = 1 << 12  # of a container, that are looked at one by one
MOST_INSIDE = 256  # containers and arrays in it, and in these
MOST_DEPTH = 8
MOST_READ = 1 << 20  # bytes of an array
MOST_OBJECTS = 16
NUMBERS = (bool, int, float, str)
ARRAYS = (Tensor, numpy.ndarray)
CONTAINERS = (list, dict, set, deque)
EXACTLY = (*NUMBERS, *ARRAYS, *CONTAINERS, Counter, OrderedDict)  # else made anew in what is there
OTHERS_AFFAIR = (nn.Module, Optimizer, IterableDataset, type)
TOO_MUCH = (
    "The dataset changes {names} as it is read, and no save holds that: it is larger than "
    f"{MOST_BYTES // 1000} kB, has more than {MOST_TENSORS} tensors or {MOST_INSIDE} containers in it, or is "
    "not plain. After a failure it is as the script builds it, and the samples that it gives may be others. "
    "Make each sample by its number alone, or all of them before the loop, in a way that each start repeats."
)


class _Known:
    """What was seen of one object in this process, whatever loader has it. Each has names of attributes."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.kept: set[str] = set()
        self.changed: set[str] = set()  # have done more than grow
        self.drawn: set[str] = set()  # have grown while random numbers were drawn
        self.same: set[str] = set()  # large caches, of what comes out the same each time
        self.of_others: set[str] = set()  # the script's loop changes them, too, between two batches
        self.given_up: dict[str, None] = {}
        self.told = 0  # of these


_known: dict[int, _Known] = {}  # by id()


def _known_of(owner: Any) -> _Known:
    known = _known.get(id(owner))
    if known is None or known.owner() is not owner:
        known = _known[id(owner)] = _Known(owner)
    return known


def looked_after() -> set[tuple[int, str]]:
    """Return the attributes that are kept, or need not be, by ids of their objects: nobody names them."""
    return {
        (number, name)
        for number, one in _known.items()
        if one.owner() is not None
        for name in (one.kept | one.same | one.given_up.keys()) - one.of_others
    }


class _Mark:
    """What a value is another by. It holds on to that, so that nothing else comes to lie there.

    parts: what a container has, in its order; None if it has too many. written: how often each tensor among
    these was. inside: marks of the containers and arrays among them, by their numbers. is_blind: it has more
    of these than are looked at.
    """

    __slots__ = ("content", "inside", "is_blind", "keys", "kind", "parts", "value", "written")

    def __init__(self, value: Any, left: "_Left | None" = None, depth: int = MOST_DEPTH) -> None:
        kind: Any = type(value)
        self.kind, self.value = kind, value
        self.content: object = None
        self.keys: tuple[Any, ...] = ()
        self.parts: tuple[Any, ...] | None = None
        self.written: dict[int, object] = {}
        self.inside: dict[int, _Mark] = {}
        self.is_blind = False
        what = _sort_of(kind)
        if what == CONTAINERS:
            self.content = len(value)
            if len(value) <= MOST_PARTS:
                self._look_inside(left or _Left(), depth)
        elif what == (Tensor,):
            self.content = _written(value)
        elif what == (numpy.ndarray,):
            is_read = not value.dtype.hasobject and value.nbytes <= MOST_READ
            numbers = numpy.ascontiguousarray(value).view(numpy.uint8).data if is_read else b""
            self.content = xxhash.xxh3_64_intdigest(numbers)

    def _look_inside(self, left: "_Left", depth: int) -> None:
        self.keys = tuple(self.value) if isinstance(self.value, dict) else ()
        self.parts = parts = tuple(self.value.values() if isinstance(self.value, dict) else self.value)
        kinds = {kind: sort for kind in {*map(type, parts)} if (sort := _sort_of(kind)) is not None}
        tensors = {kind for kind, sort in kinds.items() if sort == (Tensor,)}
        if tensors:
            numbered = enumerate(parts)
            self.written = {number: _written(part) for number, part in numbered if type(part) in tensors}
        if len(tensors) == len(kinds):
            return
        for number, part in enumerate(parts):
            if type(part) not in kinds or type(part) in tensors:
                continue
            left.number -= 1
            if not depth or left.number < 0:
                self.is_blind = True
                break
            self.inside[number] = found = _Mark(part, left, depth - 1)
            self.is_blind |= found.is_blind

    def is_same(self, other: "_Mark | None") -> bool:
        if other is None or self.kind is not other.kind or self.content != other.content:
            return False
        if self.kind in NUMBERS:
            return self.value is other.value or bool(self.value == other.value)
        if self.value is not other.value or (self.parts is None) != (other.parts is None):
            return False
        return (
            _are_very_same(self.keys, other.keys)
            and _are_very_same(self.parts or (), other.parts or ())
            and self.written == other.written
            and all(one.is_same(other.inside.get(number)) for number, one in self.inside.items())
        )

    def has_grown_from(self, before: "_Mark | None") -> bool:
        """Whether nothing is another, and something has been added: the value itself, or parts of it."""
        if before is None or before.value is None:
            return not issubclass(self.kind, (*NUMBERS, set, deque))
        if issubclass(self.kind, ARRAYS):
            return self.value is before.value  # filled, as far as can be told
        if self.kind is not before.kind or not issubclass(self.kind, dict | list):
            return False
        if self.parts is None or before.parts is None:
            return issubclass(self.kind, dict) and self.parts is before.parts
        if issubclass(self.kind, list) and self.content != before.content:
            return False
        now = self._numbered()
        return all(
            key in now and (part is None or self._has_kept(now[key], part, before.inside.get(number)))
            for number, (key, part) in enumerate(zip(before._numbered(), before.parts, strict=True))
        )

    def _has_kept(self, number: int, part: Any, before: "_Mark | None") -> bool:
        """Whether that part is the one from before, or has only grown."""
        assert self.parts is not None
        if self.parts[number] is not part:
            return False
        now = self.inside.get(number)
        return now is None or before is None or now.is_same(before) or now.has_grown_from(before)

    def _numbered(self) -> dict[Any, int]:
        assert self.parts is not None
        keys = self.keys if issubclass(self.kind, dict) else range(len(self.parts))
        return {key: number for number, key in enumerate(keys)}


class _Left:
    """How many parts that change in their place are still looked at."""

    def __init__(self) -> None:
        self.number = MOST_INSIDE


@cache
def _sort_of(kind: type) -> tuple[Any, ...] | None:
    """Return what a class is one of, of what changes in its place."""
    sorts: tuple[tuple[Any, ...], ...] = (CONTAINERS, (Tensor,), (numpy.ndarray,))
    return next((sort for sort in sorts if issubclass(kind, sort)), None)


def _written(tensor: Tensor) -> object:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _are_very_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class ChangedAsRead:
    """Of the objects in one dataset; told before and behind each batch that is read."""

    def __init__(self, objects: Iterable[Any], own: Sequence[KeptGenerator], dataset: Any = None) -> None:
        """objects: of the dataset, in an order that a restart finds again. own: the generators among them.

        dataset: that can be asked for a sample once more; None: there is none.
        """
        self._owners = [one for one in objects if _may_change(one)][:MOST_OBJECTS]
        self._known = [_known_of(one) for one in self._owners]
        self._dataset, self._own = dataset, own
        self._before: list[dict[str, _Mark]] = []
        self._random = RandomState(None) if self._owners else None
        self._built = [{*vars(one)} for one in self._owners]
        self._encoded = Encoded([], {})
        self.begins()
        self._encode()

    def __bool__(self) -> bool:
        return any(one.kept for one in self._known)

    def begins(self) -> None:
        """A batch is about to be read; since the last one others may have been at work."""
        before, self._before = self._before, [_marks_of(one) for one in self._owners]
        self._drawn = self._states()
        for known, then, now in zip(self._known, before, self._before, strict=False):
            # What is kept of these is as the dataset has left them.
            known.of_others |= {
                name for name in known.kept & now.keys() if not now[name].is_same(then.get(name))
            }

    def ended(self, index: Any = None) -> None:
        """It has been read. index: of its last sample, if that is known."""
        if not self._owners:
            return
        drawn, is_new = self._states(), False
        is_drawn = any(one is not other for one, other in zip(drawn, self._drawn, strict=True))
        for number, (owner, known) in enumerate(zip(self._owners, self._known, strict=True)):
            before, after = self._before[number], _marks_of(owner)
            for name, mark in after.items():
                if name in known.given_up or mark.is_same(before.get(name)):
                    continue
                if not mark.has_grown_from(before.get(name)):
                    known.changed.add(name)
                elif name in known.same and not (is_drawn and name not in known.drawn):
                    continue
                elif is_drawn:
                    known.drawn.add(name)
                known.kept.add(name)
                is_new = True
            self._before[number] = after
        self._drawn = drawn
        if is_new:
            self._encode(index)

    def lost(self) -> list[str]:
        """Return the names of what is not kept, each once."""
        new: list[str] = []
        for known, owner in zip(self._known, self._owners, strict=True):
            new += [f"{type(owner).__qualname__}.{name}" for name in [*known.given_up][known.told :]]
            known.told = len(known.given_up)
        return new

    def capture(self) -> Encoded:
        """Return what was changed, as it was behind the last batch."""
        return self._encoded

    def restore(self, saved: Sequence[Any]) -> None:
        """Put back what `capture` returned, decoded."""
        for owner, known, (kind, values) in zip(self._owners, self._known, saved, strict=False):
            if kind != type(owner).__qualname__:
                return
            for name, value in values.items():
                known.kept.add(name)
                vars(owner)[name] = _put(vars(owner).get(name), value)
        self._before = []
        self.begins()
        self._encode()

    def _states(self) -> tuple[Encoded, ...]:
        """Return the states of all generators; the same objects while none is used."""
        if self._random is None:
            return ()
        return self._random.capture(), *(one.capture() for one in self._own)

    def _is_same_again(self, number: int, name: str, index: Any) -> bool:
        """Whether the newest part of a cache comes out the same with other random numbers."""
        cache = vars(self._owners[number])[name]
        if self._dataset is None or index is None or not isinstance(cache, dict) or not cache:
            return False
        if self._is_read_with_effects():
            return False
        states = self._states()
        numbers = [{key: one for key, one in vars(of).items() if type(one) in NUMBERS} for of in self._owners]
        sample, value = cache.popitem()
        found = False
        with suppress(Exception):  # what the script's code makes of that is not the training's affair
            self._use_generators()
            self._dataset[index]
            found = sample in cache and _are_equal(cache[sample], value)
        cache.pop(sample, None)
        cache[sample] = value
        for owner, before in zip(self._owners, numbers, strict=True):
            vars(owner).update(before)
        self._put_states(states)
        return found

    def _is_read_with_effects(self) -> bool:
        """Whether one more reading would change what is not put back behind it."""
        return any(
            not isinstance(vars(owner).get(name), NUMBERS)
            for owner, known in zip(self._owners, self._known, strict=True)
            for name in known.changed
        )

    def _use_generators(self) -> None:
        """Have all give other numbers."""
        random.random()
        numpy.random.random()
        torch.rand(1, dtype=torch.float32, device="cpu")
        for one in self._own:
            if isinstance(one.generator, torch.Generator):
                torch.rand(1, generator=one.generator, dtype=torch.float32, device=one.generator.device)
            else:
                one.generator.random()

    def _put_states(self, states: Sequence[Encoded]) -> None:
        assert self._random is not None
        keepers: list[Any] = [self._random, *self._own]
        for keeper, state in zip(keepers, states, strict=True):
            keeper.restore(tree_codec.decode(state.tree, state.tensors))

    def _encode(self, index: Any = None) -> None:
        """Encode what is kept now, and let go of what is too much for that."""
        tree: list[Any] = []
        tensors: dict[str, Tensor] = {}
        left = MOST_BYTES
        for number, (owner, known) in enumerate(zip(self._owners, self._known, strict=True)):
            values = {}
            for name in sorted(known.kept, key=lambda name: (name not in known.changed, name)):
                encoded = self._encoded_of(number, name)
                size = MOST_BYTES + 1 if encoded is None else _size_of(encoded)
                if encoded is None or size > left or len(tensors) + len(encoded.tensors) > MOST_TENSORS:
                    self._let_go(number, name, index)
                    continue
                left -= size
                values[name] = encoded.tree
                tensors |= encoded.tensors
            tree.append([type(owner).__qualname__, values])
        self._encoded = Encoded(tree, tensors)

    def _let_go(self, number: int, name: str, index: Any) -> None:
        known = self._known[number]
        known.kept.discard(name)
        # Of an array nobody can tell: as a rule what is loaded lies there, and what is drawn comes on top.
        is_array = isinstance(vars(self._owners[number]).get(name), ARRAYS)
        is_filled_again = name not in known.changed and (
            name not in known.drawn or is_array or self._is_same_again(number, name, index)
        )
        if is_filled_again:
            known.same.add(name)
        else:
            known.given_up[name] = None

    def _encoded_of(self, number: int, name: str) -> Encoded | None:
        """Return an attribute encoded; None if it can't be kept."""
        value = vars(self._owners[number]).get(name)
        is_there = name in self._built[number]
        if type(value) not in EXACTLY and value is not None and not (is_there and isinstance(value, dict)):
            return None
        if isinstance(value, CONTAINERS) and (len(value) > MOST_BYTES or _Mark(value).is_blind):
            return None
        plain = {**value} if isinstance(value, dict) and type(value) not in EXACTLY else value
        try:
            encoded = tree_codec.encode(plain, f"changed.{number}.{name}")
        except TreeError:
            return None
        return encoded if all(one.is_cpu for one in encoded.tensors.values()) else None


def _may_change(one: Any) -> bool:
    kind = type(one)
    may_be_known = hasattr(one, "__dict__") and bool(kind.__weakrefoffset__)
    return is_scripts_class(kind) and may_be_known and not isinstance(one, OTHERS_AFFAIR)


def _marks_of(owner: Any) -> dict[str, _Mark]:
    return {name: mark for name, value in [*vars(owner).items()] if (mark := _mark(value)) is not None}


def _mark(value: Any) -> _Mark | None:
    kind: Any = type(value)
    is_looked_at = value is None or kind in NUMBERS or _sort_of(kind) is not None
    return _Mark(value) if is_looked_at else None


def _size_of(encoded: Encoded) -> int:
    return len(to_json(encoded.tree)) + sum(one.nbytes for one in encoded.tensors.values())


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two samples are the same, bit for bit; False, too, where that can't be told."""
    first, second = (tree_codec.encode(value, "sample") for value in (one, other))
    names = first.tensors.keys()
    return first.tree == second.tree and all(
        first.tensors[name].numpy().tobytes() == second.tensors[name].numpy().tobytes() for name in names
    )


def _put(here: Any, value: Any) -> Any:
    """Return a value, in what is there, if it is of that kind."""
    if isinstance(here, dict | set) and isinstance(value, dict | set):
        here.clear()
        here.update(value)
        return here
    if isinstance(here, list | deque) and isinstance(value, list | deque):
        here.clear()
        here.extend(value)
        return here
    return kept_values.put(here, value) if isinstance(value, ARRAYS) else value
