"""Keeps the script's variables: which frames have them, and when they are looked at and put back."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from jitckpt.bindings.frame_variables import own_variables, set_variables
from jitckpt.state import plain_values
from jitckpt.state.earlier_loops import TOP, loop_of
from jitckpt.state.kept_variables import KeptVariables, VariablesNow, place_inside, where
from jitckpt.state.named_things import is_thing
from jitckpt.system.bytecode import place_in
from jitckpt.worker.carried_names import set_behind, set_more_than_once
from jitckpt.worker.frames import frames_that_ask, is_scripts, names_of, place_of
from jitckpt.worker.holders import held_by, reach, variables_of_module

KEPT = (
    "The loop changes variables of the script: {names}. They are kept, and after a failure they are as the "
    "last minibatch has left them. A rank that fails between its optimizer step and the end of that "
    "iteration loses what it has changed of them there, but for a counter of iterations."
)
GIVEN_UP = (
    "No variables of the script are kept from here on: {error}. After a failure they are as it sets them."
)
NOT_KEPT_BEHIND = (
    "Behind a loop over minibatches the script reads {name}, which the loop sets, and no save holds it (a "
    "{kind}, which is not plain or too large). If a failure comes after the last minibatch, and before the "
    "first one of the next loop, the restart comes there without it. Read in the loop what you need of it."
)
ANOTHER_CLASS = (
    "{0} has become a {1}, and was a {2}: no save holds which it is, so after a failure it is what the "
    "script builds. Choose it anew at the top of each epoch or step, by its number or a kept variable."
)
SHOWN = 8  # names
EPOCH = 2  # so many of a round's numbers tell which epoch it is


class _Variable(NamedTuple):
    place: str
    name: str
    value: object


class _Ask(NamedTuple):
    """Where a function's code asks for the next minibatch."""

    code: CodeType
    place: int


