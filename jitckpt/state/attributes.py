"""Attributes of an optimizer that change while it trains and are in no state_dict: counters, slow weights.

Which change is learned, not declared: what an attribute is that never changes, the script builds again; and
much of that (a rank, a process group) is another on every rank, so it must not be taken from a replica. For
the same reason objects of the script's own classes are not kept as those of modules are, which a rank saves
for itself; what changes in them is named.
"""

import itertools
import random
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt._seen import Seen
from jitckpt.state import parallel, plain_values, told_tensors
from jitckpt.state.plain_values import AS_BUILT, SCALARS, Built, NotPlain, Place, TensorMark, TooMuch

# What torch's own class keeps, beside all that begins with _ and names hooks.
# "_opt_called" is set by torch's schedulers, on optimizers of any class.
OF_TORCH = frozenset({"state", "param_groups", "defaults", "step", "add_param_group", "_opt_called"})
DEPTH = 3  # to which objects of other classes are looked into
MOST_VALUES = 100_000  # in one attribute: as many take a tenth of a second
OPAQUE = (nn.Module, Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
_UNKNOWN = object()
# Classes of a framework's, what is in which is kept otherwise, or made anew in each minibatch; it adds them.
KEPT_OTHERWISE: list[type] = []

CHANGES = (
    "A save lacks {name}, a {kind}, which changes and can't be saved without pickle, or has come to lie in a "
    "parameter's memory: after a restart it is as the script builds it. Keep what matters in `extra`, or let "
    "its state_dict say it."
)
TOO_MUCH = (
    "A save lacks {name}, which has more than {values} values: whether it changes is not looked at, and "
    "after a restart it is as the script builds it. Keep what matters in `extra`, or let its state_dict say "
    "it."
)


class ChangedAttributes:
    """Of one object, since this was made of it."""

    def __init__(self, owner: object, optimizer: Optimizer, wrappers: Iterable[object] = ()) -> None:
        """optimizer: the one that is saved: what `owner` has of its parameters and state is no more news.

        wrappers: what is around it, each of which is looked at by itself.
        """
        self._owner, self._optimizer = owner, optimizer
        self._wrappers = {*map(id, wrappers)}
        self._marks: dict[str, Any] = {}
        self._built: dict[str, Built] = {}
        self._changed: dict[str, Any] = {}  # as a save has it, with the very tensors
        self._unsavable: set[str] = set()
        self._dropped: set[str] = set()
        self.problems: list[str] = []  # sentences that name what changes and can't be saved
        self.looks = hasattr(owner, "__dict__")
        self.told: Seen | None = None  # what tells that `changed` would return what it just did
        # torch's own optimizers keep nothing there; what the script has put there has a plain name.
        self._is_torchs = type(owner).__module__.startswith("torch.")
        known = self._known()
        for name, value in self._attributes():
            walk = _Marks(known)
            try:
                self._marks[name] = walk.of(value)
            except TooMuch:
                self._drop(name)
            else:
                self._built[name] = walk.built

    def changed(self) -> dict[str, Any]:
        """Return what has changed by now, by name; what can't be saved is put into `problems` once."""
        if self.told is not None and self.told.is_same():
            return self._changed
        known, there = set[int](), set()
        told: Seen | None = self._look()
        for name, value in self._attributes():
            there.add(name)
            if type(value) not in SCALARS:
                told = None  # it may change in its place
            if not known and type(value) not in SCALARS:  # of torch's own optimizers none is as a rule
                known = self._known()
            try:
                mark = _mark(value, known)
                if not plain_values.is_same(mark, self._marks.get(name, _UNKNOWN)):
                    self._marks[name] = mark
                    self._keep(name, value, known)
            except TooMuch:
                self._drop(name)
        self._changed = {name: value for name, value in self._changed.items() if name in there}
        self.told = told
        return self._changed

    def _look(self) -> Seen:
        """Look at which attributes there are and which objects they are."""
        seen = Seen()
        if self.looks:
            attributes = vars(self._owner)
            seen.attribute(self._owner, "__dict__")
            seen.size(attributes)
            for name in [*attributes]:
                seen.entry(attributes, name)
        return seen

    def restore(self, saved: Mapping[str, Any], *, in_place: bool = True) -> None:
        """Put back what `changed` returned; what there is no place for is named in `problems`."""
        self.told = None
        for name, value in saved.items():
            here = vars(self._owner).get(name)
            try:
                put = plain_values.put(here, value, in_place=in_place)
            except LookupError:
                self.problems.append(plain_values.LACKING.format(name=self._named(name)))
                continue
            if put is not here:
                setattr(self._owner, name, put)
            self._marks[name] = _UNKNOWN  # from now on it is in each save

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, value in [*vars(self._owner).items()] if self.looks else ():
            hook = name.startswith("_") and "hook" in name
            others = ("_" if self._is_torchs else "_jitckpt",)
            if not (hook or name in OF_TORCH or name in self._dropped or name.startswith(others)):
                yield name, value

    def _known(self) -> set[int]:
        """Return the ids of what is looked at by others."""
        groups = self._optimizer.param_groups
        parameters = {id(one) for group in groups for one in group["params"]}
        return parameters | self._wrappers | {*map(id, (self._optimizer, groups, self._optimizer.state))}

    def _memory(self) -> set[int]:
        """Return where the parameters lie."""
        parameters = (one for group in self._optimizer.param_groups for one in group["params"])
        return {place for one in parameters for place in parallel.storages(one)}

    def _keep(self, name: str, value: Any, known: Collection[int]) -> None:
        """Tell the attribute as a save has it, or name it."""
        walk = _Told(known, self._memory, self._built.get(name, {}))
        try:
            self._changed[name] = walk.of(value)
        except NotPlain:
            self._changed.pop(name, None)
            if name not in self._unsavable:
                self._unsavable.add(name)
                kind = type(value).__qualname__
                self.problems.append(CHANGES.format(name=self._named(name), kind=kind))
        self._built[name] = walk.built

    def _drop(self, name: str) -> None:
        self._dropped.add(name)
        self._changed.pop(name, None)
        self.problems.append(TOO_MUCH.format(name=self._named(name), values=MOST_VALUES))

    def _named(self, name: str) -> str:
        return f"the attribute {name!r} of {type(self._owner).__qualname__}"


def _mark(value: Any, known: Collection[int]) -> Any:
    if type(value) in SCALARS:
        return value
    plain = plain_values.plain_copy(value)
    return _Marks(known).of(value) if plain is None else plain


class _Walk(plain_values.Walk):
    most_values, most_bytes = MOST_VALUES, float("inf")  # tensors may be as large as the parameters are
    known: Collection[int]  # ids of what is looked at by others

    def of(self, value: Any, place: Place = ()) -> Any:
        return self.other(value, place) if id(value) in self.known else super().of(value, place)


class _Marks(_Walk):
    """Marks; of what can't be looked into, which object it is."""

    def __init__(self, known: Collection[int]) -> None:
        super().__init__(set(), TensorMark, plain_values.digest)
        self.known, self._objects = known, 0

    def key(self, key: Any) -> Any:
        return key if type(key) in SCALARS else (type(key), id(key))

    def other(self, value: Any, place: Place) -> Any:
        which = type(value), id(value)
        if id(value) in self.known or isinstance(value, (*OPAQUE, *KEPT_OTHERWISE)):
            self.built[place] = value
        elif isinstance(value, Tensor):
            own = parallel.memory_of(value)
            return which if own.is_inference() else (*which, TensorMark(own))
        elif (state := _state_of(value)) is not None:
            return *which, state
        elif self.depth and isinstance(value, Mapping):
            parts = enumerate([*value.items()])
            return *which, [(self.key(key), self.of(one, (place, at))) for at, (key, one) in parts]
        elif self.depth and not type(value).__module__.startswith(("torch.", "builtins")):
            return *which, self._attributes_of(value, place)
        return which

    def _attributes_of(self, value: Any, place: Place) -> Any:
        if self._objects == DEPTH:
            return None
        self._objects += 1
        try:
            kept = [*getattr(value, "__dict__", {}).items(), *plain_values.slots_of(value)]
            self.take(len(kept), 0)
            return [(name, self.of(one, (place, name))) for name, one in kept]
        finally:
            self._objects -= 1


class _Told(_Walk):
    """Tells a value as a save has it, with its very tensors and arrays."""

    def __init__(self, known: Collection[int], memory: Callable[[], set[int]], before: Built) -> None:
        """memory: where the parameters lie; what the training sets there would be apart after a restart."""
        super().__init__(set(), self._tensor, lambda one: one, before=before)
        self.known, self._memory = known, cache(memory)

    def _tensor(self, tensor: Tensor) -> Any:
        if self.is_in_new and not self._memory().isdisjoint(parallel.storages(tensor)):
            raise NotPlain
        # No graph outlives its minibatch.
        return told_tensors.told(tensor, lambda one: one.detach() if one.requires_grad else one)

    def other(self, value: Any, place: Place) -> Any:
        if self.is_in_new or not self._is_built(value, place):
            raise NotPlain
        if id(value) in self.known or isinstance(value, (*OPAQUE, *KEPT_OTHERWISE)):
            self.built[place] = value
            return {AS_BUILT: type(value).__qualname__}
        if type(value) in (Tensor, nn.Parameter) and plain_values.is_dense(value):
            return value  # it is trained, so another one would be no parameter
        raise NotPlain

    def _is_built(self, value: object, place: Place) -> bool:
        return self.before is not None and plain_values.is_held(self.before.get(place), value)


def _state_of(value: Any) -> Any:
    """Return what tells the state of a generator of random numbers or a counter; None of others."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return repr(value) if isinstance(value, itertools.count) else None
