"""Variables of the script that its loop carries on: counters, histories, generators of random numbers.

No save holds them, so after a restart they are as the script sets them before the loop. Which they are is
seen in the code of the loop and of the script's functions that it calls, by what they read before they write
it, and in what changes between the first steps.
"""

import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FrameType, GeneratorType
from typing import Any

import numpy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from jitckpt.data.kept_generator import GENERATORS
from jitckpt.system import installed
from jitckpt.system.bytecode import place_in
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker import advice, process_settings, sampler_values
from jitckpt.worker.carried_names import (
    carried_around,
    counted_beside,
    held,
    loops_around,
    made_anew,
    read_first,
    target_of,
)
from jitckpt.worker.frames import frames_that_ask, is_ours, scripts_frames, variables_of
from jitckpt.worker.held_variables import HeldVariables, marks_before
from jitckpt.worker.kept_by_extra import kept_by
from jitckpt.worker.marks_in_objects import (
    in_loaders,
    in_modules,
    in_other_modules,
    not_given,
    references_in,
    shared_in,
)
from jitckpt.worker.reached_values import Reached, of_classes, reached_from
from jitckpt.worker.value_marks import (
    CONSTANTS,
    CONTAINERS,
    ITERATORS,
    OTHERS_AFFAIR,
    REFERENCES,
    THINGS,
    Which,
    advanced,
    attributes_of,
    carried_in,
    children_of,
    is_own,
    marks_inside,
    rebound,
    state_of,
)
from jitckpt.worker.variable_keeper import VariableKeeper

LOOKS = 3  # after the first steps: a loop does in each iteration what it does in these
SHOWN = 8  # names
MOST_LOOPS = 8  # before the first optimizer step
CLOCKS = (time.time, time.perf_counter, time.monotonic)
CLOCK_SECONDS = 10.0  # a clock was read no longer than this before the first look, or since
MEMBERS = (enum.Enum, numpy.generic)
SET = (*THINGS, *GENERATORS)  # which of them a variable has counts, whoever looks after what is in them
_LIBRARIES = installed.folders()

TEXT = (
    "The loop changes variables of the script that no save holds: {names}. After a failure they are as the "
    "script sets them before the loop. If the training, or what you print of it, depends on them, {keep}; "
    "what each iteration writes anew before it reads it needs nothing."
)

UNSEEN = (
    "The script's variables can't be looked at ({error}), so what its loop changes of them is neither kept "
    "nor named from here on. Keep what the training depends on in `extra`, or write this to the maintainers."
)


