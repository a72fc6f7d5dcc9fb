"""Objects that live in this process, and classes: found without disturbing another thread.

Whoever holds all that gc.get_objects() returns makes another thread fail that fills a tuple just then.
"""

from collections.abc import Iterable
from typing import Any

from jitckpt import _seen


def objects_of(kinds: Iterable[type]) -> list[Any]:
    """Return all living objects of exactly these classes; of tuples see `tuples_with`.

    Not for subclasses: to ask an abstract class runs Python code, and there are a million objects.
    """
    return _seen.living(frozenset(kinds))


def tuples_with(firsts: Iterable[type]) -> list[tuple[int, int, Any]]:
    """Return id, length and first element of all tuples of two and more that begin with one of a class."""
    return _seen.living_tuples(frozenset(firsts))


def with_subclasses(*kinds: type) -> set[type]:
    """Return these classes, and all that are derived from them."""
    found: set[type] = set()
    waiting = [*kinds]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += type.__subclasses__(one)
    return found
