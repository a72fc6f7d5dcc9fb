"""Generators of random numbers that the script has made itself: a part of the rank's own state.

They are found by who knows the script's variables, and go by the names that lead to them. One that has never
been used since it was found the script builds again, so it is in no save.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jitckpt._seen import Seen
from jitckpt.data import generators
from jitckpt.data.kept_generator import KeptGenerator
from jitckpt.encoding.tree_codec import Encoded, Json

PART = "script"
LACKING = (
    "The save has the state of {names}, which jitckpt had found among the script's variables, and does not "
    "find now: it is put into nothing, so this run may differ from an undisturbed one. Make it before the "
    "loop, under the same name, as in the start that has saved."
)


class ScriptGenerators:
    """All of a job's, by name."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptGenerator] = {}
        self._first: dict[str, Encoded] = {}  # their states as they were found
        self._last: dict[str, Encoded] = {}  # those that were captured last
        self._captured = Encoded({}, {})
        self._saved: dict[str, Any] = {}  # what was restored and is in no generator yet

    def follow(self, found: Iterable[tuple[str, object]]) -> None:
        """Keep these, too, by their names; another one of a name takes the place of that before."""
        for name, one in found:
            known = self._kept.get(name)
            if known is not None and known.generator is one:
                continue
            kept = self._kept[name] = generators.of_script[name] = KeptGenerator(one, f"{PART}.{name}")
            self._first[name] = kept.capture()
            self._put(name)

    def capture(self) -> Encoded:
        """Return the states of those that were used; the same object while none is."""
        now = {name: one.capture() for name, one in self._kept.items()}
        used = {name: state for name, state in now.items() if state is not self._first[name]}
        if used.keys() != self._last.keys() or any(one is not self._last[name] for name, one in used.items()):
            tree: Json = {name: one.tree for name, one in used.items()}
            tensors = {key: tensor for one in used.values() for key, tensor in one.tensors.items()}
            if tree == self._captured.tree:
                tree = self._captured.tree  # by which is told that nothing but numbers is new
            self._captured, self._last = Encoded(tree, tensors), used
        return self._captured

    def now(self) -> list[Encoded]:
        """Return the states of all; what `capture` and `is_same` tell stays as it is."""
        return [one.capture() for one in self._kept.values()]

    def is_same(self) -> bool:
        """Whether `capture` would return the same object."""
        before = self._captured
        return not self._kept or self.capture() is before

    @property
    def told(self) -> Seen | None:
        """What tells by itself that `is_same`, while there are none; None else."""
        if self._kept:
            return None
        seen = Seen()
        seen.size(self._kept)
        return seen

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Put back what `capture` returned, decoded: into those that are there, and that are found later."""
        self._saved = {**(saved or {})}
        for name in [*self._saved]:
            self._put(name)

    def _put(self, name: str) -> None:
        if name in self._saved and name in self._kept:
            self._kept[name].restore(self._saved.pop(name))
            self._first[name] = Encoded(None, {})  # from now on it is in each save

    def names(self) -> list[str]:
        """Return which are in a save by now."""
        return [*self.capture().tree]

    def lacking(self) -> str:
        """Return, once, a sentence on what was restored and is not there; "" for none."""
        names, self._saved = ", ".join(self._saved), {}
        return LACKING.format(names=names) if names else ""

    def kept_ids(self) -> set[int]:
        """Return the ids of all."""
        return {id(one.generator) for one in self._kept.values()}

    def end(self) -> None:
        """Let all go."""
        for name in self._kept:
            generators.of_script.pop(name, None)
        self._kept.clear()
