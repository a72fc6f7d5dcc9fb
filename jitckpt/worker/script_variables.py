"""Variables of the script that its loop carries on: counters, histories, generators of random numbers.

No save holds them, so after a restart they are as the script sets them before the loop. Which they are is
seen in the code of the loop and of the script's functions that it calls, by what they read before they write
it, and in what changes between the first steps.
"""

import argparse
import dis
import enum
import inspect
import itertools
import operator
import random
import time
import weakref
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from jitckpt.data.generators import samplers
from jitckpt.data.kept_generator import GENERATORS
from jitckpt.state import module_attributes
from jitckpt.state.kept_variables import place_inside
from jitckpt.state.plain_values import slots_of
from jitckpt.system import installed
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker import advice
from jitckpt.worker.carried_names import (
    counted_beside,
    loops_around,
    made_anew,
    overwritten,
    read_first,
    set_now_and_then,
    target_of,
)
from jitckpt.worker.frames import frames_that_ask, is_ours, place_of, scripts_frames, variables_of
from jitckpt.worker.held_variables import HeldVariables, marks_before
from jitckpt.worker.holders import defaults_of, path_to
from jitckpt.worker.variable_keeper import VariableKeeper

LOOKS = 3  # after the first steps: a loop does in each iteration what it does in these
MOST_VALUES = 2000  # that are looked at in one variable
MOST_BYTES = 1 << 26  # of an array, which takes some milliseconds
DEPTH = 3  # to which objects of the script's own classes are looked into
SHOWN = 8  # names
MOST_LOOPS = 8  # before the first optimizer step
MOST_PARTS = 16  # of a module that was not given, such as one that computes losses
CLOCKS = (time.time, time.perf_counter, time.monotonic)
CLOCK_SECONDS = 10.0  # a clock was read no longer than this before the first look, or since
OTHERS_AFFAIR = (nn.Module, Optimizer, DataLoader, Dataset, Sampler)
ITERATORS: tuple[Any, ...] = (
    GeneratorType,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    itertools.count,
    itertools.cycle,
)
CONTAINERS = (list, tuple, dict, deque, set)
OF_BYTES = (bytearray, array)
AROUND_CONTAINERS = (UserList, UserDict)
VALUES = (type(None), bool, int, float, complex, str, bytes, numpy.ndarray, numpy.generic, Tensor, enum.Enum)
ARRAYS = (numpy.ndarray, Tensor)
NAMESPACES = (argparse.Namespace, SimpleNamespace)
NUMBERS = (bool, int, float, complex)
CONSTANTS = (type(None), *NUMBERS, str, bytes)
OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in each
# Where torch keeps what it calls for a module, a tensor or an optimizer.
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_OPAQUE = "*opaque"
_LIBRARIES = installed.folders()

TEXT = (
    "The loop changes variables of the script that no save holds: {names}. After a failure they are as the "
    "script sets them before the loop. If the training, or what you print of it, depends on them, {keep}; "
    "what each iteration writes anew before it reads it needs nothing."
)


class _Seen:
    """What was seen at one loop that makes optimizer steps.

    It is looked at after its first minibatches and then ever less often, as that takes some milliseconds.
    """

    def __init__(self, *, in_each: bool = False) -> None:
        """in_each: look at it in each iteration."""
        self._in_each = in_each
        self.place: tuple[CodeType, tuple[int, ...]] | None = None
        self.looks = 0
        self.is_over = False
        self.before: dict[str, object] = {}
        self.changed: dict[str, None] = {}
        self.named: set[str] = set()
        self.held: HeldVariables | None = None
        self._round: object = None
        self._rounds = self._asked = 0

    def is_due(self, of_round: object = None) -> bool:
        """Whether to look at it now: the script asks for the next minibatch, in this round of the loop."""
        if of_round != self._round or not self._rounds:
            self._round, self._rounds, self._asked = of_round, self._rounds + 1, 0
            if self.looks >= LOOKS and not self._in_each:
                self.before = {}  # what changes between two rounds is set for the next one
        self._asked += 1
        often = self._in_each or self.looks < LOOKS
        return not self.is_over and (often or (_is_power(self._rounds) and _is_power(self._asked)))


def _is_power(number: int) -> bool:
    """Whether it is a power of two."""
    return number & (number - 1) == 0


