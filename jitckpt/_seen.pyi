from collections.abc import Callable, Sized
from mmap import mmap
from typing import Any

from torch import Tensor

class Seen:
    """What was looked at, to tell in one call whether it is the same; it keeps the objects alive."""

    def attribute(self, object: object, name: str, /) -> None: ...
    def entry(self, dict: dict[Any, Any], key: object, /) -> None:
        """Look at a dict's entry, which may be missing."""

    def values(self, dict: dict[Any, Any], /) -> None:
        """Look at all values of a dict, in their order."""

    def elements(self, list: list[Any], /) -> None:
        """Look at all elements of a list, in their order."""

    def size(self, container: Sized, /) -> None: ...
    def place(self, tensor: Tensor, /) -> None:
        """Look at where a tensor lies and how it is read; raises RuntimeError if it lies nowhere."""

    def memory(self, address: int, length: int, /) -> None: ...
    def is_same(self) -> bool:
        """Whether all that was looked at is as it was: the very same objects, and the same bytes."""

    def end(self) -> None:
        """From now on it is not the same any more, whatever it has looked at."""

def all_same(several: tuple[Seen, ...], /) -> bool:
    """Return whether each of them is the same."""

def gradients(parameters: list[Tensor], plain: type[Tensor], /) -> bytes | None:
    """Return address and bytes, 64 bits each, of those gradients that have some on a GPU, in one piece.

    None if one is not of the type `plain`, or has no memory of its own.
    """

def versions(tensors: list[Tensor], /) -> bytes:
    """Return how often torch has written to each tensor, and its address, 64 bits each."""

def numbers(tensors: list[Tensor], /) -> bytes:
    """Return the bytes of tensors of one number each, on the host, one behind the other."""

def write_sealed(memory: mmap, start: int, blob: bytearray, sequence: int, step: int, /) -> None:
    """Seal a blob as jitckpt.ring.format.seal does, and copy it into a ring's memory.

    Raises ValueError where it would not lie in there.
    """

def plain_copy(value: Any, /) -> Any:
    """Return a copy, at all depths, of a value made of dicts, lists, tuples, numbers, texts and None alone.

    None for any other.
    """

def same_settings(before: dict[str, Any], after: dict[str, Any], besides: frozenset[str], /) -> bool:
    """Return whether both have the same keys, and of those that are not in `besides` the same values.

    Of a value that is no number, text or None, nor a tuple of such, nobody can tell: then they have not.
    """

def living(kinds: frozenset[type], /) -> list[Any]:
    """Return the living objects whose type is one of these; not for tuple.

    Unlike with gc.get_objects() no other thread is met while it fills a tuple, which would then fail.
    """

def living_tuples(firsts: frozenset[type], /) -> list[tuple[int, int, Any]]:
    """Return id, length and first element of the living tuples of two and more that begin with such."""

def call_if_none(
    asked: Callable[[], object],
    usual: Callable[..., Any],
    other: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `usual` with the arguments if asked() returns None, else `other`."""
