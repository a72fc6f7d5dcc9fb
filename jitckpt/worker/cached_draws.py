"""Functions of the script that keep what they returned, and draw random numbers for it: so would a restart.

Of functools' caches nobody can read what is in them, so those are named once they have drawn in a loop. What
a cached property has made is an attribute of its object, and can be kept as such.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

from jitckpt.system import installed
from jitckpt.worker.frames import is_ours, scripts_frames, variables_of
from jitckpt.worker.reached_values import attributes_in
from jitckpt.worker.value_marks import dict_of, is_own

CACHE: Any = type(functools.lru_cache(lambda: None))
LOOKS = 3  # after the first steps, and then ever less often
DEPTH = 3  # of functions of the script's that these call
DRAWS = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "random", "random_"}
    | {"normal", "normal_", "uniform", "uniform_", "standard_normal", "multinomial", "bernoulli", "sample"}
    | {
        "choice",
        "choices",
        "shuffle",
        "permutation",
        "integers",
        "randrange",
        "gauss",
        "exponential_",
        "beta",
    }
    | {"dropout", "bernoulli_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"}
)
OF_ITS_OWN = frozenset({"manual_seed", "default_rng", "RandomState", "Random", "SeedSequence"})
TEXT = (
    "{name} keeps what it returns ({kind}), and draws random numbers for it in the loop. A restart begins "
    "with nothing kept: it draws them again, and goes on with others than an undisturbed run from there on. "
    "Call it before the loop for all that it is asked for, let it draw from a generator that it seeds by its "
    "arguments, or keep its results in a dict of the script's."
)
_LIBRARIES = (*installed.folders(), "<frozen")


class CachedDraws:
    """Of one job, from the beginning of its outermost loop on."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._caches: dict[
            int, tuple[str, Any, int]
        ] = {}  # names, and how often they had called the function
        self._made: set[tuple[int, str]] = set()  # cached properties: ids of objects, and attributes
        self._looks = 0

    def loop_begins(self, frame: FrameType | None) -> None:
        """What is made before that, a restart makes, too."""
        found = [*_caches_of(frame)]
        self._caches = {id(one): (name, one, _misses(one)) for name, one in found if _draws(_wrapped(one))}
        self._made = {(id(owner), key) for one in scripts_frames(frame) for _, owner, key in _properties(one)}
        self._looks = 0

    def look(self, frame: FrameType | None, keep: Callable[[FrameType, str], bool]) -> None:
        """The loop goes on behind an optimizer step. keep: keeps an attribute, and returns whether it can."""
        self._looks += 1
        if self._looks > LOOKS and self._looks & (self._looks - 1):
            return
        for number, (name, one, misses) in [*self._caches.items()]:
            if _misses(one) > misses:
                del self._caches[number]
                self._warn(TEXT.format(name=name, kind="functools.cache or lru_cache"))
        for scope in scripts_frames(frame):
            for name, owner, key in _properties(scope):
                if (id(owner), key) not in self._made:
                    self._made.add((id(owner), key))
                    if not keep(scope, f"{name}.{key}") and _draws(_property_of(owner, key).func):
                        self._warn(TEXT.format(name=f"{name}.{key}", kind="functools.cached_property"))


def _properties(frame: FrameType) -> Iterator[tuple[str, Any, str]]:
    """Yield the cached properties of objects in a frame's variables that have been made."""
    for name, value in variables_of(frame).items():
        if is_own(value):
            for key, one in _members(type(value)):
                if isinstance(one, functools.cached_property) and key in dict_of(value):
                    yield name, value, key


def _property_of(owner: Any, key: str) -> Any:
    return next(one for name, one in _members(type(owner)) if name == key)


def _misses(one: Any) -> int:
    return int(one.cache_info().misses)


def _wrapped(one: Any) -> Any:
    return getattr(one, "__wrapped__", None)


def _caches_of(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield what of the script's own keeps results: in its functions' variables, modules, and classes."""
    scopes = [variables_of(one) for one in scripts_frames(frame)]
    modules = [one for one in [*sys.modules.values()] if installed.is_scripts_module(one)]
    scopes += [vars(one) for one in modules if not is_ours(one.__name__)]
    for scope in scopes:
        for name, value in [*scope.items()]:
            if isinstance(value, CACHE):
                yield name, value
                continue
            kind: Any = value if isinstance(value, type) else type(value)
            if installed.is_scripts_class(kind):
                found = ((key, one) for key, one in _members(kind) if isinstance(one, CACHE))
                yield from ((f"{kind.__name__}.{key}", one) for key, one in found)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if installed.is_scripts_class(base):
            yield from [*vars(base).items()]


def _draws(function: Any, depth: int = DEPTH) -> bool:
    """Whether a function, or one of the script's that it calls, names what draws from a process's numbers."""
    function = function if isinstance(function, FunctionType) else _wrapped(function)
    if not isinstance(function, FunctionType) or function.__code__.co_filename.startswith(_LIBRARIES):
        return False
    names = {*function.__code__.co_names} | attributes_in(function.__code__)
    if names & OF_ITS_OWN:
        return False
    called = (function.__globals__.get(name) for name in names) if depth else ()
    return bool(names & DRAWS) or any(_draws(one, depth - 1) for one in called)
