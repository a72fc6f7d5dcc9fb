"""Which variables count the iterations, as their values tell: of these it is known what is still to come.

A rank that does not come to the end of an iteration has its variables as the iteration before has left them,
and the job goes on with the next one. A counter that is raised at the iteration's end would be one behind
from there on. So it is noted which are counters, and restore() makes up what is due of them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jitckpt.encoding.tree_codec import Encoded

PART = "counters"
# So many iterations in a row have to raise one. What is set back now and then shows itself sooner or later,
# and is none from then on: no iteration may ever have done anything else.
LEAST_RAISED = 3

Key = tuple[str, str]  # a place and a name
Names = Mapping[str, Collection[str]]  # by places
Values = Mapping[str, Mapping[str, Any]]  # by places and names


class Counters:
    """Looked at at the end of each iteration."""

    def __init__(self) -> None:
        self._before: dict[Key, int] = {}
        self._raised: dict[Key, int] = {}  # by how many iterations
        self._others: set[Key] = set()
        self._told = Encoded({}, {})

    def look(self, values: Values, *, same_round: bool) -> None:
        """Another iteration has ended. same_round: the script has done nothing between it and the last one.

        What lies between two of its loops may set a counter back, which tells nothing of the iterations.
        """
        before, self._before = self._before, {}
        is_news = False
        for place, of_place in values.items():
            for name, value in of_place.items():
                if (key := (place, name)) in self._others:
                    continue
                is_raised = type(value) is int
                if is_raised:
                    self._before[key] = value
                    if not (same_round and key in before):
                        continue
                    is_raised = value == before[key] + 1
                raised = self._raised.get(key, 0)
                if is_raised:
                    self._raised[key] = raised + 1
                    is_news |= raised + 1 == LEAST_RAISED
                else:
                    self._others.add(key)
                    is_news |= self._raised.pop(key, 0) >= LEAST_RAISED
        if is_news:
            self._tell()

    def capture(self) -> Encoded:
        """Return the names of the counters by now, by places; the same object while none is new."""
        return self._told

    def restore(self, told: Names | None) -> None:
        """These have been counters in the start before."""
        self._raised |= {(place, name): LEAST_RAISED for place, of in (told or {}).items() for name in of}
        self._tell()

    def _tell(self) -> None:
        told: dict[str, list[str]] = {}
        for (place, name), raised in self._raised.items():
            if raised >= LEAST_RAISED:
                told.setdefault(place, []).append(name)
        self._told = Encoded(told, {})


def made_up(values: Values, counters: Names) -> dict[str, dict[str, Any]]:
    """Return what the variables would be at the end of one more iteration, as far as they are counters."""
    return {
        place: {
            name: value + 1 if type(value) is int and name in counters.get(place, ()) else value
            for name, value in of_place.items()
        }
        for place, of_place in values.items()
    }


def without(counters: Names, values: Values, before: Values) -> dict[str, list[str]]:
    """Return those counters that are now as they were before: the others were raised by now."""
    return {
        place: [
            name
            for name in names
            if name in before.get(place, ()) and values.get(place, {}).get(name) == before[place][name]
        ]
        for place, names in counters.items()
    }
