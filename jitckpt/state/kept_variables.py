"""Variables of the script that its loop changes: a part of the rank's own state.

They are found by who reads the loop's code (worker/script_variables.py), and go by name and place: a function
that is running, a module, or an object that one of these knows. They are looked at whenever the loop goes on
behind an optimizer step, and put back where a restart goes on with it: what is before, a restart does again.
"""

import copy
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from jitckpt._seen import Seen
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state import counters, plain_values
from jitckpt.state.counters import Counters
from jitckpt.state.earlier_loops import EarlierLoops
from jitckpt.state.named_things import NamedThings, is_thing
from jitckpt.state.plain_attributes import (
    NO_OPTIMIZERS,
    AttributesNow,
    OptimizersTensors,
    Owner,
    PlainAttributes,
)
from jitckpt.state.plain_values import SCALARS, THING

PART = "variables"
MOST_BYTES = 100_000  # of tensors and arrays, in all of them
# Of these two variables may have one and go their own ways: they can't be changed in their place.
UNCHANGEABLE = (*SCALARS, tuple, frozenset, enum.Enum, numpy.generic)
LACKING = (
    "The save has {names}, which the script's loop had changed. There is no such variable where the loop "
    "goes on now, so it is put into nothing, and this run may differ from an undisturbed one. Keep the "
    "functions and variables around the loop as in the start that has saved."
)

NOTHING: Mapping[str, object] = MappingProxyType({})
Scopes = Mapping[str, Mapping[str, Any]]  # variables by their names, of the places that are there now


class VariablePlace(NamedTuple):
    """What a place's text says. function: "" for a module; object: the variable with it, "" for none."""

    module: str
    function: str
    object: str

    @property
    def is_function(self) -> bool:
        return bool(self.function) and not self.object

    @property
    def outer(self) -> str:
        """The place that has the object."""
        return f"{self.module}:{self.function}"


@cache
def where(place: str) -> VariablePlace:
    module, function, variable = f"{place}:".split(":")[:3]
    return VariablePlace(module, function, variable)


def place_inside(place: str, name: str) -> str:
    """Return the place of what the object holds that a place has in this variable."""
    return f"{place}.{name}" if where(place).object else f"{place}:{name}"


class VariablesNow(NamedTuple):
    """What variables are in the middle of an iteration.

    parts: of the rank's own state, in the place of what the iteration before has left. unchanged: in words,
    the variables that are as that has left them, so that the rest of the iteration may be to change them.
    at: where the training is, in words.
    """

    parts: dict[str, Encoded]
    unchanged: list[str]
    at: str = ""


