"""Hooks that are no part of the objects they hang on: a copy of such an object is free of them."""

from contextlib import nullcontext
from functools import partial
from typing import Any


class Attached(partial[Any]):
    """A hook in whose place a copy of the object, or what is pickled of it, has one that does nothing.

    That is of Python itself, so whoever loads such a model needs no jitckpt. A call costs nothing more.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class AttachedMethod(partial[Any]):
    """What stands in the place of an object's method; copies of the object have the method as it was."""

    def __new__(cls, call: Any, /, owner: Any, name: str) -> "AttachedMethod":
        made = super().__new__(cls, call)
        made.owner, made.name = owner, name
        return made

    owner: Any
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)  # the class's: the copy has no attributes of its own yet
