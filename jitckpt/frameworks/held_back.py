"""A pass whose last batches count as not handed out yet, for a loop that a restart lets end a batch again.

What is saved is the state before these were drawn, with the process's generators as they were before each: a
restart draws these batches first, with those.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jitckpt.data.data_pass import Loader, Pass, PassState
from jitckpt.data.generators import Generators
from jitckpt.encoding import packed

_LENGTH = 4  # bytes of a number


class HeldBack:
    """In a loader's place where its passes are to be such. count: returns how many batches are held back."""

    def __init__(self, loader: Any, count: Callable[[], int]) -> None:
        self.held_loader, self.held_count = loader, count

    def __getattr__(self, name: str) -> Any:
        if name in ("held_loader", "held_count"):
            raise AttributeError(name)
        return getattr(self.held_loader, name)

    def __len__(self) -> int:
        return len(self.held_loader)


def is_held_back(loader: Any) -> bool:
    return isinstance(loader, HeldBack)


class HeldBackPass(Pass):
    """One pass; the inner one, over the loader itself, is a batch further."""

    chooses = False

    def _begin(self) -> None:
        self._generators = Generators()
        known: Loader | None = vars(self._of).get("inner")
        if known is None:
            known = vars(self._of)["inner"] = Loader(self._of.loader.held_loader, self._of.warn)  # type: ignore[attr-defined]
        self._ahead = _parts_of(self.state.ahead)  # generators that the next draws are made with
        self._before: list[tuple[PassState, bytes]] = []  # states and generators, before the newest draws
        saved = dataclasses.replace(self.state, ended=False, left=False, ahead=b"") if self._goes_on else None
        self._inner = known.begin(saved)
        self.state.chosen = self._inner.state.chosen

    def next(self) -> Any:
        """Return the next batch; what the pass says of itself is as it was before."""
        host = packed.pack(self._generators.capture())
        drawn_from = self._ahead[0] if self._ahead else host
        if self._ahead:
            self._generators.restore(packed.unpack(drawn_from))
        now = self._inner.state
        before = dataclasses.replace(now, at_start=dict(now.at_start), now=dict(now.now))
        self._before.append((before, drawn_from))
        try:
            return self._inner.next()
        except StopIteration:
            self._before.pop()  # one that is drawn ahead is not there, and the last is the only one held back
            self._before = self._before[-1:]
            raise
        finally:
            if self._ahead:
                self._generators.restore(packed.unpack(host))
            self._ahead = self._ahead[1:]
            self._hold_back()

    def _hold_back(self) -> None:
        held: HeldBack = self._of.loader  # type: ignore[assignment]
        self._before = self._before[-held.held_count() :]
        if not self._before:
            return
        generators = [drawn_from for _, drawn_from in self._before] + self._ahead
        # What its sampler begins with is known once the first batch is drawn: torch draws a seed before that.
        begun = self._inner.state.begun
        told = dataclasses.replace(self._before[0][0], ahead=_joined(generators), begun=begun)
        for field in dataclasses.fields(PassState):
            setattr(self.state, field.name, getattr(told, field.name))

    def end(self, left: bool = False) -> None:
        super().end(left)
        self._inner.end(left)

    def drop(self) -> None:
        self._inner.drop()


def _joined(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(_LENGTH, "little") + part for part in parts)


def _parts_of(joined: bytes) -> list[bytes]:
    parts = []
    while joined:
        end = _LENGTH + int.from_bytes(joined[:_LENGTH], "little")
        parts.append(joined[_LENGTH:end])
        joined = joined[end:]
    return parts
