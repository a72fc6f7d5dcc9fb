"""A pass whose last batch counts as not handed out yet, for a loop that a restart lets do that batch's end
again.

What is saved is the state before the last draw, with the process's generators then: a restart draws that
batch first, with those.
"""

import dataclasses
from typing import Any

from jitckpt.data.data_pass import Loader, Pass, PassState
from jitckpt.data.generators import Generators
from jitckpt.encoding import packed


class HeldBack:
    """In a loader's place where its passes are to be such."""

    def __init__(self, loader: Any) -> None:
        self.held_loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "held_loader":
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
        self._ahead = self.state.ahead
        saved = dataclasses.replace(self.state, ended=False, left=False, ahead=b"") if self._goes_on else None
        self._inner = known.begin(saved)
        self.state.chosen = self._inner.state.chosen

    def next(self) -> Any:
        """Return the next batch; what the pass says of itself is as it was before."""
        host = packed.pack(self._generators.capture())
        if self._ahead:
            self._generators.restore(packed.unpack(self._ahead))
        now = self._inner.state
        before = dataclasses.replace(
            now, at_start=dict(now.at_start), now=dict(now.now), ahead=self._ahead or host
        )
        try:
            batch = self._inner.next()
        finally:
            if self._ahead:
                self._generators.restore(packed.unpack(host))
                self._ahead = b""
        for field in dataclasses.fields(PassState):
            setattr(self.state, field.name, getattr(before, field.name))
        return batch

    def end(self, left: bool = False) -> None:
        super().end(left)
        self._inner.end(left)

    def drop(self) -> None:
        self._inner.drop()