class KeptVariables:
    """All of a job's that are plain values, by place and name; what never changes is in no save."""

    def __init__(
        self,
        lies_in_parameter: Callable[[Tensor], bool] = lambda tensor: False,
        optimizers: OptimizersTensors = NO_OPTIMIZERS,
    ) -> None:
        """lies_in_parameter, optimizers: as of PlainAttributes."""
        self._values: dict[str, dict[str, Any]] = {}  # while they are looked at
        self._owners: dict[str, Owner] = {}  # of these
        self._names: dict[str, set[str]] = {}
        self._behind: dict[str, set[str]] = {}  # of these, what is looked at where a loop may be at its end
        self.is_at_last = False  # it may be there
        self._first: dict[str, dict[str, Any]] = {}  # copies of what they were at first
        self._aliases: dict[tuple[str, str], tuple[str, str]] = {}  # other names, of what is kept under these
        self.things = NamedThings()
        self._attributes = PlainAttributes(
            {},
            most_bytes=MOST_BYTES,
            named=_named,
            lies_in_parameter=lies_in_parameter,
            optimizers=optimizers,
            things=self.things,
        )
        self._told: dict[str, dict[str, Any]] = {}
        self._there: frozenset[str] = frozenset()  # the places that were there as they were looked at last
        self._counters = Counters()
        self._counted = self._counters.capture()
        self._captured = self._given = Encoded({}, {})
        self.earlier = EarlierLoops()
        self._saved: dict[str, Mapping[str, Any]] = {}  # what was restored and is in no variable yet

    @property
    def problems(self) -> list[str]:
        """Sentences that name what is not kept; whoever says them empties it."""
        return self._attributes.problems

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look at, and nothing to put back."""
        return not (self._names or self._saved)

    def places(self) -> set[str]:
        """Return where there is something to look at, or to put back."""
        return self._names.keys() | self._saved.keys()

    @contextmanager
    def looking(self, scopes: Scopes, objects: Mapping[str, object] = NOTHING) -> Iterator[None]:
        """Have the values of the places that are there. objects: which some of the places are inside of.

        Between two looks none is held: the script may let go of a tensor to have its memory for the next one.
        """
        try:
            for place in scopes.keys() & self._names.keys():
                self._fill(place, scopes[place])
            self._attributes.objects = objects
            self._attributes.absent = self._names.keys() - scopes.keys()
            yield
        finally:
            self._attributes.objects = NOTHING
            for values in self._values.values():
                values.clear()

    def follow(self, place: str, name: str, value: object) -> None:
        """Keep a variable from its first change on, if it is plain; by now it is as the script has built it.

        An object that another variable has is kept there, until one of them is set to something else.
        """
        self._begin(place)
        self._behind.get(place, set()).discard(name)
        if name in self._names[place]:
            return
        there, called = self._aliases.get((place, name), (place, name))
        if self._values.get(there, {}).get(called, value) is not value:
            self.follow_changed(place, name, value)  # it was another name of that, and is not now
        elif (other := self._other_name(place, name, value)) is not None:
            self._aliases[place, name] = other
        else:
            self._follow(place, name, value)

    def _follow(self, place: str, name: str, value: object) -> None:
        self._begin(place)
        if name in self._names[place]:
            self._aliases.pop((place, name), None)
            return
        self._values[place][name] = value
        self._attributes.begin_with(place, name)
        if self._attributes.keeps(place, name):
            self._names[place].add(name)
            self._first[place][name], *_ = plain_values.copy(value, (), {}, None, name_of=self.things.name_of)
            if self._aliases.pop((place, name), None):
                self._attributes.has_changed(place, name)
        else:
            del self._values[place][name]

    def follow_changed(self, place: str, name: str, value: object) -> None:
        """Keep a variable that has changed by now: it may have become another name of what is kept."""
        self._follow(place, name, value)
        if name in self._names[place]:
            self._first[place].pop(name, None)
            self._attributes.has_changed(place, name)

    def follow_behind(self, place: str, name: str, value: object) -> None:
        """Keep a variable as it is where a loop may be at its end; there alone it is looked at."""
        if name in self._names.get(place, ()) and name not in self._behind.get(place, ()):
            return
        self._begin(place)
        self._behind.setdefault(place, set()).add(name)
        self.follow_changed(place, name, value)

    def note_loop(self, loop: str) -> str | None:
        """Keep all as it is now, as a loop has ended, for the rest of the epoch, as of EarlierLoops."""
        return self.earlier.note(loop, self._told) if self._told else None

    def keeps(self, place: str, name: str, value: object) -> bool:
        """Return whether a variable is kept, under this name or as an object that has another one, too."""
        is_kept = name in self._names.get(place, ()) and self._attributes.keeps(place, name)
        return is_kept or self._other_name(place, name, value) is not None

    def is_whole(self, value: object, generators: Collection[int]) -> bool:
        """Return whether a copy has all of a value. generators: ids of those kept wherever they lie."""
        return plain_values.is_whole(value, generators, self.things.name_of)

    def put_alone(
        self, scope: Mapping[str, Any], values: Mapping[str, Any], *, objects: bool
    ) -> dict[str, Any]:
        """Return what a place's variables are to be set to, but for what others in it are needed for.

        objects: those that `put_objects` is for; else the others.
        """
        found = {}
        for name, value in values.items():
            if plain_values.is_deleted(value) or plain_values.is_another_object(value) != objects:
                continue
            if all(one[0] == THING for one in plain_values.other_names_in(value)):
                with suppress(LookupError):
                    whole = plain_values.with_others(value, lambda _, *called: self.things.thing_of(*called))
                    found[name] = plain_values.put(scope.get(name), whole)
        return found

    def take(self, scopes: Scopes, built: Mapping[str, Collection[str]], *, same_round: bool = False) -> None:
        """Look at the variables of the places that are there; `capture` returns what they are now.

        While `looking` at these. built: names of those that are as a restart builds them but for what was
        changed in their place. same_round: as of Counters.look.
        """
        self.look(scopes, built)
        self._counters.look(self._told, same_round=same_round)

    def look(self, scopes: Scopes, built: Mapping[str, Collection[str]]) -> None:
        """Do so where no iteration has ended."""
        for place in scopes.keys() & self._names.keys():
            self._attributes.built_again(place, built.get(place, ()))
        self._there = frozenset(scopes)
        self._follow_parted(scopes)
        changed = self._attributes.changed()
        told = {place: changed[place] for place in sorted(scopes.keys() & changed.keys())}
        if told.keys() != self._told.keys() or any(told[place] is not self._told[place] for place in told):
            tree, tensors = tree_codec.encode(told, PART)
            if tree == self._captured.tree:
                tree = self._captured.tree  # by which is told that nothing but numbers is new
            self._told, self._captured = told, Encoded(tree, tensors)

    def capture(self) -> Encoded:
        """Return what has changed as it was looked at last; the same object while nothing is new."""
        self._given = self._captured
        return self._given

    def capture_counters(self) -> Encoded:
        """Return which of them are counters; the same object while none is new."""
        self._counted = self._counters.capture()
        return self._counted

    def is_same(self) -> bool:
        """Whether all that captures would return the same objects."""
        is_counted = self._counters.capture() is self._counted
        return self._captured is self._given and is_counted and self.earlier.is_same()

    @property
    def told(self) -> Seen | None:
        """What tells by itself that `is_same`; None if it is not now."""
        if not self.is_same():
            return None
        seen = Seen()
        seen.entry(vars(self), "_captured")
        seen.entry(vars(self), "_counters")
        seen.entry(vars(self._counters), "_told")
        seen.entry(vars(self.earlier), "_captured")
        return seen

    def now(
        self,
        scopes: Scopes,
        built: Mapping[str, Collection[str]],
        objects: Mapping[str, object] = NOTHING,
    ) -> VariablesNow:
        """Return what they are now, in the middle of an iteration, and leave all as it was looked at last.

        objects: as of looking. What is new on a device is as it was then: what the host has ordered there may
        never be done.
        """
        scopes = {place: scope for place, scope in scopes.items() if place in self._there}
        now = self._as_looked_at_last()
        with now.looking(scopes, objects):
            now.look(scopes, built)
        told = self._told | now._told  # what is not there now, as a generator between two batches, waits
        before, unchanged = self._told, []
        counted = counters.without(self._counters.capture().tree, told, before)
        for place, of_place in told.items():
            unchanged += [
                _named(place, name)
                for name, value in of_place.items()
                if value is before.get(place, {}).get(name) and name not in counted.get(place, ())
            ]
        parts = {PART: tree_codec.encode(told, PART), counters.PART: Encoded(counted, {})}
        return VariablesNow(parts, unchanged)

    def _as_looked_at_last(self) -> "KeptVariables":
        """Return what knows the same, and shares nothing that changes."""
        now = copy.copy(self)
        now._names = {place: {*names} for place, names in self._names.items()}
        now._first = {place: {**first} for place, first in self._first.items()}
        now._aliases = {**self._aliases}
        now._values = {place: {} for place in self._values}
        now._owners = {place: _owner(place, values) for place, values in now._values.items()}
        now._attributes = AttributesNow(self._attributes, {**now._owners})
        return now

    def restore(
        self,
        saved: Mapping[str, Mapping[str, Any]] | None,
        counted: Mapping[str, Collection[str]] | None = None,
        earlier: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
    ) -> None:
        """Note what `capture`, `capture_counters` and `earlier` returned, decoded; `put` puts it back."""
        self._saved = {**(saved or {})}
        self.earlier.restore(earlier)
        self._counters.restore(counted)

    def has_restored(self, place: str, name: str) -> bool:
        """Return whether there is something to put back for a variable."""
        return name in self._saved.get(place, ())

    def put_objects(
        self, scopes: Scopes, may_have: Mapping[str, Collection[str]]
    ) -> dict[str, dict[str, Any]]:
        """Do so for variables that have other objects than the script has built, before `put`.

        What such an object holds goes by the variable's name: it must not be put into the other one.
        """
        found: dict[str, dict[str, Any]] = {}
        for place in scopes.keys() & self._saved.keys():
            saved = self._saved[place]
            objects = {
                name: value
                for name, value in saved.items()
                if plain_values.is_another_object(value) and name in may_have.get(place, saved)
            }
            self._saved[place] = {name: value for name, value in saved.items() if name not in objects}
            found[place] = objects
        return self._put_known(scopes, {place: objects for place, objects in found.items() if objects})

    def put(self, scopes: Scopes, may_have: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
        """Put back what was restored, in the places that are there; return what is to be set to new values.

        What an object of these had deleted is taken from its place.

        What no save had yet is as it was at first: a script whose loop over epochs is no loop of the job has
        run through those that were done, without batches, and may have changed it. While `looking` at these.
        may_have: the names that a function may have; others may have any.
        """
        of_places: dict[str, dict[str, Any]] = {}
        for place in scopes.keys() & self.places():
            saved, scope = self._saved.pop(place, {}), scopes[place]
            known = {name: value for name, value in saved.items() if name in may_have.get(place, saved)}
            if lacking := {name: value for name, value in saved.items() if name not in known}:
                self._saved[place] = lacking
            self._begin(place)
            self._names[place].update(known)
            self._fill(place, scope)
            of_places[place] = known
        changed = self._attributes.changed()
        for place, known in of_places.items():
            first = self._first[place]
            names = first.keys() & changed.get(place, {}).keys() - known.keys()
            known |= {name: first[name] for name in names}
        return self._put_known(scopes, of_places)

    def _put_known(
        self, scopes: Scopes, of_places: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        for place, known in of_places.items():
            self._begin(place)
            self._names[place].update(known)
            self._fill(place, scopes[place])
            for name in known:
                self._first[place].pop(name, None)  # it has changed, and is as it was saved
        self._attributes.restore(of_places)
        for place, known in of_places.items():
            for name in [name for name, value in known.items() if plain_values.is_deleted(value)]:
                if name in scopes[place]:
                    del scopes[place][name]  # type: ignore[attr-defined]
        return {
            place: {
                name: self._values[place][name]
                for name in known
                if _is_new(name, self._values[place], scopes[place])
            }
            for place, known in of_places.items()
        }

    def names(self) -> list[str]:
        """Return which are in a save by now, in words."""
        return in_words(self._told)

    def lacking_places(self) -> set[str]:
        """Return the places of what was restored and is in no variable yet."""
        return {*self._saved}

    def lacking(self) -> str:
        """Return, once, a sentence on what was restored and is not there; "" for none."""
        names = in_words(self._saved)
        self._saved = {}
        return LACKING.format(names=", ".join(names)) if names else ""

    def end(self) -> None:
        """Keep nothing any more."""
        self.__init__()  # type: ignore[misc]

    def _begin(self, place: str) -> None:
        if place not in self._names:
            self._names[place], self._values[place], self._first[place] = set(), {}, {}
            self._owners[place] = _owner(place, self._values[place])
            self._attributes.look_again({**self._owners})

    def _fill(self, place: str, scope: Mapping[str, Any]) -> None:
        values = self._values[place]
        values.clear()
        hidden = () if self.is_at_last else self._behind.get(place, ())
        names = [name for name in sorted(self._names[place]) if name in scope and name not in hidden]
        values.update({name: scope[name] for name in names})

    def _follow_parted(self, scopes: Scopes) -> None:
        """Keep the other names of what was kept under one name, once they have another object than that.

        Or once both have another one than the script has built, which a restart gives to both by their names.
        """
        for (place, name), (there, called) in [*self._aliases.items()]:
            if name in scopes.get(place, ()) and called in scopes.get(there, ()):
                value = scopes[place][name]
                if value is not scopes[there][called]:
                    self.follow_changed(place, name, value)
                elif not self._attributes.is_built((there, called), value):
                    self._follow(place, name, value)

    def _other_name(self, place: str, name: str, value: object) -> tuple[str, str] | None:
        """Return where a value that can be changed in its place is kept as another variable's, too."""
        if isinstance(value, UNCHANGEABLE) or (is_thing(value) and not plain_values.is_object(value)):
            return None
        return next(
            (
                (there, called)
                for there, values in self._values.items()
                for called, other in values.items()
                if other is value
                and (there, called) != (place, name)
                and self._attributes.keeps(there, called)
            ),
            None,
        )


class _Variables:
    """Variables as attributes of an object."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


def _owner(place: str, values: dict[str, Any]) -> Owner:
    """A function's variable may have no value yet in its next call; an object's attribute was deleted."""
    return Owner(_Variables(values), _is_looked_at, deletes=bool(where(place).object))


def _is_looked_at(name: str, value: object) -> bool:
    return True


def _is_new(name: str, values: Mapping[str, Any], scope: Mapping[str, Any]) -> bool:
    return name in values and (name not in scope or values[name] is not scope[name])


def in_words(names: Mapping[str, Collection[str]]) -> list[str]:
    """Return variables of these places in words."""
    return [_named(place, name) for place, of_place in names.items() for name in of_place]


def _named(place: str, name: str) -> str:
    _, function, variable = where(place)
    of = f" of {function}" if function else ""
    return f"the attribute {name!r} of {variable!r}{of}" if variable else f"the variable {name!r}{of}"