class ScriptVariables:
    """Of one job; told whenever the loop goes on after optimizer steps."""

    def __init__(
        self,
        given: Iterable[object],
        extra: object,
        steps: Callable[[], int],
        warn: Callable[[str], None],
        *,
        of_epochs: bool = False,
        of_round: Callable[[], object] = lambda: None,
        said: set[object] | None = None,
        targets: set[object] | None = None,
        kept: Callable[[], Collection[object]] = tuple,
        keeper: Callable[[], VariableKeeper | None] = lambda: None,
    ) -> None:
        """given: objects that others look after. steps: how many optimizer steps were made.

        of_epochs: of the loop over epochs, which is looked at in each: what changes is named at once.
        of_round: returns which round of the loop it is, a pass over a loader for one.
        said: what was named by now, of this loop and of others that have the same set.
        targets: where loops of the job put what they give: ids of objects, with an attribute or a key.
        kept: returns the ids of what is kept besides. keeper: returns who keeps the variables that can be.
        """
        self._given, self._extra = [*given], extra
        self._began = [clock() for clock in CLOCKS]
        self._of_epochs, self._of_round = of_epochs, of_round
        self._said = set() if said is None else said
        self._targets = set() if targets is None else targets
        self._kept, self._keeper = kept, keeper
        self._steps, self._warn = steps, warn
        self._seen: dict[tuple[int, int], _Seen] = {}  # by the code that asks, and the place in it
        self._plain = _Seen()  # of the first loop that tells nothing of its minibatches
        self._ended: list[tuple[FrameType, int]] = []  # the script's, as a step was made, and where they were
        self._first: dict[tuple[CodeType, int], dict[str, object]] = {}  # marks as loops began, by places
        self._asked: set[tuple[CodeType, int]] = set()  # where it was asked for a minibatch
        self._askers: set[CodeType] = set()  # of generators that draw from loops of the job
        self.script_restores = False  # it has called restore() itself, and can count from there

    def look(self, frame: FrameType) -> None:
        """The script asks for its next minibatch from this frame; generators of it may lie between."""
        place = id(frame.f_code), frame.f_lasti
        if (seen := self._seen.get(place)) is None:
            if len(self._seen) == MOST_LOOPS:
                return
            self._askers.add(frame.f_code)
            seen = self._seen[place] = _Seen(in_each=self._of_epochs)
        if seen.is_due(self._of_round()) and (frames := frames_that_ask(frame)):
            self._try(seen, frames[-1], (frames[-1].f_lasti,), frames[:-1])
        if seen.held is not None and (names := seen.held.look(frame)):
            self._name_held(names, frame)

    def loop_begins(self, frame: FrameType) -> None:
        """The script asks for a minibatch from this frame, and has made no optimizer step since it did."""
        if (asks := (frame.f_code, frame.f_lasti)) in self._asked:
            return
        self._asked.add(asks)
        self._askers.add(frame.f_code)
        for one in frames_that_ask(frame)[-1:]:
            place = one.f_code, one.f_lasti
            if place not in self._first and len(self._first) < MOST_LOOPS:
                with suppress(Exception):
                    self._first[place] = marks_before(*place, variables_of(one))
                    self._marks(one, (one.f_lasti,))  # what is found is kept from its first change on

    def _name_held(self, names: Sequence[str], frame: FrameType) -> None:
        for one in frames_that_ask(frame)[-1:]:
            scope, (kept_names, kept) = variables_of(one), self._known()
            names = [name for name in names if name not in kept_names and id(scope.get(name)) not in kept]
            names = [name for name in names if not self._is_spared(scope.get(name), one.f_code)]
            if (keeper := self._keeper()) is not None:
                keeper.follow(one, names, have_changed=True)
            self._say(names, one)

    # Where the loop tells nothing of its minibatches these two tell of it, while it is looked at.

    @property
    def is_looking(self) -> bool:
        return not self._plain.is_over

    def step_ended(self, frame: FrameType | None) -> None:
        """The script has made an optimizer step, somewhere below this frame."""
        # Kept until the next minibatch begins, as a frame that has ended may leave its address to another.
        self._ended = [(one, one.f_lasti) for one in scripts_frames(frame)] if self._plain.is_due() else []

    def minibatch_begun(self, frame: FrameType | None) -> None:
        """The script begins a minibatch: the innermost of its frames that made the step has the loop."""
        ended, self._ended = self._ended, []
        for one in scripts_frames(frame) if ended else ():
            for other, place in ended:
                if one is other:
                    self._try(self._plain, one, (place, one.f_lasti))
                    return

    def _try(
        self, seen: _Seen, frame: FrameType, at: tuple[int, ...], between: Sequence[FrameType] = ()
    ) -> None:
        try:
            self._look(seen, frame, at, between)
        except Exception:  # what a variable's own methods raise is not the training's affair
            seen.is_over = True

    def _look(self, seen: _Seen, frame: FrameType, at: tuple[int, ...], between: Sequence[FrameType]) -> None:
        """between: generators of the script's, between the job's loop and that in this frame."""
        place = frame.f_code, at
        seen.place = seen.place or place
        if place != seen.place:
            return
        seen.looks += 1
        if len(at) == 1:
            self._note_target(frame)
            if seen.looks == 1 and not self._of_epochs:
                seen.held = HeldVariables(frame.f_code, *at, self._first.get((frame.f_code, *at), {}))
        elif seen.looks == LOOKS:
            seen.is_over = _is_in_another(frame, at)  # which may change more between two rounds of this one
        now = self._marks(frame, at)
        for generator in between:
            now |= self._marks_of_generator(generator)
        for name, mark in now.items():
            if name in seen.before and seen.before[name] != mark and name not in seen.named:
                seen.changed[name] = None
        seen.before = now
        if (seen.looks >= LOOKS or self._of_epochs) and seen.changed:
            changed, seen.changed = [*seen.changed], {}
            seen.named |= {*changed}
            self._say(changed, frame)

    def _note_target(self, frame: FrameType) -> None:
        """Note the attribute that a for statement over a loop of the job sets: a restart sets it, too."""
        target = target_of(frame.f_code, frame.f_lasti)
        if target is not None:
            (name, *path), key = target
            owner = variables_of(frame)[name]
            for attribute in path:
                owner = getattr(owner, attribute)
            self._targets.add((id(owner), key))

    def _say(self, changed: Sequence[str], frame: FrameType) -> None:
        """Name them, but for what another loop has named; two functions' variables may have one name."""
        scope, code = variables_of(frame), frame.f_code
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        keys: dict[str, object] = {}
        for name in changed:
            if isinstance(scope.get(name), CONTAINERS):
                keys[name] = name, id(scope[name])
            else:
                keys[name] = (name, code) if name in local else name
        names = [name for name, key in keys.items() if key not in self._said]
        self._said |= {*keys.values()}
        if (keeper := self._keeper()) is not None:
            kept = [name for name in names if keeper.keeps(frame, name)]
            keeper.say_kept(kept)
            names = [name for name in names if name not in kept]
        if names:
            helps, shown = advice.current(), ", ".join(names[:SHOWN]) + (" ..." if names[SHOWN:] else "")
            text = TEXT.format(names=shown, keep=helps.keep)
            self._warn(text + (helps.counter if any("." not in name for name in names) else ""))

    def _marks(self, frame: FrameType, at: tuple[int, ...]) -> dict[str, object]:
        known = self._known()
        kept = known[1]
        read, carried = read_first(frame.f_code, at)
        if len(at) == 1 and not self._of_epochs:
            carried |= counted_beside(frame.f_code, at)
        if self._of_epochs:
            read, carried = (names | set_now_and_then(frame.f_code, at) for names in (read, carried))
        tells_nothing = len(at) > 1
        scope = variables_of(frame)
        used = {id(one): one for one in (*self._given, *scope.values())}.values()
        reached = _reached_from(frame, read, used)
        attributes = _carried_in(frame.f_code).union(*(one.carried for one, _ in reached))
        marks, places = self._marks_of_reached(reached, frame, known, tells_nothing, attributes)
        modules = _not_given(scope, read, self._given, frame)
        of_modules, places_in_modules = _in_other_modules(modules, kept)
        marks |= of_modules
        places |= places_in_modules
        ours = {id(part) for _, _, module in modules for part in module.modules()}
        models = [one for one in used if isinstance(one, nn.Module) and id(one) not in ours]
        marks |= _in_modules(models, kept)
        # Between two passes they may change: as a sampler is when one begins, it is kept.
        loaders = [one for one in used if isinstance(one, DataLoader)]
        if self._of_epochs:
            marks |= _shared_in(loaders)
        else:
            marks |= _in_loaders(loaders, kept, attributes, tells_nothing)
        anew = {name for name in made_anew(frame.f_code, at) if isinstance(scope.get(name), GENERATORS)}
        own = self._marks_of(
            {name: one for name, one in scope.items() if name not in anew},
            read,
            carried,
            known,
            tells_nothing=tells_nothing,
            code=frame.f_code,
            attributes=attributes,
        )
        places |= _of_classes(own.keys() - scope.keys(), scope)
        if not tells_nothing and (keeper := self._keeper()) is not None:
            # What may come back in another way, by restore() or `extra`, is not named; kept it can be. So can
            # what is set in some iterations alone.
            numbers = [name for name in carried if self._is_number(scope.get(name))]
            keeper.note({name: place for name, place in places.items() if place and name not in own})
            keeper.follow(frame, [*own, *places, *numbers, *self._numbers_in(scope, read, known)])
        return marks | own

    def _marks_of_reached(
        self,
        reached: Iterable[tuple["_Reached", bool]],
        frame: FrameType,
        known: tuple[set[str], set[object]],
        tells_nothing: bool,
        attributes: frozenset[str],
    ) -> tuple[dict[str, object], dict[str, tuple[str, str] | None]]:
        """Return marks of what functions read, and where it lies; None: with this frame."""
        marks: dict[str, object] = {}
        places: dict[str, tuple[str, str] | None] = {}
        for variables, notes in reached:
            found = self._marks_of(
                variables.values,
                variables.values.keys(),
                variables.written,
                known,
                tells_nothing=tells_nothing,
                attributes=attributes,
                notes=notes,
            )
            for name, mark in found.items():
                called, place = variables.name(name, frame)
                marks[called] = mark
                if place is not None or variables.is_of(frame, name):
                    places[called] = place
        return marks, places

    def _marks_of_generator(self, frame: FrameType) -> dict[str, object]:
        """Return marks of what a generator of the script's has: a restart begins it anew."""
        at = (frame.f_lasti,)
        local = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
        scope = {name: value for name, value in variables_of(frame).items() if name in local}
        marks = self._marks_of(
            scope,
            *read_first(frame.f_code, at),
            self._known(),
            tells_nothing=False,
            code=frame.f_code,
            attributes=_carried_in(frame.f_code),
        )
        return {f"{frame.f_code.co_name}.{name}": mark for name, mark in marks.items()}

    def _known(self) -> tuple[set[str], set[object]]:
        """Return names of variables that others look after, and ids of objects, or such with a part."""
        names, ids = kept_by(self._extra)
        given = {id(tensor) for one in self._given for tensor in _tensors_of(one)}
        return names, {*ids, *given, *map(id, self._given), *self._targets, *self._kept()}

    def _marks_of(
        self,
        scope: Mapping[str, object],
        read: Collection[str],
        carried: Collection[str],
        known: tuple[set[str], set[object]],
        *,
        tells_nothing: bool,
        attributes: frozenset[str],
        code: CodeType | None = None,
        notes: bool = False,
    ) -> dict[str, object]:
        """Return marks of these variables. read, carried: names of those that are read, and set as well.

        known: names of variables and ids of objects that others look after. code: the loop's, of its own.
        tells_nothing: the loop, of its minibatches. attributes, notes: as in `_inside`.
        """
        kept_names, kept = known
        marks: dict[str, object] = {}
        for name, value in scope.items():
            is_kept = id(value) in kept and not isinstance(value, CONSTANTS)  # of which many have one
            if name in kept_names or is_kept or name.startswith("__"):
                continue
            if isinstance(value, GENERATORS):
                marks[name] = _state_of(value)
            elif name in carried and not isinstance(value, (*CONTAINERS, *OTHERS_AFFAIR)):
                if is_ours(type(value).__module__):  # an iterator over job.batches
                    continue
                if not self._is_counted(value, code, tells_nothing):
                    marks[name] = _rebound(value)
            elif name in read and isinstance(value, ITERATORS):
                if not self._draws(value):
                    marks[name] = _advanced(value)
            elif name in read and not isinstance(value, OTHERS_AFFAIR):
                for kind in type(value).__mro__:
                    if kind.__name__ not in kept_names and is_scripts_class(kind):
                        marks |= _inside(kind.__name__, kind, kept, attributes)
                marks |= _inside(name, value, kept, attributes, notes=notes)
        return marks

    def _draws(self, iterator: Any) -> bool:
        """Whether an iterator is, or may be, what draws from a loop of the job."""
        if not isinstance(iterator, GeneratorType):
            return False
        is_librarys = iterator.gi_code.co_filename.startswith(_LIBRARIES)
        return is_librarys or iterator.gi_running or iterator.gi_code in self._askers

    def _numbers_in(
        self,
        scope: Mapping[str, object],
        read: Collection[str],
        known: tuple[set[str], set[object]],
    ) -> list[str]:
        """Return the attributes of the script's objects among these variables that are numbers or texts."""
        kept_names, kept = known
        return [
            f"{name}.{key}"
            for name in read
            if name in scope
            and name not in kept_names
            and is_own(scope[name])
            and id(scope[name]) not in kept
            for key, part in attributes_of(scope[name]).items()
            if (self._is_number(part) or type(part) in (bool, str)) and (id(scope[name]), key) not in kept
        ]

    def _is_number(self, value: object) -> bool:
        return type(value) is int or (type(value) is float and not self._is_counted(value, None, False))

    def _is_counted(self, value: object, code: CodeType | None, tells_nothing: bool) -> bool:
        if type(value) is int:
            ahead = value - self._steps()
            # In a loop that tells nothing it may have been counted on before the forward pass.
            counts = self.script_restores and (ahead == 0 or (tells_nothing and ahead == 1))
            return counts or (code is not None and "first" in code.co_names)
        clocks = zip(CLOCKS, self._began, strict=True)
        return type(value) is float and any(
            began - CLOCK_SECONDS < value <= clock() for clock, began in clocks
        )

    def _is_spared(self, value: object, code: CodeType) -> bool:
        """Whether a variable that is set now and then is no state: what draws from a loop, a counter."""
        iterates = isinstance(value, (*ITERATORS, Optimizer, DataLoader, Dataset, Sampler))
        return iterates or is_ours(type(value).__module__) or self._is_counted(value, code, False)


