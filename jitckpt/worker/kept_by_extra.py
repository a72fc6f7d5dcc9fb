"""What of the script's variables the state_dict of an `extra` keeps."""

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from jitckpt.worker.value_marks import DEPTH, MOST_VALUES, attributes_of


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
