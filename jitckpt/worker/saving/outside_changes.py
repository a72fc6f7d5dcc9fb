"""Sees what a training changes of its state outside of its optimizer steps, and says what a save may hold.

torch counts what is written to a tensor; what is written through `data` it does not, so taking that counts,
too. What is seen in a minibatch is of one of two kinds:

- before its forward pass: masters that are copied into the model, weights that are clamped, an average in the
  weights' place. Where the loop's boundary is known (`job.steps`, `job.batches`), or the same happens
  after every step and did not before the first, it belongs to the step before. Else nobody can tell.
- from then on until its optimizer step: a perturbation that is taken back. The state after the step before is
  what it was when the minibatch began, which is copied from then on (mirror.py).

What can't be told is never saved: a save then fails with a sentence, and an older one serves.
"""

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from jitckpt import _seen
from jitckpt.console import show_size
from jitckpt.state import tensors_seen
from jitckpt.state.tensors_seen import Writes
from jitckpt.system.free_memory import free_memory
from jitckpt.worker.saving.mirror import Mirror

KEPT_STEPS = 128  # of whose minibatches it is known what happened; the host is never so far ahead

HEAD = (
    "Parameters or optimizer state are changed between an optimizer step and the next forward pass, and "
    "jitckpt can't tell whether that ends one minibatch or begins the next. If a failure comes right then, "
    "the job goes back to an older save. Write the loop as `for step in job.steps(n):`, and it is exact."
)
INSIDE = (
    "Parameters or optimizer state are changed in the middle of a minibatch, outside of the optimizer step "
    "(or may have been: a parameter's `data` was taken). From now on they are copied to the host, {size}, as "
    "each minibatch begins; until the next one has begun, a failure takes the job back to an older save."
)
AT_END = (
    "Parameters or optimizer state are changed between two loops over minibatches, outside of an optimizer "
    "step (or may have been: a parameter's `data` was taken), as by an average in the weights' place for an "
    "evaluation. From now on they are copied to the host, {size}, as such a loop ends. A failure in the "
    "first such change would have taken the job back to an older save."
)
ONCE = (
    "Parameters or optimizer state were changed outside of an optimizer step (or may have been: the `data` "
    "of a parameter was taken), and not in every minibatch. If a failure comes while such a change lasts, as "
    "that of an average in the weights' place does through an evaluation, the job goes back to an older "
    "save, or begins anew if there is none."
)
NO_ROOM = (
    "Parameters are changed now, behind the last optimizer step. The host has no room for a copy of them: a "
    "failure from here on takes the job back to an older save, or has it begin anew."
)
CLOSURE = (
    "An optimizer calls its closure several times in one step. Its state is copied to the host, {size}, as "
    "each minibatch begins, from the second one on."
)
OF_MODEL = "model."  # before the names of its tensors
Saved = Callable[[], Mapping[str, Tensor]]
_NOTHING: frozenset[str] = frozenset()


@dataclass
class _Minibatch:
    """What was seen in one. names: of what was changed from its forward pass on."""

    before: bool = False  # changed before that
    inside: bool = False
    unknown: bool = False  # when it was changed
    counted: bool = True  # `before` belongs to the step before
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Replacement:
    """What a save of a step holds in the place of what the device has. problem: why it can't be saved."""

    copies: Mapping[str, Tensor]
    problem: str | None = None


