"""Variables that a loop sets in some iterations alone, and reads in others: a restart has them not."""

import weakref
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from jitckpt.bindings.frame_variables import own_variables
from jitckpt.system.bytecode import place_in
from jitckpt.worker.carried_names import held, made_when_missing

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_UNKNOWN, _ABSENT = object(), object()


class _Place(NamedTuple):
    number: int  # id() of a value


class HeldVariables:
    """Of one loop, which asks for its next minibatch at one place; looked at in each, as that costs little.

    A variable that has one value in two iterations, and another one at another time, is such a one. What is
    set in each, in whatever branch, is always another object.
    """

    def __init__(self, code: CodeType, place: int, first: Mapping[str, object]) -> None:
        """first: marks of what they were before the first iteration."""
        self._code, self._place = code, place
        self._marks = {name: first.get(name, _UNKNOWN) for name in held(code, (place,))}
        self._kept: set[str] = set()
        self._changed: set[str] = set()

    def look(self, frame: FrameType | None) -> list[str]:
        """The loop asks for its next minibatch, somewhere below this frame; returns what is found to be held.

        Each name once.
        """
        if not self._marks:
            return []
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        if frame is None or place_in(frame) != self._place:
            return []
        scope = own_variables(frame)
        for name, before in self._marks.items():
            value = scope.get(name, _ABSENT)
            if before is not _UNKNOWN:
                (self._kept if _is_same(before, value) else self._changed).add(name)
            self._marks[name] = _mark(value)
        found = [*(self._kept & self._changed)] if self._changed else []
        for name in found:
            del self._marks[name]
        self._changed -= {*found}
        return found


def marks_before(code: CodeType, place: int, scope: Mapping[str, object]) -> dict[str, object]:
    """Return marks of these variables as the loop begins, but for those that it makes if they are None."""
    names = held(code, (place,)) - made_when_missing(code, (place,))
    return {name: _mark(scope[name]) for name in names if name in scope}


def _mark(value: Any) -> object:
    """Return what tells a value from the next one, and does not keep it in memory."""
    if value is _ABSENT or isinstance(value, PLAIN):
        return value
    try:
        return weakref.ref(value)
    except TypeError:  # a list, say: the next one is made while this one is still there
        return _Place(id(value))


def _is_same(mark: object, value: object) -> bool:
    if isinstance(mark, weakref.ref):
        return mark() is value
    if isinstance(mark, _Place):
        return mark.number == id(value)
    return type(mark) is type(value) and mark == value