def _is_in_another(frame: FrameType, at: tuple[int, ...]) -> bool:
    """Whether the loop around these places is in another one, of this frame or of one that called it."""
    _, *callers = scripts_frames(frame, generators=True)
    return loops_around(frame.f_code, at) > 1 or any(
        loops_around(one.f_code, (one.f_lasti,)) for one in callers
    )


def _tensors_of(given: object) -> Iterator[Tensor]:
    """Yield the tensors that are saved with an object."""
    if isinstance(given, nn.Module):
        yield from given.parameters()
        for _, buffer in given.named_buffers():
            yield buffer
    elif isinstance(given, Optimizer):
        for group in given.param_groups:
            yield from group["params"]
            yield from (value for value in group.values() if isinstance(value, Tensor))


def _called_by_torch(one: object) -> Iterator[tuple[str, object]]:
    """Yield the functions that torch calls for an object: forward passes, hooks, what makes samples."""
    keepers: list[Any] = []
    if isinstance(one, nn.Module):
        keepers = [*one.modules(), *one.parameters()]
        yield from ((type(part).__qualname__, getattr(part, "forward", None)) for part in one.modules())
    elif isinstance(one, Optimizer):
        keepers = [one]
    elif isinstance(one, DataLoader):
        yield type(one.collate_fn).__qualname__, one.collate_fn
        for name in ("__getitem__", "__iter__"):
            yield type(one.dataset).__qualname__, getattr(one.dataset, name, None)
    for keeper in keepers:
        for hooks in HOOKS:
            for hook in (getattr(keeper, hooks, None) or {}).values():
                yield type(hook).__qualname__, hook


