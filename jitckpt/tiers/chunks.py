"""What native/memory_tier does with a shard's chunks, and its failures as sentences."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from jitckpt._memory_tier import Failure, Sum, Window, copy, digests, receive, send, verify
from jitckpt.errors import SaveError
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import shard
from jitckpt.tiers.shard import Index

__all__ = ["Sum", "Window", "copy", "digests", "of", "part_of", "receive", "send", "verify", "window"]


def of(index: Index, other: str = "the other host", first: int = 0) -> AbstractContextManager[None]:
    """Raise what fails inside as SaveError, or as LinkError if the other host is at fault.

    first: the shard's chunk that is counted as 0 there.
    """
    return _named(f"step {index.step} of rank {index.identity.rank}", other, first)


def of_parity(step: int, other: str = "the other host") -> AbstractContextManager[None]:
    """Do the same for the chunks of a parity."""
    return _named(f"the parity of step {step}", other)


@contextmanager
def _named(what: str, other: str, first: int = 0) -> Iterator[None]:
    try:
        yield
    except Failure as error:
        chunk = f"Chunk {first + error.chunk} of {what}"
        match error.reason:
            case "damaged":
                raise SaveError(
                    f"{chunk} is damaged: its checksum is another than when it was written."
                ) from error
            case "refused":
                raise LinkError(
                    f"Chunk {first + error.chunk} of {what} has come to {other} damaged."
                ) from error
            case "no_memory":
                raise SaveError(f"{what[0].upper()}{what[1:]} can't be had from memory: {error}.") from error
            case _:
                raise LinkError(
                    f"{what[0].upper()}{what[1:]} did not get to or from {other}: {error}."
                ) from error


def part_of(window: Window, of: range) -> Window:
    """Return some chunks of a shard's data, or a parity's. Raises SaveError if it has not so many."""
    if of.start < 0 or of.stop > shard.chunks_in(window.size):
        raise SaveError("It has not so many chunks.")
    return window.part(of.start, len(of))


def window(descriptor: int, offset: int, size: int) -> Window:
    """Return the data of a shard in a memfd. Raises SaveError."""
    try:
        return Window(descriptor, offset, size, shard.CHUNK)
    except Failure as error:
        raise SaveError(f"What is kept in memory can't be reached: {error}.") from error
