"""A pass over a loader that draws one batch ahead of the one it hands out, around a loader of torch's.

Accelerate's loaders do, to know the last batch as such. The batch that is drawn and not handed out is in no
save. So a save has the state before it was drawn, with the process's generators then: a restart draws it
again with those, and all later ones with the generators as they are at their time, as the undisturbed
training does.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jitckpt.data.data_pass import Loader, Pass, PassState
from jitckpt.data.generators import Generators
from jitckpt.encoding import packed

_OF_INNER = ("begun", "seed", "at_start", "now", "own", "digest")
ORIGINAL = "_jitckpt_iterate"  # the class's own __iter__, where it was replaced


def is_read_ahead(loader: Any) -> bool:
    """Return whether it is one of Accelerate's loaders around one of torch's."""
    return type(loader).__name__ == "DataLoaderShard" and hasattr(loader, "base_dataloader")


def iterated(loader: Any) -> Iterator[Any]:
    """Iterate it as its own class does."""
    iterate: Callable[[Any], Iterator[Any]] = getattr(type(loader), ORIGINAL, type(loader).__iter__)
    return iterate(loader)


def begin(of: Loader, saved: PassState | None) -> Pass:
    loader: Any = of.loader
    if saved is not None:
        loader.iteration = saved.number
    one = ReadAheadPass(of, saved)
    one.state.number = loader.iteration
    if saved is not None and saved.ended:
        loader.iteration += 1  # as its own end does
    return one


class ReadAheadPass(Pass):
    """One pass; the inner one is over torch's loader, and a batch further."""

    def _begin(self) -> None:
        self._generators = Generators()
        inner_loader: Loader | None = vars(self._of).get("inner")
        if inner_loader is None:
            inner_loader = Loader(self._of.loader.base_dataloader, self._of.warn)  # type: ignore[attr-defined]
            vars(self._of)["inner"] = inner_loader
        self._inner_loader = inner_loader
        self._inner: Pass | None = None
        self._before: PassState | None = None  # the inner state before the last draw
        if self._goes_on and (self.state.begun or self.state.batches):
            self._inner = inner_loader.begin(dataclasses.replace(self.state, ahead=b""))
        if self.state.ended:
            return
        self._iterator = self._outer()

    def _outer(self) -> Iterator[Any]:
        """Iterate the framework's loader over the inner pass."""
        loader: Any = self._of.loader
        iterator = iterated(loader)
        base, rng_types = loader.base_dataloader, loader.rng_types
        loader.base_dataloader = _Source(base, self._drawn)
        if self._goes_on:
            loader.rng_types = None  # generators are as they were, and made alike long since
        given = False
        try:
            try:
                batch = next(iterator)
            finally:
                loader.base_dataloader, loader.rng_types = base, rng_types
            given = True
            yield batch
            yield from iterator
        except StopIteration:
            if not given:  # it has handed out all before: its own end does not count then
                loader.iteration += 1

    def _drawn(self) -> Iterator[Any]:
        if self._inner is None:
            self._inner = self._inner_loader.begin()
        inner, ahead = self._inner, self.state.ahead
        while True:
            host = packed.pack(self._generators.capture())
            if ahead:
                self._generators.restore(packed.unpack(ahead))
            self._before = dataclasses.replace(
                inner.state,
                at_start=dict(inner.state.at_start),
                now=dict(inner.state.now),
                ahead=ahead or host,
            )
            try:
                batch = inner.next()
            except StopIteration:
                return
            finally:
                if ahead:
                    self._generators.restore(packed.unpack(host))
                    ahead = b""
            yield batch

    def _handed_out(self, batch: Any) -> Any:
        assert self._before is not None
        for name in (*_OF_INNER, "ahead"):
            setattr(self.state, name, getattr(self._before, name))
        return batch

    def end(self, left: bool = False) -> None:
        super().end(left)
        if self._inner is not None and not self._inner.state.ended:
            self._inner.end(left)

    def drop(self) -> None:
        super().drop()
        if self._inner is not None:
            self._inner.drop()


class _Source:
    """In the place of torch's loader, while the framework's begins to iterate it."""

    def __init__(self, loader: Any, drawn: Any) -> None:
        self._loader, self._drawn = loader, drawn

    def __iter__(self) -> Iterator[Any]:
        return self._drawn()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