class _Way(NamedTuple):
    """A name that leads to what is called.

    place: where it lies; "": in no variable. holder: as in _Reached.
    """

    name: str
    value: object
    place: str = ""
    holder: str = ""
    depth: int = DEPTH
    kind: type | None = None  # of a method, whose others it may call

    @property
    def called(self) -> str:
        return f"{self.holder}.{self.name}" if self.holder else self.name

    @property
    def inside(self) -> str:
        """The place of what the value holds."""
        return self.place and place_inside(self.place, self.name)


class _Reached(NamedTuple):
    """Variables outside of one of the script's functions that it reads, and the names that it sets of them.

    place: where they lie; "": where a restart does not find them. holder: what has them; "": a module.
    """

    values: dict[str, object]
    written: set[str]
    place: str
    holder: str
    carried: frozenset[str] = frozenset()  # attributes of anything that the function reads, and sets then

    def is_of(self, frame: FrameType, name: str) -> bool:
        """Whether a variable is this frame's, or its module's."""
        root, code = name.partition(".")[0], frame.f_code
        if self.place == place_of(frame):
            return root in self.values
        if self.holder or not self.place:
            return root in code.co_cellvars and self.values.get(root) is variables_of(frame).get(root)
        is_local = root in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
        return self.place == _module_of(frame) and root in self.values and not is_local

    def name(self, name: str, frame: FrameType) -> tuple[str, tuple[str, str] | None]:
        """Return how to call what `_marks_of` calls so, and its place if that is not this frame's."""
        if self.is_of(frame, name):
            return name, None
        root, _, attribute = name.partition(".")
        if root not in self.values:
            return name, _of_classes([name], self.values).get(name)
        if not self.place:
            return name, None
        called = self.holder or self.place.partition(":")[0].rpartition(".")[2]
        inside = (place_inside(self.place, root), attribute) if attribute else (self.place, root)
        return (name if self.place == _module_of(frame) else f"{called}.{name}"), inside