class _InRound:
    """A mark in one round of a loop: another round's tells nothing, as its pass begins with what is there."""

    def __init__(self, of_round: object, mark: object) -> None:
        self._round, self._mark = of_round, mark

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InRound) and (self._round != other._round or self._mark == other._mark)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


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
        self.known: set[str] | None = None  # all names that were marked
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
        # Both are powers of two, and no other bit is set in them.
        is_rare = not (self._rounds & (self._rounds - 1) or self._asked & (self._asked - 1))
        return not self.is_over and (often or is_rare)


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
        epochs_at: dict[CodeType, int] | None = None,
        kept: Callable[[], Collection[object]] = tuple,
        keeper: Callable[[], VariableKeeper | None] = lambda: None,
    ) -> None:
        """given: objects that others look after. steps: how many optimizer steps were made.

        of_epochs: of the loop over epochs, which is looked at in each: what changes is named at once.
        of_round: returns which round of the loop it is, a pass over a loader for one.
        said: what was named by now, of this loop and of others that have the same set.
        targets: where loops of the job put what they give: ids of objects, with an attribute or a key.
        epochs_at: where loops over epochs are; shared as `said`.
        kept: returns the ids of what is kept besides. keeper: returns who keeps the variables that can be.
        """
        self._given, self._extra = [*given], extra
        self._began = [clock() for clock in CLOCKS]
        self._of_epochs, self._of_round = of_epochs, of_round
        self._said = set() if said is None else said
        self._targets = set() if targets is None else targets
        self._epochs_at = {} if epochs_at is None else epochs_at
        self._kept, self._keeper = kept, keeper
        self._steps, self._warn = steps, warn
        self._seen: dict[tuple[int, int], _Seen] = {}  # by the code that asks, and the place in it
        self._plain = _Seen()  # of the first loop that tells nothing of its minibatches
        # The script's frames, as a step was made that is looked at, and where they were.
        self.ended: list[tuple[FrameType, int]] = []
        self._first: dict[tuple[CodeType, int], dict[str, object]] = {}  # marks as loops began, by places
        self._known_first: dict[tuple[CodeType, int], set[str]] = {}  # names of all that was there then
        self._owners: dict[str, tuple[int, str]] = {}  # by names, of attributes: id of the object, attribute
        self._asked: set[tuple[CodeType, int]] = set()  # where it was asked for a minibatch
        self._askers: set[CodeType] = set()  # of generators that draw from loops of the job
        self.script_restores = False  # it has called restore() itself, and can count from there

    def look(self, frame: FrameType, at: int | None = None) -> None:
        """The script asks for its next minibatch from this frame; generators of it may lie between.

        at: where the loop asks in it, if the frame has gone on by now.
        """
        place = id(frame.f_code), place_in(frame) if at is None else at
        if (seen := self._seen.get(place)) is None:
            if len(self._seen) == MOST_LOOPS:
                return
            self._askers.add(frame.f_code)
            seen = self._seen[place] = _Seen(in_each=self._of_epochs)
        if seen.is_due(self._of_round()) and (frames := frames_that_ask(frame) if at is None else [frame]):
            self._try(seen, frames[-1], (place_in(frames[-1]) if at is None else at,), frames[:-1])
        if seen.held is not None and (names := seen.held.look(frame)):
            self._name_held(names, frame)

    def loop_begins(self, frame: FrameType) -> None:
        """The script asks for a minibatch from this frame, and has made no optimizer step since it did."""
        if (asks := (frame.f_code, place_in(frame))) in self._asked:
            return
        self._asked.add(asks)
        self._askers.add(frame.f_code)
        for one in frames_that_ask(frame)[-1:]:
            place = one.f_code, place_in(one)
            if place not in self._first and len(self._first) < MOST_LOOPS:
                with suppress(Exception):
                    self._first[place] = marks_before(*place, variables_of(one))
                    # What is found is kept from its first change on.
                    names = held(one.f_code, (place_in(one),)) & variables_of(one).keys()
                    self._known_first[place] = {*names, *self._marks(one, (place_in(one),))}

    def _name_held(self, names: Sequence[str], frame: FrameType) -> None:
        for one in frames_that_ask(frame)[-1:]:
            scope, (kept_names, kept), keeper = variables_of(one), self._known(), self._keeper()
            # What others keep is what is in them, and not which of them it is.
            given = {n for n in names if id(scope.get(n)) in kept and not isinstance(scope.get(n), SET)}
            names = [name for name in names if name not in kept_names and name not in given]
            if keeper is not None:
                keeper.follow(one, names, have_changed=True)
            kept_now = [n for n in names if keeper is not None and keeper.keeps(one, n)]
            self._say(
                [n for n in names if n in kept_now or not self._is_spared(scope.get(n), one.f_code)], one
            )

    # Where the loop tells nothing of its minibatches these two tell of it, while it is looked at.

    @property
    def is_looking(self) -> bool:
        return not self._plain.is_over

    def step_ended(self, frame: FrameType | None) -> None:
        """The script has made an optimizer step, somewhere below this frame."""
        # Kept until the next minibatch begins, as a frame that has ended may leave its address to another.
        self.ended = [(one, place_in(one)) for one in scripts_frames(frame)] if self._plain.is_due() else []

    def minibatch_begun(self, frame: FrameType | None) -> None:
        """The script begins a minibatch: the innermost of its frames that made the step has the loop.

        It need not be told while none has `ended`.
        """
        ended, self.ended = self.ended, []
        for one in scripts_frames(frame) if ended else ():
            for other, place in ended:
                if one is other:
                    self._try(self._plain, one, (place, place_in(one)))
                    return

    def _try(
        self, seen: _Seen, frame: FrameType, at: tuple[int, ...], between: Sequence[FrameType] = ()
    ) -> None:
        try:
            self._look(seen, frame, at, between)
        except Exception as error:  # what a variable's own methods raise is not the training's affair
            seen.is_over = True
            self._warn(UNSEEN.format(error=f"{type(error).__name__}: {error}"))

    def _look(self, seen: _Seen, frame: FrameType, at: tuple[int, ...], between: Sequence[FrameType]) -> None:
        """between: generators of the script's, between the job's loop and that in this frame."""
        place = frame.f_code, at
        seen.place = seen.place or place
        if place != seen.place:
            return
        seen.looks += 1
        if len(at) == 1:
            if self._of_epochs:
                self._epochs_at[frame.f_code] = at[0]
            self._note_target(frame)
            if seen.looks == 1 and not self._of_epochs:
                seen.held = HeldVariables(frame.f_code, *at, self._first.get((frame.f_code, *at), {}))
        elif seen.looks == LOOKS:
            seen.is_over = _is_in_another(frame, at)  # which may change more between two rounds of this one
        now = self._marks(frame, at)
        for generator in between:
            now |= self._marks_of_generator(generator)
        if len(at) == 1:
            self._keep_what_is_new(seen, now, frame, *at)
        for name, mark in now.items():
            if name in seen.before and seen.before[name] != mark and name not in seen.named:
                seen.changed[name] = None
        seen.before = now
        if (seen.looks >= LOOKS or self._of_epochs) and seen.changed:
            changed, seen.changed = [*seen.changed], {}
            seen.named |= {*changed}
            self._say(changed, frame)

    def _keep_what_is_new(self, seen: _Seen, now: Mapping[str, object], frame: FrameType, place: int) -> None:
        """Keep what the loop has set first, such as the best epoch's number: no restart builds it."""
        there = {*now, *(held(frame.f_code, (place,)) & variables_of(frame).keys())}
        known = self._known_first.get((frame.f_code, place)) if seen.known is None else seen.known
        seen.known = there | (known or set())
        keeper = self._keeper()
        if known is not None and keeper is not None and (new := there - known):
            keeper.follow(frame, new, have_changed=True)

    def _note_target(self, frame: FrameType) -> None:
        """Note the attribute that a for statement over a loop of the job sets: a restart sets it, too."""
        target = target_of(frame.f_code, place_in(frame))
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
        ways: dict[object, list[str]] = {}  # several names may lead to one attribute of one object
        for name, key in keys.items():
            led = self._owners.get(name, key)
            if self._said.isdisjoint((key, led)):
                ways.setdefault(led, []).append(name)
        self._said |= {*keys.values(), *ways}
        if (keeper := self._keeper()) is not None:
            kept = {led: [name for name in names if keeper.keeps(frame, name)] for led, names in ways.items()}
            keeper.say_kept(map(_shortest, filter(None, kept.values())))
            told = {
                led for led, names in ways.items() if any(keeper.will_name(frame, name) for name in names)
            }
            ways = {led: names for led, names in ways.items() if not (kept[led] or led in told)}
        names = [*map(_shortest, ways.values())]
        if names:
            helps, shown = advice.current(), ", ".join(names[:SHOWN]) + (" ..." if names[SHOWN:] else "")
            text = TEXT.format(names=shown, keep=helps.keep)
            self._warn(text + (helps.counter if any("." not in name for name in names) else ""))

    def _marks(self, frame: FrameType, at: tuple[int, ...]) -> dict[str, object]:
        known = self._known()
        kept = known[1]
        read, carried = read_first(frame.f_code, at)
        if len(at) == 1 and not self._of_epochs:
            around = carried_around(frame.f_code, *at, self._epochs_at.get(frame.f_code))
            read, carried = read | around[0], carried | around[1] | counted_beside(frame.f_code, at)
        if self._of_epochs:
            read, carried = (names | held(frame.f_code, at) for names in (read, carried))
        tells_nothing = len(at) > 1
        scope = variables_of(frame)
        used = {id(one): one for one in (*self._given, *scope.values())}.values()
        reached = reached_from(frame, read, used)
        attributes = carried_in(frame.f_code).union(*(one.carried for one, _ in reached))
        marks, places = self._marks_of_reached(reached, frame, known, tells_nothing, attributes)
        # What `extra` has is its affair, as the counters of a framework's engine.
        modules = [one for one in not_given(scope, read, self._given, frame) if id(one[2]) not in kept]
        of_modules, places_in_modules = in_other_modules(modules, kept)
        marks |= of_modules
        places |= places_in_modules
        ours = {id(part) for _, _, module in modules for part in module.modules()}
        models = [one for one in used if isinstance(one, nn.Module) and id(one) not in ours]
        marks |= in_modules(models, kept)
        # Between two passes they may change: as a sampler is when one begins, it is kept.
        loaders = [one for one in used if isinstance(one, DataLoader)]
        kept |= sampler_values.follow(None if tells_nothing else self._keeper(), frame, scope, kept)
        if self._of_epochs:
            marks |= shared_in(loaders) | process_settings.marks(frame.f_code)
        else:
            found = in_loaders(loaders, kept, attributes, frame.f_code, tells_nothing=tells_nothing)
            marks |= {name: _InRound(self._of_round(), mark) for name, mark in found.items()}
        marks |= references_in([one for one in used if isinstance(one, nn.Module)], loaders, attributes)
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
        places |= of_classes(own.keys() - scope.keys(), scope)
        for name in own:
            self._note_owner(name, name, scope)
        if not tells_nothing and (keeper := self._keeper()) is not None:
            # What may come back in another way, by restore() or `extra`, is not named; kept it can be. So can
            # what is set in some iterations alone.
            numbers = [name for name in carried if self._is_number(scope.get(name))]
            keeper.note({name: place for name, place in places.items() if place and name not in own})
            keeper.follow(frame, [*own, *places, *numbers, *self._numbers_in(scope, read, known)])
        return marks | own

    def _marks_of_reached(
        self,
        reached: Iterable[tuple["Reached", bool]],
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
                self._note_owner(called, name, variables.values)
                if place is not None or variables.is_of(frame, name):
                    places[called] = place
        return marks, places

    def _note_owner(self, called: str, name: str, scope: Mapping[str, object]) -> None:
        """Note what a name leads to, if that is an attribute. called: the name outside of this scope."""
        root, _, attribute = name.partition(".")
        if attribute and root in scope:
            self._owners[called] = id(scope[root]), attribute

    def _marks_of_generator(self, frame: FrameType) -> dict[str, object]:
        """Return marks of what a generator of the script's has: a restart begins it anew."""
        at = (place_in(frame),)
        local = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
        scope = {name: value for name, value in variables_of(frame).items() if name in local}
        marks = self._marks_of(
            scope,
            *read_first(frame.f_code, at),
            self._known(),
            tells_nothing=False,
            code=frame.f_code,
            attributes=carried_in(frame.f_code),
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
        tells_nothing: the loop, of its minibatches. attributes, notes: as in `marks_inside`.
        """
        kept_names, kept = known
        marks: dict[str, object] = {}
        for name, value in scope.items():
            marks |= {f"{name}{what}": mark for what, mark in children_of(value).items()}
            is_kept = id(value) in kept and not isinstance(value, CONSTANTS)  # of which many have one
            is_set = name in carried and isinstance(value, SET)  # to another one
            if name in kept_names or (is_kept and not is_set) or name.startswith("__"):
                continue
            if is_set and (is_kept or isinstance(value, THINGS)):
                marks[name] = Which(value)
            elif isinstance(value, GENERATORS):
                marks[name] = state_of(value)
            elif name in carried and not isinstance(value, (*CONTAINERS, *OTHERS_AFFAIR)):
                if is_ours(type(value).__module__):  # an iterator over job.batches
                    continue
                if not self._is_counted(value, code, tells_nothing):
                    marks[name] = Which(value) if isinstance(value, REFERENCES) else rebound(value)
            elif name in read and isinstance(value, ITERATORS):
                if not self._draws(value):
                    marks[name] = advanced(value)
            elif name in read and not isinstance(value, OTHERS_AFFAIR):
                for kind in type(value).__mro__:
                    if kind.__name__ not in kept_names and is_scripts_class(kind):
                        marks |= marks_inside(kind.__name__, kind, kept, attributes, draws=self._draws)
                marks |= marks_inside(name, value, kept, attributes, notes=notes, draws=self._draws)
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
        """Return the attributes of the script's objects here that are numbers, texts, or members of enums.

        One method may set them, and another one read them.
        """
        kept_names, kept = known
        return [
            f"{name}.{key}"
            for name in read
            if name in scope
            and name not in kept_names
            and is_own(scope[name])
            and id(scope[name]) not in kept
            for key, part in attributes_of(scope[name]).items()
            if (self._is_number(part) or type(part) in (bool, str) or isinstance(part, MEMBERS))
            and (id(scope[name]), key) not in kept
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


def _shortest(names: Sequence[str]) -> str:
    """Return the shortest way of these to one thing."""
    return min(names, key=lambda name: name.count("."))


def _is_in_another(frame: FrameType, at: tuple[int, ...]) -> bool:
    """Whether the loop around these places is in another one, of this frame or of one that called it."""
    _, *callers = scripts_frames(frame, generators=True)
    return loops_around(frame.f_code, at) > 1 or any(
        loops_around(one.f_code, (place_in(one),)) for one in callers
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