class OutsideChanges:
    """Told of the training by its thread; `replacement` is asked by the saver."""

    def __init__(self, mirror: Mirror, warn: Callable[[str], None]) -> None:
        self._mirror, self._warn = mirror, warn
        self._watched: Sequence[Mapping[str, Tensor]] = ()
        # Of these: their names, and what tells of writes to them.
        self._looked: tuple[Sequence[str], Writes] = ((), tensors_seen.writes(()))
        self._saved: Saved = dict
        self._data_taken = False
        self._in_step = False
        self._minibatches: dict[int, _Minibatch] = {}
        self._base = self._newest = 0  # the steps after which the job began, and that has ended
        self._tells_apart = False  # changes were seen: look when the forward pass begins, too
        self._after_every_step = True  # as far as was looked, and not before the first
        self._mirrored: frozenset[str] = frozenset()
        self._mirrored_at_end: frozenset[str] = frozenset()  # of loops over minibatches
        self._began_at_end = 0  # the newest minibatch before which such a loop has ended
        self._has_boundaries = False  # the loop tells them
        self.whole = False  # all is copied: the state of a step is there even while the next one is made
        self._said: set[str] = set()

    def begins(self, step: int, parameters: Sequence[Mapping[str, Tensor]]) -> None:
        """The job begins, or goes on, after `step`; parameters: by their names in a save."""
        self._base = self._newest = step
        self._watch(parameters)
        self._minibatches.clear()
        self._look_from_now()

    def taken(self) -> None:
        """The script takes a parameter's `data`, and may write there uncounted."""
        self._data_taken = True

    def minibatch_begun(
        self, step: int, *, look: bool = False, boundary: bool = False, at_end: bool = False
    ) -> bool:
        """The device is given the forward pass of `step`, or the loop says that its minibatch begins.

        look: somebody has taken the state after the step before, and wants to know whether that is still so.
        at_end: at this boundary the loop is at its end, and other things come before that minibatch.
        Returns whether it is another now; `is_counted` says whose the change is.
        """
        first = self._newest == self._base
        self._has_boundaries |= boundary
        if at_end:
            self._began_at_end = step
        if not (first or self._tells_apart or self.whole or look or at_end):
            return False
        changed = bool(self._changes())
        if first:  # that state is on the disk, or the script builds it again
            self._after_every_step = not changed
            self._look_from_now()
            return False
        if changed:
            self._after_every_step &= self._tells_apart
            self._tells_apart = True
            seen = self._minibatch(step)
            seen.before, seen.counted = True, boundary or self._after_every_step
            if not seen.counted:
                self._say(HEAD)
        elif self._tells_apart:
            self._after_every_step = False
        self._look_from_now()  # not before it is written down: the saver looks at any moment
        saved = self._saved()
        names = frozenset(saved) if self.whole else self._mirrored
        if at_end:
            names |= self._mirrored_at_end
        if self.whole:
            self._say(CLOSURE, names)
        self._mirror.take(step - 1, {name: saved[name] for name in names if name in saved})
        return changed

    @property
    def has_changed(self) -> bool:
        """Whether anything has changed since it was looked at last; asking makes no difference to that."""
        return bool(self._changes())

    def is_counted(self, step: int) -> bool:
        """Whether what was changed before the forward pass of `step` belongs to the step before."""
        return self._minibatch(step).counted

    @property
    def tells_apart(self) -> bool:
        """Whether anything was changed outside of a step by now."""
        return self._tells_apart or self.whole

    @property
    def end_the_step(self) -> bool:
        """Whether the device has come to the state after a step only as the next forward pass begins."""
        return self._tells_apart and self._after_every_step

    def will_change(self, *, of_model_alone: bool) -> None:
        """Parameters, or all, are about to be changed behind the newest step: copy them before.

        No step follows.
        """
        saved = self._saved()
        names = [name for name in saved if name.startswith(OF_MODEL) or not of_model_alone]
        room = free_memory() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if 2 * sum(saved[name].nbytes for name in names) > room:
            self._say(NO_ROOM)
            return
        self._mirror.take(self._newest, {name: saved[name] for name in names})

    def step_begun(self, step: int) -> bool:
        """The device is given the optimizer step. Returns whether nobody knows when something was changed."""
        is_unknown = False
        if changes := self._changes():
            seen = self._minibatch(step)
            is_at_end = self._began_at_end == step
            if not (self._tells_apart or is_at_end):
                seen.unknown = is_unknown = True
            else:
                seen.inside, seen.names = True, frozenset(changes)
                self._note_inside(seen.names, is_at_end=is_at_end)
            self._tells_apart = True
            self._look_from_now()
        elif self._tells_apart and not self._has_boundaries and self._were_changed_once(step - 1):
            self._say(ONCE)
        self._in_step = True
        return is_unknown

    def _note_inside(self, names: frozenset[str], *, is_at_end: bool) -> None:
        """These are changed in minibatches, so they are copied as one begins: each, or one behind a loop."""
        if is_at_end:
            self._mirrored_at_end |= names
            self._say(AT_END, self._mirrored_at_end)
        else:
            self._mirrored |= names
            self._say(INSIDE, self._mirrored)

    def _were_changed_once(self, step: int) -> bool:
        """Whether it is not known when something was changed before this step, and nothing was since."""
        seen, after = self._minibatches.get(step), self._minibatches.get(step + 1)
        return seen is not None and seen.unknown and (after is None or not after.before)

    def closure_again(self, step: int) -> None:
        """A step calls its closure once more, with parameters that are no more those of the step before."""
        seen, saved = self._minibatch(step), self._saved()
        seen.inside, seen.names = True, frozenset(saved)
        self.whole = True

    def ended(self, step: int, watched: Sequence[Mapping[str, Tensor]], saved: Saved) -> None:
        """The step is enqueued. watched: tensors by their names; saved: returns all that a save takes."""
        self._newest, self._saved = step, saved
        self._watch(watched)
        self._looked[1].look()
        self._data_taken = self._in_step = False
        self._minibatches.pop(step - KEPT_STEPS, None)

    def replacement(self, step: int) -> Replacement:
        """Return what a save of `step` takes from elsewhere than the device, which has ended it and rests.

        Called by the saver, while the training thread waits or runs on the host alone.
        """
        seen = self._minibatches.get(step + 1, _Minibatch())
        if step == self._newest and not self._in_step and (changes := self._changes()):
            seen = _Minibatch(seen.before, True, seen.unknown, seen.counted, frozenset(changes))
        if not (seen.before or seen.inside or seen.unknown):
            return Replacement({})
        copies = self._mirror.of(step)
        whole = copies is not None and seen.names <= copies.keys()
        if copies is None or not whole or seen.unknown or (seen.before and not seen.counted):
            return Replacement(
                {},
                f"The script has changed parameters or optimizer state since optimizer step {step}, outside "
                "of the step, so what the device holds is the state of no minibatch.",
            )
        return Replacement(copies if seen.inside else {})

    def has_all_of(self, step: int) -> bool:
        """Whether the whole state after `step` is in copies, however far the device is with the next one."""
        return self.whole and self._mirror.of(step) is not None

    def _watch(self, watched: Sequence[Mapping[str, Tensor]]) -> None:
        """Take what is watched from now on: the same mappings have the same tensors."""
        if len(watched) == len(self._watched) and all(map(operator.is_, watched, self._watched)):
            return
        self._watched = [*watched]
        found = [(name, tensor) for one in watched for name, tensor in one.items() if _has_memory(tensor)]
        self._looked = [name for name, _ in found], tensors_seen.writes(tensor for _, tensor in found)

    def _minibatch(self, step: int) -> _Minibatch:
        return self._minibatches.setdefault(step, _Minibatch())

    def _changes(self) -> Set[str]:
        """Return the names of what has changed since it was looked at last."""
        names, writes = self._looked
        numbers = writes.changed()
        if not (numbers or self._data_taken):
            return _NOTHING
        taken = {name for name in names if name.startswith(OF_MODEL)} if self._data_taken else set()
        return taken.union([names[number] for number in numbers])

    def _look_from_now(self) -> None:
        self._looked[1].look()
        self._data_taken = False

    def _say(self, text: str, copied: Iterable[str] = ()) -> None:
        if text not in self._said:
            self._said.add(text)
            saved = self._saved()
            size = 2 * sum(saved[name].nbytes for name in copied if name in saved)
            self._warn(text.format(size=show_size(size)))


def _has_memory(tensor: Tensor) -> bool:
    """Whether torch can tell where it lies; of FSDP1 some parts have no memory now and then."""
    try:
        _seen.versions([tensor])
    except (RuntimeError, TypeError, ValueError, BufferError, AttributeError):
        return False
    return True