class VariableKeeper:
    """Of one job. Whatever fails here is said once, and no harm to the training."""

    def __init__(
        self,
        kept: KeptVariables,
        of_round: Callable[[], tuple[int, ...]],
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        generators: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """of_round: returns which round of the job's loops it is (Loop.round). say: of what is kept.

        generators: returns the ids of those of random numbers that are kept, wherever they lie.
        """
        self._generators = generators
        self._kept, self._of_round, self._say, self._warn = kept, of_round, say, warn
        self._round: tuple[int, ...] = ()
        self._ask: _Ask | None = None  # in this round, or in the one before
        self._depth = 0  # how many of the script's frames there were as variables were looked at last
        self._is_off = False
        self._said: set[str] = set()
        self._elsewhere: dict[str, tuple[str, str]] = {}
        self._is_at_last = False  # the loop may be at its end
        self._is_end_known = False  # it is there
        self._followed: set[tuple[CodeType, frozenset[str]]] = set()  # all that is read there
        self._named: set[str] = set()
        self._kinds: dict[str, type] = {}  # of objects that others have made, as they were first
        self._noted_epoch: tuple[int, ...] = ()  # whose top was noted last

    def outermost_loop_begins(self, frame: FrameType | None) -> None:
        """Learn by which names optimizers, modules, functions go: so they do in a restart at this place."""
        if self._is_off:
            return
        try:
            frames = _frames(frame)
            set_again = {place: set_more_than_once(of[0].f_code) for place, of in frames.items()}
            self._kept.things.note(self._scopes(frames), set_again)
        except Exception as error:
            self._give_up(error)

    def note(self, elsewhere: Mapping[str, tuple[str, str]]) -> None:
        """Learn what names lead to which no frame has: the place of each, and its name there."""
        self._elsewhere |= elsewhere

    def follow(self, frame: FrameType, names: Iterable[str], *, have_changed: bool = False) -> None:
        """Keep what these names of the frame's code lead to: variables, and attributes of their objects."""
        follow = self._kept.follow_changed if have_changed else self._kept.follow
        if self._is_off:
            return
        with self._kept.looking(self._scopes(_frames(frame))):
            for name in names:
                if (variable := self._find(frame, name)) is not None:
                    follow(*variable)

    def follow_behind(
        self, frame: FrameType, names: frozenset[str], *, is_known: bool, tells: bool = True
    ) -> None:
        """Keep what these names lead to, as the frame's loop is at its end: it is read behind that.

        In other iterations it is not looked at. is_known: it is there, and not perhaps. tells: name what
        can't be kept.
        """
        self._is_at_last, self._is_end_known = True, is_known
        followed = frame.f_code, names
        # Of a loader without a length each batch may be the last one: little is done for most.
        if self._is_off or not names or (not is_known and followed in self._followed):
            return
        try:
            with self._kept.looking(self._scopes(_frames(frame))):
                variables = [self._find(frame, name) for name in names]
                are_kept = [self._follow_behind(one, tells) for one in variables if one is not None]
            if len(are_kept) == len(variables) and all(are_kept):
                self._followed.add(followed)
        except Exception as error:
            self._give_up(error)

    def _follow_behind(self, variable: _Variable, tells: bool) -> bool:
        self._kept.follow_behind(*variable)
        is_kept = self._kept.keeps(*variable)
        if tells and not is_kept:
            kind = type(variable.value).__qualname__
            self._name_once(NOT_KEPT_BEHIND.format(name=variable.name, kind=kind))
        return is_kept

    def _name_once(self, text: str) -> None:
        if text not in self._named:
            self._named.add(text)
            self._warn(text)

    def note_at(self, frame: FrameType | None, loop: str) -> None:
        """Keep what there is at an epoch's top, or behind a loop over epochs, somewhere below this frame."""
        if self._is_off or self._kept.is_empty or not self._depth:  # nobody looks at what minibatches leave
            return
        try:
            if loop == TOP:
                self._noted_epoch = tuple(self._of_round()[:EPOCH])
                self._kept.earlier.begin_epoch()
            frames = _frames(frame)
            scopes = self._scopes(frames)
            self._kept.is_at_last, self._is_at_last = True, False
            with self._kept.looking(scopes, _objects(scopes)):
                self._kept.look(scopes, self._built(frames))
            if text := self._kept.note_loop(loop):
                self._name_once(text)
        except Exception as error:
            self._give_up(error)

    def keep_loops(self, loop: str) -> None:
        """Keep what there was behind each loop of the epoch as that within this one over epochs."""
        self._kept.earlier.keep_within(loop)

    def put_behind(self, frame: FrameType | None, loop: str | None = None) -> None:
        """Set what is kept as it was there, somewhere below this frame.

        loop: which a restart passes by; None: the one that it is at. TOP: the epoch's top, that comes again.
        """
        loop = loop_of(self._of_round()[EPOCH:]) if loop is None else loop
        if self._is_off or not (values := self._kept.earlier.of(loop)):
            return
        try:
            frames = _frames(frame)
            for objects in (True, False):  # what an object holds is put into the one that is there by then
                for place, scope in self._scopes(frames).items():
                    new = self._kept.put_alone(scope, values.get(place, {}), objects=objects)
                    if new and where(place).is_function:
                        set_variables(frames[place][0], new)
                    else:
                        scope.update(new)
        except Exception as error:
            self._give_up(error)

    def keeps(self, frame: FrameType, name: str) -> bool:
        """Return whether what this name leads to is kept, with all that is in it."""
        variable = None if self._is_off else self._find(frame, name)
        if variable is None or not self._kept.is_whole(variable.value, self._generators()):
            return False
        with self._kept.looking(self._scopes(_frames(frame))):
            return self._kept.keeps(*variable)

    def will_name(self, frame: FrameType, name: str) -> bool:
        """Return whether what this name leads to was kept until now, and can't be: that names it."""
        variable = None if self._is_off else self._find(frame, name)
        if variable is None or self._kept.is_whole(variable.value, self._generators()):
            return False
        with self._kept.looking(self._scopes(_frames(frame))):
            return is_thing(variable.value) and self._kept.keeps(*variable)

    def is_put_back(self, frame: FrameType, name: str) -> bool:
        """Return whether what was restored has this name of the frame's: the loop goes on with that."""
        return self._kept.has_restored(place_of(frame, name), name)

    def say_kept(self, names: Iterable[str]) -> None:
        """Name what is kept, each name once."""
        new = [name for name in dict.fromkeys(names) if name not in self._said]
        self._said |= {*new}
        if new:
            self._say(KEPT.format(names=", ".join(new[:SHOWN]) + (" ..." if new[SHOWN:] else "")))

    def take(self, frame: FrameType | None) -> None:
        """Look at the variables: the loop goes on, somewhere above this frame, behind an optimizer step."""
        if self._is_off or self._kept.is_empty:
            return
        try:
            before, self._round = self._round, self._of_round()
            is_new_round = self._round != before
            if before and self._round[:EPOCH] not in (before[:EPOCH], self._noted_epoch):
                self._kept.earlier.begin_epoch()
            frames = _frames(frame)
            if is_new_round:
                self._note_ask(frame)
            built = self._built(frames) if is_new_round else {}
            self._depth = _depth(frames)
            scopes = self._scopes(frames)
            self._kept.is_at_last, self._is_at_last = self._is_at_last, False
            with self._kept.looking(scopes, _objects(scopes)):
                self._kept.take(scopes, built, same_round=not is_new_round)
            if self._kept.is_at_last and self._is_end_known:
                self._note_loop()
        except Exception as error:
            self._give_up(error)
        for problem in self._kept.problems:
            self._warn(problem)
        self._kept.problems.clear()

    def loop_ended(self) -> None:
        """Keep for the epoch's later loops what there was, where the end is known since then alone."""
        if not self._is_off and self._kept.is_at_last and not self._is_end_known:
            try:
                self._note_loop()
            except Exception as error:
                self._give_up(error)
        self._is_at_last = False

    def _note_loop(self) -> None:
        if text := self._kept.note_loop(loop_of(self._of_round()[EPOCH:])):
            self._name_once(text)

    def as_it_stands(self, frame: FrameType | None) -> VariablesNow | None:
        """Return what the variables are now, in the middle of an iteration; None if that can't be told.

        For another thread than the training's, of which this is the innermost frame. The training goes on as
        if nobody had looked, so nothing is left with its frames, and nothing taken from there.
        """
        running = [*_outwards(frame)]
        scripts = [one for one in running if is_scripts(one)]
        is_looking = any(one.f_globals is globals() for one in running)
        if self._is_off or self._kept.is_empty or is_looking or not 0 < self._depth <= len(scripts):
            return None
        frames = _frames(scripts[-self._depth])  # a function that these call may be one of them once more
        built = self._built(frames) if self._of_round() != self._round else {}
        scopes = self._scopes(frames, clears=False)
        standing = self._kept.now(scopes, built, _objects(scopes))
        code = scripts[0].f_code
        return standing._replace(at=f"{code.co_filename}:{scripts[0].f_lineno}, in {code.co_qualname}")

    def _note_ask(self, frame: FrameType | None) -> None:
        asks = frames_that_ask(frame)[-1:]
        self._ask = _Ask(asks[0].f_code, place_in(asks[0])) if asks else None

    def _built(self, frames: dict[str, list[FrameType]]) -> dict[str, set[str]]:
        return {place: _built_before(of, self._ask) for place, of in frames.items()}

    def put_back(self, frame: FrameType | None) -> None:
        """Put back what was restored: the loop goes on from there, somewhere above this frame."""
        if self._is_off or self._kept.is_empty:
            return
        try:
            frames = _frames(frame)
            self._note_ask(frame)
            self._depth = _depth(frames)
            self._kept.is_at_last, self._is_at_last = self._is_at_last, False
            self._put_into(frames, self._scopes(frames), self._kept.put_objects)
            self._put_into(frames, self._scopes(frames))
            # What objects hold that the loop has made, and that are there by now.
            lacking = self._kept.lacking_places()
            self._put_into(
                frames, {place: of for place, of in self._scopes(frames).items() if place in lacking}
            )
            scopes = self._scopes(frames)
            with self._kept.looking(scopes, _objects(scopes)):  # a failure may come before the loop goes on
                self._kept.look(scopes, self._built(frames))
        except Exception as error:
            self._give_up(error)

    def _put_into(
        self,
        frames: dict[str, list[FrameType]],
        scopes: dict[str, dict[str, Any]],
        put: Callable[..., dict[str, dict[str, Any]]] | None = None,
    ) -> None:
        put = put or self._kept.put
        functions = {place: of[0] for place, of in frames.items() if where(place).is_function}
        with self._kept.looking(scopes, _objects(scopes)):
            new = put(scopes, {place: names_of(one) for place, one in functions.items()})
        for place, values in new.items():
            if place in functions:
                set_variables(functions[place], values)
            else:
                scopes[place].update(values)

    def lacking(self) -> str:
        """Return, once, a sentence on what was restored and is not there; "" for none."""
        return self._kept.lacking()

    def _scopes(
        self, frames: dict[str, list[FrameType]], *, clears: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Return the variables of places that are there, and the attributes of objects that they have."""
        scopes = {place: _scope(of[0], place, clears=clears) for place, of in frames.items()}
        for place in self._kept.places():
            scope, path = _outer_scope(place, scopes), where(place).object
            if scope is not None and path:
                value = reach(scope, path)
                scope = held_by(value)
                if scope is not None and not self._is_as_built(place, value):
                    continue
            if scope is not None:
                scopes[place] = scope
        return scopes

    def _is_as_built(self, place: str, value: object) -> bool:
        """Whether an object of a class that is not the script's has the class that it had; else it is named.

        What another class keeps would be put into the object that a restart builds.
        """
        kind = type(value)
        known = self._kinds.setdefault(place, kind)
        if known is kind or plain_values.is_object(value):
            return True
        name = where(place).object
        self._name_once(ANOTHER_CLASS.format(name, kind.__qualname__, known.__qualname__))
        return False

    def _find(self, frame: FrameType, name: str) -> _Variable | None:
        if name in self._elsewhere:
            place, attribute = self._elsewhere[name]
            outer = where(place).outer
            is_here = outer in (place_of(frame), place_of(frame, name))
            scopes = {outer: _scope(frame, outer)} if is_here else {}
        else:
            root, _, attribute = name.partition(".")
            place = place_of(frame, root)
            scopes = {place: _scope(frame, place)}
            place, attribute = (place_inside(place, root), attribute) if attribute else (place, root)
        found = _variables_at(place, scopes)
        if found is None or attribute not in found:
            return None
        return _Variable(place, attribute, found[attribute])

    def _give_up(self, error: Exception) -> None:
        self._is_off = True
        self._kept.end()
        self._warn(GIVEN_UP.format(error=f"{type(error).__name__}: {error}"))


def _variables_at(place: str, scopes: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the variables of a place. scopes: those of frames; modules are there as they are loaded."""
    scope = _outer_scope(place, scopes)
    path = where(place).object
    return scope if scope is None or not path else held_by(reach(scope, path))


def _objects(scopes: Mapping[str, dict[str, Any]]) -> dict[str, object]:
    """Return the script's own objects that places are inside of."""
    found = {}
    for place in scopes:
        if (path := where(place).object) and (scope := _outer_scope(place, scopes)) is not None:
            value = reach(scope, path)
            if plain_values.is_object(value):
                found[place] = value
    return found


def _outer_scope(place: str, scopes: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    scope = scopes.get(where(place).outer)
    return variables_of_module(where(place).module) if scope is None and not where(place).function else scope


def _scope(frame: FrameType, place: str, *, clears: bool = True) -> dict[str, Any]:
    """clears: leave nothing with the frame."""
    if not where(place).is_function:
        return frame.f_globals
    return own_variables(frame) if clears else {**frame.f_locals}


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}:"


def _frames(frame: FrameType | None) -> dict[str, list[FrameType]]:
    """Return the places that are there, with frames of them from the innermost on.

    The script's running functions, each with its own, and their modules, each with all that run its code.
    """
    found: dict[str, list[FrameType]] = {}
    for one in _outwards(frame):
        if is_scripts(one):
            if one.f_code.co_flags & inspect.CO_OPTIMIZED:
                found.setdefault(place_of(one), [one])
            found.setdefault(_module(one), []).append(one)
    return found


def _depth(frames: dict[str, list[FrameType]]) -> int:
    """Return how many of the script's frames there are."""
    return sum(len(of) for place, of in frames.items() if not where(place).function)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _built_before(frames: Iterable[FrameType], ask: _Ask | None) -> set[str]:
    """Return what a restart has built anew by the time at which these frames go on with their loops."""
    names: set[str] = set()
    behind: set[str] = set()
    for one in frames:
        names |= {*one.f_code.co_names, *names_of(one)}
        place = None if ask is None or ask.code is not one.f_code else ask.place
        behind |= set_behind(one.f_code, place_in(one) if place is None else place, asks=place is not None)
    return names - behind