def _reached_from(
    frame: FrameType, read: Iterable[str], used: Iterable[object]
) -> list[tuple[_Reached, bool]]:
    """Return what the functions read that a loop calls, and those that torch calls for objects in use.

    read: the names that the loop reads. With each whether torch calls it.
    """
    scope = variables_of(frame)
    called = [_Way(name, scope[name], place_of(frame, name)) for name in read if name in scope]
    by_torch = [_Way(name, one) for part in used for name, one in _called_by_torch(part)]
    ways = (called, False), (by_torch, True)
    return [(one, notes) for of, notes in ways for one in _of_functions(of, frame.f_code)]


def _module_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}:"


def _of_functions(ways: Iterable[_Way], code: CodeType) -> Iterator[_Reached]:
    """Yield what the script's functions to which these ways lead read, and those that they call themselves.

    code: that calls them.
    """
    waiting = [*ways]
    loaded = _attributes_in(code)
    known: set[int] = set()
    while waiting:
        way = waiting.pop()
        one, kind = way.value, way.kind
        function = one
        if isinstance(one, MethodType):
            yield _Reached({way.name: one.__self__}, set(), way.place, way.holder)
            function, kind = one.__func__, type(one.__self__)
        elif is_own(one):
            yield _Reached({way.name: one}, set(), way.place, way.holder)
            waiting += _methods(type(one), {"__call__", *loaded}, way.depth)
            waiting += [
                _Way(name, part, way.inside, way.called, way.depth)
                for name, part in attributes_of(one).items()
                if isinstance(part, FunctionType | partial)
            ]
            continue
        elif isinstance(one, partial):
            parts = {str(number): part for number, part in enumerate(one.args)} | one.keywords
            yield _Reached(parts, set(), way.inside, way.called)
            inside = way._replace(place=way.inside, holder=way.called)
            parts["func"] = one.func
            waiting += [inside._replace(name=key, value=part) for key, part in parts.items()]
        if not way.depth or id(function) in known or not isinstance(function, FunctionType):
            continue
        known.add(id(function))
        code = function.__code__
        if code.co_filename.startswith((*_LIBRARIES, "<frozen")) or is_ours(function.__module__):
            continue
        variables, held = _variables_of(function, way)
        yield from (variables, held)
        waiting += [
            _Way(name, part, of.place, of.holder, way.depth - 1)
            for of in (variables, held)
            for name, part in of.values.items()
        ]
        if kind is not None:
            waiting += _methods(kind, _attributes_in(code), way.depth - 1)


