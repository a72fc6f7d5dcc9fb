"""What objects keep in plain attributes, and change: counters, averages, lists of results, carried tensors.

No state_dict has them. An attribute that never changes the script builds again; from its first change on one
is kept, if its value is plain (plain_values.py). Tensors are copied where they lie, as the next minibatch may
write to them.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from jitckpt._seen import Seen
from jitckpt.state import plain_values
from jitckpt.state.named_things import NOTHING_NAMED, NamedThings, is_thing
from jitckpt.state.plain_values import (
    IN_STATE,
    SAME,
    SCALARS,
    THING,
    Built,
    NotPlain,
    OfProcess,
    Place,
    Tensors,
    TooMuch,
)

MOST_BYTES = 200_000  # of tensors and arrays, in all attributes
BECOME = (
    "A save lacks {name}, which has become a {kind} that can't be saved without pickle, or another name of "
    "what is kept already, or lies in the memory of a parameter or of an optimizer's state: after a restart "
    "it is as the script builds it. "
    "If that matters, keep it in `extra`, or set it anew before it is read."
)
ANOTHER_THING = (
    "A save lacks {name}, which has become a {kind} that can't be saved without pickle, and that no other "
    "variable of the script had as its loop began: after a restart it is as the script builds it. If that "
    "matters, make all that it may become before the loop, each under a name of its own, and choose among "
    "these; or choose it anew, by a kept variable, before it is read."
)
TOO_MUCH = (
    "A save lacks {name}, which has grown beyond {values} values or {bytes} kB: after a restart it is as the "
    "script builds it. If that matters, empty it now and then, or keep it in `extra` or in a buffer."
)

NUMBERS = frozenset({type(None), bool, int, float})
Key = tuple[str, str]  # an owner's path, and the name of an attribute
_UNKNOWN, _NOT_PLAIN = object(), object()


class OptimizersTensors(Protocol):
    """What tells of the tensors that optimizers keep in their states."""

    def have_moved(self) -> bool:
        """Return whether there may be others by now than as the states were captured last."""

    def name_of(self, tensor: Tensor) -> str | None:
        """Return a name for one of them, None for any other."""

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory of one."""

    def tensor_of(self, name: str) -> Tensor:
        """Return the one of this name. Raises LookupError."""


class NoOptimizers:
    """OptimizersTensors of none."""

    def have_moved(self) -> bool:
        return False

    def name_of(self, tensor: Tensor) -> str | None:
        return None

    def has_memory_of(self, tensor: Tensor) -> bool:
        return False

    def tensor_of(self, name: str) -> Tensor:
        raise LookupError(name)


NO_OPTIMIZERS = NoOptimizers()


class Owner(NamedTuple):
    """An object, and which of its attributes are looked at, by name and value.

    deletes: whether one that is not there any more the script has deleted.
    """

    object: Any
    may_keep: Callable[[str, Any], bool]
    deletes: bool = True


