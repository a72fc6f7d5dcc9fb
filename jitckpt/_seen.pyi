from collections.abc import Callable, Iterator, Sized
from mmap import mmap
from typing import Any, TypeVar

from torch import Tensor

_Given = TypeVar("_Given")

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

class Exit(Iterator[_Given]):
    """As it goes, it tells of the exception that is on its way then; an iterator as the given one."""

    def __new__(
        cls, told: Callable[[BaseException | None], object], inner: Iterator[_Given] = ..., /
    ) -> Exit[_Given]: ...
    def __next__(self) -> _Given: ...

def all_same(several: tuple[Seen, ...], /) -> bool:
    """Return whether each of them is the same."""

def gone_on(
    looks: tuple[Seen, ...],
    going_on: tuple[tuple[str, Callable[[], bytes]], ...],
    known: dict[str, bytes],
    /,
) -> list[tuple[str, bytes]] | None:
    """Return what the functions of `going_on` return now, where it is other than known; by their names.

    None if one of the looks is not the same.
    """

def call_native(address: int, /, *numbers: int) -> int:
    """Call the C function there with up to six numbers, 64 bits each, and return its int.

    Meanwhile other threads may run Python.
    """

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

def same_settings(
    before: list[list[dict[str, Any]]], after: list[list[dict[str, Any]]], besides: frozenset[str], /
) -> bool:
    """Return whether all dicts have the same keys, and of those that are not in `besides` the same values.

    Of a value that is no number, text or None, nor a tuple of such, nobody can tell: then they have not.
    """

def settings_of(groups: list[dict[str, Any]], /) -> list[dict[str, Any]] | None:
    """Return of parameter groups what they say beside their parameters, and how many of these there are.

    None if they are no plain dicts with lists.
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