def _variables_of(function: FunctionType, way: _Way) -> tuple[_Reached, _Reached]:
    """Return what a function reads of its module, and what it holds itself."""
    names, written = _outside(function.__code__)
    outer = {name: function.__globals__[name] for name in names if name in function.__globals__}
    module = f"{function.__globals__.get('__name__', '')}:"
    held = {name: part for name, part in defaults_of(function).items() if not isinstance(part, CONSTANTS)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is there yet
            held[name] = cell.cell_contents
    place, holder = way.inside, way.called
    if (path := path_to(function)) is not None:
        place, holder = place_inside(f"{path[0]}:", path[1]), path[1]
    carried = _carried_in(function.__code__)
    return _Reached(outer, written, module, "", carried), _Reached(held, written, place, holder)


def _methods(kind: type, names: Collection[str], depth: int) -> list[_Way]:
    """Return the methods of a class of the script's that are called so."""
    return [
        _Way(name, one, depth=depth, kind=kind)
        for base in kind.__mro__
        if is_scripts_class(base)
        for name, one in vars(base).items()
        if name in names and isinstance(one, FunctionType)
    ]


def _of_classes(names: Iterable[str], scope: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the places of what classes of these variables' values hold, by the names of `_marks_of`."""
    kinds = {base.__name__: base for value in scope.values() for base in type(value).__mro__ if names}
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        root, _, attribute = name.partition(".")
        if root not in scope and (path := path_to(kinds.get(root))) is not None:
            found[name] = place_inside(f"{path[0]}:", path[1]), attribute
    return found


@cache
def _attributes_in(code: CodeType) -> frozenset[str]:
    """Return the attributes that some code reads."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(found).union(
        *(_attributes_in(one) for one in code.co_consts if isinstance(one, CodeType))
    )


@cache
def _outside(code: CodeType) -> tuple[frozenset[str], set[str]]:
    """Return the global variables that a function reads, and those of others that it sets."""
    loaded: set[str] = set()
    written: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a comprehension's, a lambda's
            loaded |= _outside(inner)[0]
    return frozenset(loaded - overwritten(code, 0, len(code.co_code))), written


def _rebound(value: object) -> object:
    """Return what is another once a variable is set to something else."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    return (id(value), _InPlace(value)) if isinstance(value, ARRAYS) else id(value)


def _in_modules(models: Iterable[nn.Module], kept: set[object]) -> dict[str, object]:
    """Return marks of what modules of the script's own classes keep in attributes, but for numbers.

    Of these those that the training changes are named by who looks after the model.
    """
    marks: dict[str, list[object]] = {}
    for module in {id(one): one for model in models for one in model.modules()}.values():
        kind: Any = type(module)
        if not is_scripts_class(kind) or kind.get_extra_state is not nn.Module.get_extra_state:
            continue
        for name, mark in _inside(kind.__qualname__, module, kept, notes=True).items():
            marks.setdefault(name, []).append(mark)
    return {**marks}


def _not_given(
    scope: Mapping[str, object], read: Collection[str], given: Iterable[object], frame: FrameType
) -> list[tuple[str, str, nn.Module]]:
    """Return the modules that are no part of the models given, with names and the places of what they hold.

    Those in variables, and in attributes of objects of the script's.
    """
    known = {id(part) for one in given if isinstance(one, nn.Module) for part in one.modules()}
    ways = [(name, place_inside(place_of(frame, name), name), scope[name]) for name in read if name in scope]
    for name, place, value in [*ways]:
        if is_own(value):
            inside = attributes_of(value).items()
            ways += [(f"{name}.{key}", f"{place}.{key}", part) for key, part in inside]
    found = []
    for name, place, value in ways:
        if isinstance(value, nn.Module) and id(value) not in known:
            known.add(id(value))
            parts = [*islice(value.named_modules(), MOST_PARTS)]
            found += [
                (f"{name}.{path}".rstrip("."), f"{place}.{path}".rstrip("."), part)
                for path, part in parts
                if part is value or id(part) not in known
            ]
    return found


def _in_other_modules(
    modules: Iterable[tuple[str, str, nn.Module]], kept: set[object]
) -> tuple[dict[str, object], dict[str, tuple[str, str]]]:
    """Return marks of what these modules keep in attributes, and the places of that."""
    marks: dict[str, object] = {}
    places: dict[str, tuple[str, str]] = {}
    for name, place, module in modules:
        may_keep = module_attributes.may_keep(module)
        kind: Any = type(module)
        is_scripts, carried = is_scripts_class(kind), _carried_by(kind)
        found = _inside(name, module, kept, notes=True) if is_scripts else {}
        for key, value in vars(module).items():
            called = f"{name}.{key}"
            if key == module_attributes.MODE or not may_keep(key, value):
                continue
            if type(value) in NUMBERS:
                places[called] = place, key
                if not is_scripts or _lasts_in(module, key in carried, value):
                    marks[called] = _rebound(value)
            elif called in found:
                places[called] = place, key
        marks |= found
    return marks, places


def _in_loaders(
    loaders: Iterable[DataLoader[Any]], kept: set[object], attributes: frozenset[str], tells_nothing: bool
) -> dict[str, object]:
    """Return marks of what datasets and samplers keep in attributes; several may be of one class."""
    marks: dict[str, list[object]] = {}
    objects = [one for loader in loaders for one in (loader.dataset, *samplers(loader))]
    # A sampler of the script's own need not be of torch's class: what it changes in a pass is made again.
    own_samplers = {id(one) for loader in loaders for one in samplers(loader) if is_own(one)}
    for one in {id(one): one for one in objects}.values():
        kind = type(one).__qualname__
        is_placed = isinstance(one, IterableDataset) and not tells_nothing  # its place is kept
        kinds = CONTAINERS if id(one) in own_samplers else (int,) if is_placed else ()
        kept_there = {f"{kind}.{name}" for name, part in _dict_of(one).items() if type(part) in kinds}
        for name, mark in _inside(kind, one, kept, attributes, notes=True).items():
            if name not in kept_there:
                marks.setdefault(name, []).append(mark)
    return {**marks}


def _shared_in(loaders: Iterable[DataLoader[Any]]) -> dict[str, object]:
    """Return marks of the numbers in datasets that all of a loader's processes share: nobody keeps these."""
    return {
        f"{type(loader.dataset).__qualname__}.{name}": _state_of(part)
        for loader in loaders
        for name, part in getattr(loader.dataset, "__dict__", {}).items()
        if isinstance(part, SynchronizedBase)
    }


class _InPlace:
    """A mark of a tensor or an array that is another once it was written to; another object tells nothing."""

    def __init__(self, value: Any) -> None:
        self._value = weakref.ref(value)
        self._content: object = None
        if isinstance(value, Tensor):
            self._content = None if value.is_inference() else value._version
        elif not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            self._content = xxhash.xxh3_64_digest(numpy.ascontiguousarray(value).view(numpy.uint8).data)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _InPlace) and self._value() is other._value() is not None
        return not same or self._content == other._content  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _advanced(iterator: Any) -> object:
    """Return what is another once an iterator has given its next value; a cycle does not tell."""
    if isinstance(iterator, itertools.cycle):
        return object()
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return frame and (frame.f_lasti, {name: _rebound(value) for name, value in frame.f_locals.items()})
    return repr(iterator) if isinstance(iterator, itertools.count) else operator.length_hint(iterator)


def _inside(
    name: str,
    value: object,
    kept: set[object],
    attributes: frozenset[str] = frozenset(),
    *,
    notes: bool = False,
) -> dict[str, object]:
    """Return marks of what an object of the script's changes in its place, by names.

    attributes: those that the loop itself reads before it sets them. notes: other tensors in a container may
    be those of the last forward pass, which nobody reads in the next one.
    What has objects inside that are no values (events, files) is not looked at.
    """
    left = MOST_VALUES

    def marks_in(one: Any, depth: int) -> Iterator[tuple[str, object]]:
        kind: Any = type(one)
        carried = _carried_by(one if isinstance(one, type) else kind)
        if isinstance(one, FunctionType):
            carried = _carried_in(one.__code__)
        for key, part in attributes_of(one).items():
            if (id(one), key) in kept:
                continue
            if isinstance(one, nn.Module) and (key in OF_MODULES or isinstance(part, NUMBERS)):
                continue
            lasts = _lasts_in(one, key in carried or key in attributes, part)
            if lasts and isinstance(part, ARRAYS):
                yield key, None if id(part) in kept else (id(part), _InPlace(part))
            elif lasts:
                yield key, mark(part, depth)
            elif isinstance(part, ARRAYS) and id(part) not in kept:
                yield key, _InPlace(part)

    def mark(one: Any, depth: int) -> object:
        nonlocal left
        left -= 1
        if left < 0 or depth < 0 or id(one) in kept:
            return None
        one = one.data if isinstance(one, AROUND_CONTAINERS) else one
        if isinstance(one, (*GENERATORS, *OF_BYTES, SynchronizedBase)):
            return _state_of(one)
        if isinstance(one, CONTAINERS):
            parts = [*one]
            if isinstance(one, dict):
                parts = [part for key, part in one.items() if (id(one), key) not in kept]
            marks = [mark(part, depth - 1) for part in parts[:MOST_VALUES]]
            return _OPAQUE if any(part is _OPAQUE for part in marks) else (len(one), marks)
        if notes and isinstance(one, ARRAYS):
            return _InPlace(one)
        if is_own(one):
            return [(key, found) for key, found in marks_in(one, depth - 1) if found is not _OPAQUE]
        return _rebound(one) if isinstance(one, VALUES) else _OPAQUE

    found: dict[str, object] = {}
    if isinstance(value, (*CONTAINERS, *OF_BYTES, *AROUND_CONTAINERS, *ARRAYS, SynchronizedBase)):
        found[name] = mark(value, DEPTH)
    elif _has_attributes(value):
        found = {f"{name}.{key}": one for key, one in marks_in(value, DEPTH)}
    return {key: one for key, one in found.items() if one is not _OPAQUE}


def _has_attributes(value: object) -> bool:
    """Whether attributes of it may be the script's."""
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith(_LIBRARIES)
    own = is_scripts_class(value) if isinstance(value, type) else is_own(value)
    return own or isinstance(value, nn.Module | Sampler | Dataset)


def attributes_of(value: Any) -> dict[str, Any]:
    found = {**_dict_of(value), **dict(slots_of(value))}
    if isinstance(value, type | FunctionType):
        return {name: one for name, one in found.items() if not name.startswith("__")}
    return found


@cache
def _carried_by(kind: type) -> frozenset[str]:
    """Return the attributes that a class's own functions read before they set them, and set."""
    carried: set[str] = set()
    for one in kind.__mro__ if is_scripts_class(kind) else ():
        for function in vars(one).values() if is_scripts_class(one) else ():
            if isinstance(function, FunctionType):
                carried |= _carried_in(function.__code__)
    return frozenset(carried)


@cache
def _carried_in(code: CodeType) -> frozenset[str]:
    read: set[str] = set()
    written: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_ATTR" and one.argval not in written:
            read.add(one.argval)
        elif one.opname == "STORE_ATTR":
            written.add(one.argval)
    return frozenset(read & written)


def _lasts_in(owner: object, is_carried: bool, part: object) -> bool:
    """Whether an attribute of this owner that changes is more than a note. is_carried: code carries it on.

    What a sampler of the script's own changes in a pass is made again by the pass; a dataset's generators are
    kept, and a dict of its is a cache as a rule.
    """
    if isinstance(part, SynchronizedBase):
        return True
    if isinstance(owner, Dataset):
        of_tensors = isinstance(part, tuple) and any(isinstance(one, ARRAYS) for one in part)
        is_number = type(part) is int or (type(part) is float and is_carried)
        return isinstance(part, list | deque) or is_number or of_tensors
    if isinstance(owner, Sampler):
        kind: Any = type(owner)
        return isinstance(part, CONTAINERS) and not is_scripts_class(kind)
    return is_carried or _lasts(part)


def _lasts(value: object) -> bool:
    """Whether an attribute that changes is more than a note of the last iteration's result."""
    return (type(value) is int or isinstance(value, (*CONTAINERS, *GENERATORS)) or is_own(value)) and not (
        isinstance(value, OTHERS_AFFAIR)
    )


def is_own(value: object) -> bool:
    kind: Any = type(value)
    others = (*OTHERS_AFFAIR, type, enum.Enum)  # a member of an enum is a value
    return (is_scripts_class(kind) or kind in NAMESPACES) and not isinstance(value, others)


def _dict_of(value: object) -> Mapping[str, Any]:
    """Return an object's attributes, or nothing if its own code for them fails."""
    with suppress(Exception):
        return getattr(value, "__dict__", None) or {}
    return {}


def _state_of(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, OF_BYTES):
        return len(generator), xxhash.xxh3_64_digest(memoryview(generator))
    if isinstance(generator, SynchronizedBase):  # of multiprocessing, which a loader's workers see, too
        return bytes(generator.get_obj())
    state = (
        generator.bit_generator.state
        if isinstance(generator, numpy.random.Generator)
        else generator.get_state()
    )
    return repr(state)


def kept_by(extra: Any) -> tuple[set[str], set[int]]:
    """Return names of variables that the state_dict of `extra` reads, and the ids of what it has inside."""
    names: set[str] = set()
    ids: set[int] = set()
    waiting: list[tuple[Any, int]] = [(extra, DEPTH + 1)] if extra is not None else []
    method = getattr(type(extra), "state_dict", None)
    function: Any = inspect.unwrap(method) if method is not None else None
    if (code := getattr(function, "__code__", None)) is not None:
        names = {*code.co_names, *code.co_freevars}
        scope = inspect.getclosurevars(function)
        waiting += [(one, DEPTH) for one in (*scope.globals.values(), *scope.nonlocals.values())]
    while waiting:
        one, depth = waiting.pop()
        if depth and id(one) not in ids and not isinstance(one, type):
            ids.add(id(one))
            waiting += [(part, depth - 1) for part in _parts(one)]
    return names, ids


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | deque) and len(one) < MOST_VALUES:
        yield from one
    yield from attributes_of(one).values()