class PlainAttributes:
    """Of some objects, by the paths that lead to them, since this was made of them."""

    def __init__(
        self,
        owners: Mapping[str, Owner],
        *,
        most_bytes: int = MOST_BYTES,
        named: Callable[[str, str], str] | None = None,
        lies_in_parameter: Callable[[Tensor], bool] = lambda tensor: False,
        optimizers: OptimizersTensors = NO_OPTIMIZERS,
        things: NamedThings = NOTHING_NAMED,
    ) -> None:
        """most_bytes: of tensors and arrays, in all attributes. named: says a path and a name in words.

        lies_in_parameter: whether a tensor has the memory of one; set anew it would be apart after a restart.
        optimizers: those whose tensors may have names here, too. things: by which names other objects go.
        """
        self._things, self._name_of = things, things.name_of
        self._marker = partial(plain_values.Marks, name_of=things.name_of)
        self._most_bytes, self._named = most_bytes, named or _named
        self._optimizers = optimizers
        self._copy = partial(
            plain_values.copy,
            lies_in_parameter=lambda one: optimizers.has_memory_of(one) or lies_in_parameter(one),
            name_in_state=optimizers.name_of,
            name_of=things.name_of,
        )
        self._owners: Mapping[str, Owner] = {}
        self._marks: dict[Key, Any] = {}  # of what is looked at
        self._first: set[Key] = set()  # what was there before the training changed anything
        self._copies: dict[Key, Any] = {}  # of what has changed
        self._tensors: dict[Key, Tensors] = {}  # in these copies
        self._dropped: set[Key] = set()
        self._said: set[Key] = set()  # that it has become what can't be kept
        self._built: dict[Key, Built] = {}  # as far as it is there still
        self._parts: dict[int, list[tuple[Key, Place]]] | None = None  # of what is built, by ids
        self._shared: dict[Key, list[Place]] = {}  # of these the parts that lie in several places
        self._places: dict[Key, set[Any]] = {}  # in the copies, of objects that can't be made anew
        self._sizes: dict[Key, int] = {}  # bytes of tensors and arrays in the copies
        self._by_value: list[Key] = []  # what may change and stay the same object
        self._same: dict[Key, Key] = {}  # other names of what is kept under these
        self._named_by: dict[int, Key] = {}  # what can be changed in its place, by ids
        self.objects: Mapping[str, object] = {}  # that have the attributes of some of the owners
        self.absent: Collection[str] = ()  # paths of owners that are not there now
        self._inside: dict[Key, dict[Place, tuple[str, ...]]] = {}  # where others' values are in these
        self._around: list[Key] = []  # what is to be looked at once more
        self._seen = Seen()  # all else
        self.told = Seen()  # that, while others take its word for all: see what_tells
        self._changed: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []  # sentences that name what is not kept
        self.look_again(owners)

    def look_again(self, owners: Mapping[str, Owner]) -> None:
        """Look at these from now on; those that are new are as the script has built them."""
        known = {id(one.object): path for path, one in self._owners.items()}
        new = {path for path, one in owners.items() if known.get(id(one.object)) != path}
        self._owners = owners
        self._around.clear()
        kept = self._marks, self._copies, self._tensors, self._sizes, self._built, self._places, self._inside
        for known_of in kept:
            for key in [key for key in known_of if key[0] in new or key[0] not in owners]:
                del known_of[key]
        self._first = {key for key in self._first if key[0] in owners and key[0] not in new}
        self._parts = None
        self._look(new)
        self._tell()

    def begin_with(self, path: str, name: str) -> None:
        """Take what this attribute is now for what the script builds, unless it is looked at by now."""
        if (path, name) in self._marks or (path, name) in self._dropped:
            return
        visited: set[int] = set()
        for other, there in self._marks.items():
            if there is not _NOT_PLAIN:
                with suppress(NotPlain, TooMuch):
                    self._marker(visited).of(vars(self._owners[other[0]].object).get(other[1]))
        self._take_first((path, name), vars(self._owners[path].object)[name], visited)
        if not self.keeps(path, name):
            self._first.discard((path, name))  # whoever asked for it gives it no more

    def has_changed(self, path: str, name: str) -> None:
        """Keep an attribute that is looked at from now on: it has changed by now."""
        self.told.end()
        self._marks[path, name] = _UNKNOWN
        self._built.pop((path, name), None)
        self._places.pop((path, name), None)
        if (path, name) not in self._by_value:
            self._by_value.append((path, name))

    def built_again(self, path: str, names: Collection[str]) -> None:
        """Take the objects that these are now for those that the script builds in a restart."""
        values = vars(self._owners[path].object)
        for name in names:
            key = (path, name)
            value = values.get(name)
            if key not in self._marks or type(value) in SCALARS or self.is_built(key, value):
                continue
            walk = self._marker(set())
            with suppress(NotPlain, TooMuch):
                walk.of(value)
            self._built[key], self._parts = walk.built, None
            self._places[key] = plain_values.objects_in(value, self._name_of)
            if key in self._copies:
                self._marks[key] = _UNKNOWN  # how it is told depends on that

    def keeps(self, path: str, name: str) -> bool:
        """Return whether an attribute is looked at, and will be kept once it changes."""
        return (
            self._marks.get((path, name), _NOT_PLAIN) is not _NOT_PLAIN and (path, name) not in self._dropped
        )

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return what has changed by now, by paths and names; the same object while nothing has since."""
        has_changed = not self._seen.is_same() and self._look(())
        visited: set[int] = set()
        if any(self._tensors.values()) and self._optimizers.have_moved():
            for key in [key for key, tensors in self._tensors.items() if tensors and key in self._copies]:
                self._marks[key] = _UNKNOWN  # they may be the state's own now
        self._note_same(self._by_value)
        for key in sorted(self._by_value, key=self._has_another_object):
            has_changed |= self._look_at(key, visited)
        for key in self._around:
            has_changed |= self._look_at(key, {*visited})
        self._around.clear()
        if has_changed:
            self._tell()
        return self._changed

    def is_same(self) -> bool:
        """Whether `changed` would return the same object."""
        return self._changed is self.changed()  # as it was, before it is asked

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back what `changed` returned; what there is no place for is named in `problems`."""
        waiting = {(path, name): value for path, of in saved.items() for name, value in of.items()}
        while waiting:
            self._put_next(next(iter(waiting)), waiting)
        self._look(())
        self._tell()

    def _put_next(self, key: Key, waiting: dict[Key, Any]) -> None:
        """Put back one of these, and before that what other names in it are of."""
        value = waiting.pop(key)
        for other in plain_values.other_names_in(value) & waiting.keys():
            self._put_next(other, waiting)
        try:
            self._put(*key, value)
        except LookupError:
            self.problems.append(plain_values.LACKING.format(name=self._named(*key)))
            return
        self._copies[key] = None  # from now on it is in each save
        self._marks[key] = _UNKNOWN

    def _put(self, path: str, name: str, value: Any) -> None:
        here = self._attributes_at(path)
        if plain_values.is_deleted(value):
            here.pop(name, None)
            return
        whole = plain_values.with_others(value, self._find)
        here[name] = plain_values.put(here.get(name), whole)
        self._places[path, name] = plain_values.cannot_be_made(value)

    def _find(self, path: str, *name: str) -> Any:
        """Return an attribute; without a name the object itself."""
        if path == IN_STATE:
            return self._optimizers.tensor_of(*name)
        if path == THING:
            return self._things.thing_of(*name)
        return self._attributes_at(path)[name[0]] if name else self.objects[path]

    def _attributes_at(self, path: str) -> dict[str, Any]:
        attributes: dict[str, Any] = vars(self._owners[path].object)
        return attributes

    def kept(self) -> set[object]:
        """Return what is kept, as pairs of an object's id and an attribute's name, and the value's id."""
        found: set[object] = set()
        for path, name in self._copies:
            owner = self._owners[path].object
            found.add((id(owner), name))
            if type(value := vars(owner).get(name)) not in SCALARS:
                found.add(id(value))
        return found

    def _look(self, new: Collection[str]) -> bool:
        """Look at all attributes; return whether one has changed. new: paths of owners that are new."""
        seen, by_value, has_changed = Seen(), [], False
        visited: set[int] = set()
        looked_at = {
            (path, name)
            for path, (owner, may_keep, _) in self._owners.items()
            for name, value in [*vars(owner).items()]
            if (path, name) not in self._dropped and may_keep(name, value)
        }
        self._note_same(key for key in looked_at if key[0] not in new)
        for path, (owner, *_) in self._owners.items():
            attributes = vars(owner)
            seen.size(attributes)
            for name, value in [*attributes.items()]:
                if (key := (path, name)) not in looked_at:
                    continue
                is_told = id(value) in visited  # by another way that leads to it
                if path in new:
                    self._take_first(key, value, visited)
                else:
                    has_changed |= self._look_at(key, visited)
                # What has changed once will again, and is looked at by itself.
                if (is_told or plain_values.is_constant(value)) and key not in self._copies:
                    seen.entry(attributes, name)
                else:
                    by_value.append(key)
        has_changed |= self._look_for_deleted()
        self.told.end()
        self._seen, self._by_value = seen, [key for key in by_value if key not in self._dropped]
        return has_changed

    def _look_for_deleted(self) -> bool:
        has_changed = False
        for key in {*self._copies, *self._first} - self._dropped:
            owner = self._owners[key[0]]
            attributes, copied = vars(owner.object), self._copies.get(key)
            if key[0] in self.absent or key[1] in attributes or plain_values.is_deleted(copied):
                continue
            if key in self._first and owner.deletes:
                self._copies[key], self._marks[key] = {plain_values.DELETED: []}, _UNKNOWN
                has_changed = True
            elif key in self._copies:
                del self._copies[key]
                has_changed = True
            for known in (self._tensors, self._sizes, self._built, self._inside):
                known.pop(key, None)
        return has_changed

    def _take_first(self, key: Key, value: object, visited: set[int]) -> None:
        self._first.add(key)
        walk = self._marker(visited)
        try:
            self._marks[key] = walk.of(value)
        except NotPlain:
            self._marks[key] = _NOT_PLAIN
        except TooMuch:
            self._dropped.add(key)  # a data set or a table of words, as a rule
            return
        self._built[key], self._places[key] = walk.built, plain_values.objects_in(value, self._name_of)
        self._parts = None

    def _look_at(self, key: Key, visited: set[int]) -> bool:
        """Take a copy of one attribute if it is another than it was; return whether it is."""
        value = vars(self._owners[key[0]].object).get(key[1])
        known = self._marks.get(key, _UNKNOWN)
        if type(value) in NUMBERS:  # most are, so for these there is a short way
            if known == value and type(known) is type(value) and (value or repr(known) == repr(value)):
                return False  # zero may have a sign
            self._built.pop(key, None)
            self._marks[key] = self._copies[key] = value
            return True
        if (first := self._same.get(key)) is not None:
            return self._name_again(key, first)
        return self._look_inside(key, value, visited)

    def _look_inside(self, key: Key, value: object, visited: set[int]) -> bool:
        known = self._marks.get(key, _UNKNOWN)
        before = [*visited] if visited else ()
        try:
            mark = plain_values.mark(value, visited, self._named_by, self._name_of)
            is_same, others = plain_values.is_same(mark, known), self._inside.get(key, {})
            if key in self._copies or not is_same:
                others = self._others_inside(key, value)
            if is_same and others == self._inside.get(key, {}) and not self._is_set_apart(key, value):
                return False
            known_tensors, built = self._tensors.get(key, {}), self._built.get(key, {})
            copied, tensors, built = self._copy(value, before, known_tensors, built, others=others)
            if plain_values.cannot_be_made(copied) - self._places.get(key, set()):
                raise NotPlain  # a restart does not build these
            if size := plain_values.size_of(copied):
                self._sizes[key] = size
                if sum(self._sizes.values()) > self._most_bytes:
                    raise TooMuch
        except NotPlain as why:
            is_news = known is not _NOT_PLAIN and key in self._marks and key not in self._said
            if is_news and not isinstance(why, OfProcess):
                self._said.add(key)
                self.problems.append(_become(self._named(*key), value))
            self._marks[key] = _NOT_PLAIN
            for known_of in (self._sizes, self._built, self._inside):
                known_of.pop(key, None)
            return self._copies.pop(key, None) is not None
        except TooMuch:
            self._drop(key, value)
            return True
        if () not in built:
            self._keep_around(value)
        self._marks[key], self._tensors[key], self._built[key] = mark, tensors, built
        self._copies[key], self._inside[key] = copied, others
        return True

    def _parts_built(self) -> dict[int, list[tuple[Key, Place]]]:
        if self._parts is None:
            self._parts, self._shared = defaultdict(list), defaultdict(list)
            for key, built in self._built.items():
                for place, known in built.items():
                    part = known() if type(known) is weakref.ref else known
                    if part is not None:
                        self._parts[id(part)].append((key, place))
            for places in self._parts.values():
                if len(places) > 1:
                    for key, place in places:
                        self._shared[key].append(place)
        return self._parts

    def _is_set_apart(self, key: Key, value: object) -> bool:
        """Whether something equal is where the script has built what lies elsewhere, too.

        A restart builds one for both places, and what is changed in the one must not change the other.
        """
        self._parts_built()
        built = self._built.get(key, {})
        return any(
            place in built and not plain_values.is_held(built[place], plain_values.part_at(value, place))
            for place in self._shared.get(key, ())
        )

    def _keep_around(self, part: object) -> None:
        """Keep what has this part, as it is under another name now: else that would be another one."""
        for key, place in self._parts_built().get(id(part), ()):
            is_there = key[1] in vars(self._owners[key[0]].object)
            if not place or key in self._copies or key in self._dropped or not is_there:
                continue
            if plain_values.is_held(self._built.get(key, {}).get(place), part):
                self._marks[key] = _UNKNOWN
                self._around.append(key)

    def _others_inside(self, key: Key, value: object) -> dict[Place, tuple[str, ...]]:
        """Return where in a value there is that of another name.

        But for one that has this in itself, and what is kept as an attribute of the value.
        """
        own = tuple(f"{key[0]}{mark}{key[1]}." for mark in ":.")
        objects = {id(one): (path,) for path, one in self.objects.items()}
        names = {**objects, **self._named_by}
        found = plain_values.others_inside(value, names, key, self._built.get(key, {}))
        return {
            place: name
            for place, name in found.items()
            if not (f"{name[0]}.".startswith(own) or self._has_inside(name, key))
        }

    def _has_inside(self, key: Any, other: Key) -> bool:
        names = {*self._inside.get(key, {}).values()}
        return other in names or any(self._has_inside(name, other) for name in names)

    def _name_again(self, key: Key, first: Key) -> bool:
        """Tell one as another name of what is kept under the first; return whether that is new."""
        told = {SAME: [*first]}
        if self._marks.get(key) == told:
            return False
        for known in (self._tensors, self._sizes, self._built, self._places, self._inside):
            known.pop(key, None)
        self._marks[key] = self._copies[key] = told
        return True

    def _note_same(self, looked_at: Iterable[Key]) -> None:
        """Find the other names of what can be changed in its place: that changes what they all have."""
        names: dict[int, dict[Key, bool]] = defaultdict(dict)
        objects: dict[int, Key] = {}
        for key in looked_at:
            value = vars(self._owners[key[0]].object).get(key[1])
            if type(value) in SCALARS:
                continue
            if plain_values.is_changeable(value):
                names[id(value)][key] = self.is_built(key, value)
            elif plain_values.is_object(value) and self._marks.get(key) is not _NOT_PLAIN:
                objects.setdefault(id(value), key)
        same: dict[Key, Key] = {}
        self._named_by = objects
        for number, keys in names.items():
            kept = [key for key in keys if self._marks.get(key) is not _NOT_PLAIN]
            if kept:
                first = min(kept, key=lambda key: (not keys[key], key))
                self._named_by[number] = first
                same |= {key: first for key, is_built in keys.items() if key != first and not is_built}
        for key in self._same.keys() - same.keys():
            self._marks[key] = _UNKNOWN
        self._same = same

    def _has_another_object(self, key: Key) -> bool:
        value = vars(self._owners[key[0]].object).get(key[1])
        return plain_values.is_object(value) and not self.is_built(key, value)

    def is_built(self, key: Key, value: object) -> bool:
        """Whether it is still the object that the script has built."""
        return plain_values.is_held(self._built.get(key, {}).get(()), value)

    def _drop(self, key: Key, value: object) -> None:
        """Keep an attribute no more that has grown; a tensor is a note of the newest minibatch, as a rule."""
        self._leave(key)
        if not isinstance(value, Tensor):
            self.problems.append(_too_much(self._named(*key)))

    def _leave(self, key: Key) -> None:
        self._dropped.add(key)
        self._by_value = [one for one in self._by_value if one != key]
        for known in (self._copies, self._tensors, self._sizes, self._built, self._inside):
            known.pop(key, None)

    def _tell(self) -> None:
        self._changed = {}
        for (path, name), copied in self._copies.items():
            self._changed.setdefault(path, {})[name] = copied


class AttributesNow(PlainAttributes):
    """What others are now; it knows what these knew as they were looked at last, and changes nothing there.

    No device is asked for anything: what is new there stays as it was.
    """

    def __init__(self, others: PlainAttributes, owners: Mapping[str, Owner]) -> None:
        """owners: as of the others, with objects of their own."""
        for name, value in vars(others).items():
            setattr(self, name, copy.copy(value) if isinstance(value, dict | list | set) else value)
        self._owners, self.problems, self.told = owners, [], Seen()

    def _look_at(self, key: Key, visited: set[int]) -> bool:
        value = vars(self._owners[key[0]].object).get(key[1])
        return not plain_values.is_on_device(value) and super()._look_at(key, visited)


def what_tells(kept: PlainAttributes) -> Seen | None:
    """Return what tells by itself whether `is_same`; most objects have settings alone. Else None."""
    if kept._by_value or kept._around or kept._same or any(kept._tensors.values()):
        return None
    kept.told = kept._seen
    return kept.told


def _become(name: str, value: object) -> str:
    is_other = is_thing(value) and not plain_values.is_object(value)
    return (ANOTHER_THING if is_other else BECOME).format(name=name, kind=type(value).__qualname__)


def _too_much(name: str) -> str:
    values, kilobytes = plain_values.MOST_VALUES, plain_values.MOST_BYTES // 1000
    return TOO_MUCH.format(name=name, values=values, bytes=kilobytes)


def _named(path: str, name: str) -> str:
    return f"the attribute {name!r}" + (f" of {path}" if path else "")
