"""The script's loop where its boundaries are known: `job.steps`, `job.epochs` and `job.batches`.

One iteration is one minibatch, whatever optimizers make steps in it; one in which none does belongs to the
next. When the script asks for the next one, all that it did after the optimizer step is done, and belongs to
that step. What comes between the end of a loop over batches and the next optimizer step (an evaluation, a
scheduler's step) belongs to that next step: a restart begins it again, with all as it was.
"""

import dis
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from jitckpt._seen import Exit, Seen
from jitckpt.data import chosen_samples, counted, dealing, exits, left_loops, made_in_loop, progress_bars
from jitckpt.data.between_loops import BetweenLoops, Head, Stretch, saved_stretches
from jitckpt.data.data_pass import Loader, Pass, PassState
from jitckpt.data.generators import Generators, samplers
from jitckpt.data.loop_exits import OVER_EPOCHS, OVER_STEPS, LoopExits, exit_of
from jitckpt.data.said_once import SaidOnce
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import JitckptError
from jitckpt.system.bytecode import place_in

_ITERATION, _LEFT, _EPOCH, _BOUNDARY, _FIRST = range(5)  # places in the numbers; behind them, of each pass,
_OF_A_PASS = 4  # batches, whether ended, whether left, digest; and last
# Which of the loops over epochs it is, which over steps, and behind how many passes that has begun; versions
# before had the first two, or none.
_LOOPS = 3
# What CPython does as a loop's iterator goes, if not an exception is the cause.
_LEAVING = frozenset({"POP_TOP", "FOR_ITER", "END_FOR", "POP_ITER"})
NUMBERS = "loop.numbers"
# What else `capture` tells of the loop, and of a stretch between two, and of a pass.
_KEPT = ("_passes", "_previous")
_KEPT_OF_A_STRETCH = ("drawn_from", "said")
_KEPT_OF_A_PASS = (
    *("seed", "begun", "own", "ahead", "chosen", "at_start", "now", "dealt", "before", "number", "exit"),
)
_TOLD = "_jitckpt_epoch"  # what a sampler was told last
_EMPTY = torch.zeros(0, dtype=torch.uint8, device="cpu")
_IN_A_GENERATOR = frozenset({"YIELD_VALUE", "RESUME"})
Asked = tuple[CodeType, int]  # the code that has asked for a minibatch, and where in it


ONE_IN_ANOTHER = (
    "A loop over job.batches was begun in another one, and makes optimizer steps: a restart could not go on "
    "in both. Iterate the outer loader without job.batches, or both with zip()."
)
NOT_ENDED = (
    "In epoch {epoch} a loop over job.batches was neither run to its end nor left with break, so a failure "
    "after it would go on in it. Use it in a for statement."
)
TOLD_BEFORE = (
    "A loop over job.batches outside of job.epochs draws by a sampler that an earlier loop over job.epochs "
    "has told its last epoch. A restart in it does not tell it that, so it would give another order. Call "
    "the sampler's set_epoch() before it, or put the loop into `for epoch in job.epochs(1):`."
)
STEPS_IN_BATCHES = (
    "A loop over job.steps is begun in one over job.batches: after a failure in it the job goes on with the "
    "next batch, and the rest of its steps with this one is left out. Take the steps by range(), so that one "
    "batch with all its steps is one minibatch."
)


DROPPED = (
    "A loop over job.batches was dropped before its end, and not left with break: by an exception that was "
    "caught outside of it, or since a batch was only looked at. It counts as left from here on, so a restart "
    "later in this epoch gets no batch of it, and does not do what followed the exception. Leave a loop with "
    "break, and have a variable say why, or by an exception of a class of your own that an `except` of that "
    "class catches. To look at a batch, take it of the loader: next(iter(loader))."
)


class Epochs:
    """Hears of the script's loops over epochs, each by its number."""

    def loop_begins(self, *, is_outermost: bool) -> None:
        """A loop over epochs, steps or batches begins. is_outermost: in no other one."""

    def begins(self, frame: FrameType) -> None:
        """The script is given an epoch, in this frame."""

    def goes_on(self) -> None:
        """It is about to be given the epoch in which a restart goes on, behind its top."""

    def ended(self, loop: int, asked: Asked | None) -> None:
        """It has run through a loop, or left it. asked: where its for statement asks for an epoch.

        None: it is through loops over batches and steps before the next one over epochs.
        """

    def passed_by(self, loop: int) -> None:
        """A restart is at the end of a loop that it does not go through again."""

    def passed_by_outside(self, loop: int, of_steps: bool) -> None:
        """It is at that of the next of such loops, counted as this one over epochs."""


class Loop:
    """Where the loops are, as a part of the rank-local state, and how they go on from there."""

    def __init__(
        self,
        *,
        begins: Callable[[], None],
        boundary: Callable[[FrameType | None], bool],
        write_again: Callable[[], None],
        put_back: Callable[[], None],
        warn: Callable[[str], None],
        asked: Callable[[FrameType], None] = lambda frame: None,
        epochs: "Epochs | None" = None,
        pass_begins: Callable[[], None] = lambda: None,
        drawn: Callable[[int], None] = lambda number: None,
        at_last: Callable[[Asked, bool], None] = lambda asked, is_known: None,
        loop_ended: Callable[[], None] = lambda: None,
        passed_by: Callable[[], None] = lambda: None,
        head: Head | None = None,
    ) -> None:
        """begins: the first loop begins. boundary: the script asks for its next minibatch, in this frame.

        None where it does not ask, but comes to a loop's end. It returns whether optimizer steps have been
        made since the last one. write_again: write what this rank alone knows after the last step once more.
        put_back: put the state back that the job was restored to, whatever the script has done since the loop
        began. asked: it has asked, in this frame, and had made no steps. epochs: hears of them. pass_begins:
        its own loop begins a pass. drawn: it is given a batch, of that pass of the epoch.
        at_last: it is at a loop's end, as boundary will say, or may be (not known); it asks there.
        loop_ended: it was, with nothing done since the last optimizer step. passed_by: in a restart, at the
        end of a loop before the one that goes on. head: looks at what it computes outside of its loops.
        """
        self.is_used = self.is_at_end = False  # the latter: the script is known to be at the end of a loop
        self.minibatches = 0  # that have ended in this process
        self.last_boundary = 0  # step whose state was written again, once the script had gone on from it
        self._begins, self._boundary, self._write_again = begins, boundary, write_again
        self._put_back, self._warn, self._asked = put_back, warn, asked
        self._of_epochs, self._pass_begins, self._drawn = epochs or Epochs(), pass_begins, drawn
        self._at_last, self._loop_ended, self._passed_by = at_last, loop_ended, passed_by
        self._host, self.warn_once = Generators(), SaidOnce(warn)
        self._between, self._exits = BetweenLoops(head, warn), LoopExits(self.warn_once)
        self._loaders: dict[int, Loader] = {}
        self._iteration, self._left, self._epoch = 0, False, 0
        self._in_epochs = self._in_steps = self._went_on = self._restored = False
        self._tells_samplers = True  # the epoch
        self._epoch_loop = self._step_loop = 0  # which of several it is in; over steps, in this epoch
        self._epoch_loops_begun = self._step_loops_begun = 0  # in this process
        self._dropped: list[PassState] = []  # whose iterators went, and nobody knows yet whether by a failure
        self._is_outside = False  # in loops that none over epochs is around, of which some have begun
        self._given_outside = False  # the newest batch was asked for outside of a loop over steps
        self._driven: Iterator[int] | None = None
        self._passes: list[PassState] = []  # of this epoch, in the order in which they began
        self._of: list[Loader] = []  # theirs
        self._previous: list[PassState] = []  # of the epoch before, until that number's pass begins again
        self._previous_saved: list[PassState] = []  # those of another process
        self._saved: list[PassState] = []  # those that a restart goes on with
        self._goes_on_at: int | None = None  # of those, the one where the state is put back
        self._goes_on_in_steps = False  # it is put back in a loop over steps, behind all of them
        self._steps_behind = 0  # behind so many passes of the epoch the newest loop over steps has begun
        self._newest: tuple[Pass | None, int] = (None, 0)  # pass that gave the last batch, iterations by then
        self._has_given = False  # a batch since the last iteration with an optimizer step
        self._structure: object = None
        self._tree: Json = None
        self._tensors: dict[str, tuple[bytes, Tensor]] = {}
        self._put_numbers()

    def steps(self, number: int) -> Iterator[int]:
        """Iterate range(number), from where the job is."""
        return self._exits.seen(self._steps(number))

    def _steps(self, number: int) -> Iterator[int]:
        if self._in_steps:
            raise JitckptError("job.steps was called in a loop over job.steps: only one of them can go on.")
        self.begin()
        if self._given_outside and any(not one.ended for one in self._passes):
            self._warn(STEPS_IN_BATCHES)
        if self.passes_by(True):
            return  # with all that was before a later loop over epochs
        self._between.ends()
        begun, self._step_loops_begun = self._step_loops_begun, self._step_loops_begun + 1
        if begun < self._step_loop:
            self._passed_by()
            self._no_loop_goes_on()
            self._exits.leave_again(OVER_STEPS, begun)
            return  # it was at its end before the failure
        if begun > self._step_loop:
            self._step_loop, self._iteration, self._left = begun, 0, False
        if self._iteration == 0:
            self._steps_behind = len(self._passes)
            self._put_numbers()
        self._in_steps = True
        first = number if self._left else self._iteration
        if self._iteration > 0 and (self._goes_on_in_steps or not self._saved) and not self._went_on:
            self._put_back()
            self._goes_on_in_steps = False
        elif first >= number and self._goes_on_at is not None:
            self._passed_by()
        self._went_on, asks = True, None
        try:
            for step in range(first, number):
                asks, self.is_at_end = asks or left_loops.for_statement(sys._getframe(1)), False
                self._reached(sys._getframe(1))
                self._iteration = step + 1
                self._put_numbers()
                yield step
            caller, self.is_at_end = sys._getframe(1), True
            self._at_last((caller.f_code, place_in(caller)), True)
            self._reached()
            self._in_steps = False
            self._no_loop_goes_on()
            self._exits.leave_again(OVER_STEPS, begun)
        except GeneratorExit:
            exit = self._exits.newest(leaves := _who_leaves())
            if exit or leaves is not None:
                self._reached()
                self._left, self._in_steps = True, False
                self._exits.left(OVER_STEPS, begun, exit)
                self._ended()
                _name_elsewhere(self, None if exit else leaves, asks)
            raise
        finally:
            self._in_steps = False

    def epochs(self, number: int, scripts: FrameType | None = None) -> Iterator[int]:
        """Iterate range(number), from the epoch in which the job is.

        scripts: the frame with the loop, where that is the script's own for a framework, which tells samplers
        the epoch itself. None: who asks, and samplers are told here.
        """
        return self._exits.seen(self._all_epochs(number, scripts))

    def _all_epochs(self, number: int, scripts: FrameType | None) -> Iterator[int]:
        self._tells_samplers = scripts is None
        if self._in_epochs or self._in_steps:
            raise JitckptError("job.epochs was called in another loop of the job: it must be the outermost.")
        self.begin()
        begun, self._epoch_loops_begun = self._epoch_loops_begun, self._epoch_loops_begun + 1
        if self._is_outside and begun - 1 == self._epoch_loop:
            self._of_epochs.ended(begun - 1, None)
            self._exits.are_passed_by(one.exit for one in self._passes)
        self._is_outside = False
        if begun < self._epoch_loop:
            self._of_epochs.passed_by(begun)
            self._between.begins()
            self._exits.leave_again(OVER_EPOCHS, begun)
            return  # it was at its end before the failure
        if begun > self._epoch_loop:
            self._epoch_loop = begun
            self._begin_epoch(0)
        self._in_epochs = True
        is_between = self._epoch > 0 and self._iteration == 0 and not (self._left or self._saved)
        if is_between and self._driven is None and not self._went_on:  # each epoch is one minibatch
            self._put_back()
            self._went_on = True
        elif self._restored:
            self._of_epochs.goes_on()
        self._restored, asks, hear = False, None, (self._of_epochs, self._between)
        try:
            for epoch in range(self._epoch, number):
                # No variable has the frame: it may have what holds on to this iterator.
                asks = _epoch_begins((scripts or sys._getframe(1)) if self._driven is None else None, *hear)
                yield epoch
                if any(not one.ended for one in self._passes):
                    self._warn(NOT_ENDED.format(epoch=epoch))
                self._begin_epoch(epoch + 1)
                self._reached()
            self._of_epochs.ended(begun, asks)
            self._between.begins()
        except GeneratorExit:
            exit = self._exits.newest(leaves := _who_leaves())
            if exit or leaves is not None:
                self._exits.left(OVER_EPOCHS, begun, exit)
                self._of_epochs.ended(begun, asks)
                _name_elsewhere(self, None if exit else leaves, asks)
            raise
        finally:
            self._in_epochs = False

    def passes_by(self, of_steps: bool | None = None) -> bool:
        """Another loop begins. Return whether it is over for a restart, with those around it.

        Those outside of loops over epochs are counted with these, all between two of them as one. of_steps:
        or over batches; None: it is only asked for.
        """
        if self._in_epochs or self._driven is not None:
            return False
        if not self._is_outside:
            self._is_outside = True
            begun, self._epoch_loops_begun = self._epoch_loops_begun, self._epoch_loops_begun + 1
            if begun > self._epoch_loop:
                self._epoch_loop = begun
                self._begin_epoch(0, is_outside=True)
            self._restored &= begun != self._epoch_loop
        if (is_over := self._epoch_loops_begun <= self._epoch_loop) and of_steps is not None:
            self._of_epochs.passed_by_outside(self._epoch_loops_begun - 1, of_steps)
        return is_over

    def epoch_began_with(self, states: bytes) -> None:
        """The epoch has begun with all generators so (generators.all_packed), before the job knew of it."""
        self._between.began_with(states)

    def _begin_epoch(self, number: int, *, is_outside: bool = False) -> None:
        self._epoch, self._iteration, self._left = number, 0, False
        self._step_loop = self._step_loops_begun = 0
        self._exits.epoch_begins()
        self._given_outside = False
        self._previous = [*self._passes, *self._previous[len(self._passes) :]]
        self._passes, self._of, self._saved, self._goes_on_at = [], [], [], None
        self._goes_on_in_steps, self._steps_behind = False, 0
        # A framework begins where it will.
        self._between.begin_epoch(tells=self._driven is None, stays_open=is_outside)
        self._put_numbers()

    def batches(self, loader: Iterable[Any]) -> "Batches":
        return Batches(self, loader)

    # For a framework's own loop, which calls these in the place of the script's for statements.

    def begin_epoch(self) -> int:
        """Go on to the next epoch, or to that in which the job is; returns its number."""
        if self._driven is None:
            self._driven = self.epochs(sys.maxsize)
        return next(self._driven)

    def minibatch_is_over(self) -> None:
        """All that belongs to the optimizer steps since the last call is done."""
        one, _ = self._newest
        self.is_at_end = one is not None and one.is_at_last
        self._reached()

    def go_on_now(self, number: int | None = None) -> None:
        """Put the state back here, and not with the first batch: what comes now belongs to the next step.

        number: if it is that pass in which it would be.
        """
        if self._goes_on_at is not None and number in (None, self._goes_on_at):
            self._goes_on_at = None
            self._put_back()

    @property
    def is_repeating(self) -> bool:
        """Whether a restart is in passes that are done: the state is put back behind them."""
        return self._goes_on_at is not None or self._goes_on_in_steps

    @property
    def epoch(self) -> int:
        """The epoch in which the job is."""
        return self._epoch

    @property
    def round(self) -> tuple[int, ...]:
        """Which pass or loop over steps it is."""
        return self._epoch_loop, self._epoch, len(self._passes), self._step_loops_begun

    @property
    def batches_done(self) -> int:
        """How many batches of the newest pass in the restored epoch were handed out."""
        return self._saved[-1].batches if self._saved else 0

    @property
    def is_at_epochs_end(self) -> bool:
        """Whether the restored epoch has no batches left."""
        return bool(self._saved) and self._saved[-1].ended

    def done_of_next(self, loader: Iterable[Any]) -> int:
        """Return how many batches the next pass to begin, over this loader, leaves out."""
        self.begin()
        number = len(self._passes)
        if self.passes_by() or number >= len(self._saved) or self._saved[number].ended:
            return 0
        return self._saved[number].position_in(loader)

    def ends_step(self, micro_batches: int) -> bool:
        """Return whether the newest batch is the last of so many, or of its pass."""
        one, _ = self._newest
        return one is None or one.state.batches % micro_batches == 0 or one.is_at_last

    def begin_pass(self, loader: Iterable[Any]) -> tuple[Pass, int]:
        """Begin a pass over a loader; returns it and its number among those of the epoch."""
        self.begin()
        number = len(self._passes)
        saved = self._saved[number] if number < len(self._saved) else None
        self._between.ends()
        if not self._in_epochs or self._driven is not None:
            self._pass_begins()
        if self._in_epochs and self._tells_samplers:
            _set_epoch(loader, self._epoch)
        elif not self._in_epochs and any(hasattr(one, _TOLD) for one in _samplers(loader)):
            self.warn_once(TOLD_BEFORE)
        known = self._loaders.get(id(loader))
        if known is None:
            self._loaders = {key: one for key, one in self._loaders.items() if not one.is_let_go}
            known = self._loaders[id(loader)] = Loader(loader, self._warn)
        previous = self._previous[number] if number < len(self._previous) else None
        of_save = previous is not None and any(previous is one for one in self._previous_saved)
        if previous is not None and of_save and saved is None and previous.ended and known.may_have_made:
            chosen_samples.say_what_is_lost(previous.chosen, self._warn)
            previous.chosen = b""  # this epoch's samples are others
            previous.is_of_before = True
            with known.generators.made_again(previous.begun):
                _begin_again(known, previous, self._host)  # for what it left: generators, persistent workers
        one = known.begin() if saved is None else _begin_again(known, saved, self._host)
        if previous is not None:
            previous.forget()
        for earlier, of in zip(self._passes, self._of, strict=True):
            if of is known and earlier.ended:
                earlier.forget()  # all that is to come follows from the new one
        self._passes.append(one.state)
        self._of.append(known)
        self._put_numbers()
        return one, number

    def next_batch(self, one: Pass, number: int, frame: FrameType | None = None) -> Any:
        """Return the next batch of a pass; the script, in this frame, is between two minibatches."""
        self.is_at_end = one.is_at_last
        if frame is not None and one.may_be_at_last:
            self._at_last((frame.f_code, place_in(frame)), self.is_at_end)
        self._reached(frame)
        self._leave_dropped()
        newest, minibatches = self._newest
        outer = any(not other.ended for other in self._passes[:number])
        if newest is one and minibatches < self.minibatches and outer and not self._in_steps:
            raise JitckptError(ONE_IN_ANOTHER)
        if self._goes_on_at == number:
            self._goes_on_at = None
            self._put_back()
        elif self.is_repeating and one.state.ended:
            self._passed_by()
        try:
            batch = one.next()
        except StopIteration:
            self._ended()
            self._exits.raise_again(one.state.exit)
            raise
        self._newest = one, self.minibatches
        self._drawn(number)
        self._given_outside = not self._in_steps
        self._has_given = True
        self._put_numbers()
        return batch

    def leave(self, one: Pass, asked: Asked | None = None) -> None:
        """The script has left the loop over this pass. asked: where it had asked for a batch."""
        self.is_at_end = True
        if asked is not None:
            self._at_last(asked, True)
        self._reached()
        one.end(left=True)
        self._ended()

    def drop(self, one: Pass) -> None:
        """The iterator over a pass goes: perhaps by a failure, or by an exception that the script catches."""
        self._dropped.append(one.state)
        one.drop()

    def _leave_dropped(self) -> None:
        """The script goes on, so no failure was the cause: nothing more is asked of these passes."""
        while self._dropped:
            one = self._dropped.pop()
            if not one.ended:
                self._warn(DROPPED)
                self.is_at_end = True
                self._reached()
                one.ended = one.left = True
                self._ended()  # so that a rank which fails on the way to the next loop hears of it

    @property
    def is_between(self) -> bool:
        """Whether no loop over steps or batches goes on."""
        return not self._in_steps and all(one.ended for one in self._passes)

    @property
    def goes_on(self) -> bool:
        """Whether a restart is to be put back where it was: in a pass, or in a loop over steps."""
        return self.is_repeating or self._iteration > 0

    def close(self) -> None:
        """End workers that would stay for the next pass."""
        for loader in self._loaders.values():
            loader.workers = None

    def capture(self) -> Encoded:
        """Return where the loops are, under the name "loop"; what is as before is the same object."""
        kept, stretches = self._kept(), self._between.ended
        structure = (
            [len(self._passes), len(stretches), [*self._exits.told]],
            [(one.seed, [*one.at_start], [*one.now], one.dealt, one.before, one.number) for one in kept],
        )
        if structure != self._structure:
            self._structure = structure
            self._tree = _tree_of_all(kept, len(self._passes), len(stretches), self._exits)
        self._tensors = _tensors_of([*_pieces(kept, stretches), *self._exits.pieces()], self._tensors)
        named = {name: tensor for name, (_, tensor) in self._tensors.items()}
        numbers = torch.frombuffer(bytearray(self._numbers), dtype=torch.int64)
        return Encoded(self._tree, {NUMBERS: numbers, **named})

    def look(self) -> Seen:
        """Return what tells that `capture` would return what it just did, but for the numbers."""
        return _seen_of(self, self._between, self._exits, self._kept())

    def numbers(self) -> bytes:
        """Return the numbers as `capture` has them: all that is new in most iterations."""
        return self._numbers.tobytes()

    def _kept(self) -> list[PassState]:
        return [*self._passes, *self._previous]

    def restore(
        self,
        own: Mapping[str, Any],
        of_saver: Mapping[str, Any] | None,
        step: int,
        *,
        of_others: bool = False,
    ) -> bool:
        """Go on where `capture` was called, decoded.

        of_saver: what a replica said, which has perhaps seen a loop's end that this rank did not come to.
        of_others: another number of ranks was at work when it was called.
        Returns whether it is known that nothing is missing of what this rank did after the optimizer step.
        """
        self._restored = True
        numbers = own["numbers"].tolist()
        self._iteration, self._left, self._epoch = numbers[_ITERATION], bool(numbers[_LEFT]), numbers[_EPOCH]
        if has_loops := (len(numbers) - _FIRST) % _OF_A_PASS:
            loops = [*numbers[-has_loops:], 0][:_LOOPS]
            self._epoch_loop, self._step_loop, self._steps_behind = loops
        self._between.restore(saved_stretches(own), of_others=of_others)
        self._exits.restore(own)
        kept = [*own["passes"], *own["previous"]]
        passes = [_pass_of(one, _numbers_of(numbers, at)) for at, one in enumerate(kept)]
        count = len(own["passes"])
        self._saved, self._previous = passes[:count], passes[count:]
        self._previous_saved = [*self._previous]
        for one in self._saved:
            one.of_others = of_others
        if of_saver is not None:
            other = of_saver["numbers"].tolist()
            if other[_ITERATION] == self._iteration:
                if other[_LEFT] and not self._left:
                    self._exits.take(of_saver, self._step_loop)
                self._left |= bool(other[_LEFT])
            _take_ends(self._saved, of_saver)
        going = [at for at, one in enumerate(self._saved) if not one.ended]
        is_in_steps = self._iteration > 0 and self._steps_behind == count > 0
        self._goes_on_in_steps = is_in_steps and not going
        self._goes_on_at = going[0] if going else None if is_in_steps or not count else count - 1
        self.last_boundary = numbers[_BOUNDARY]
        return self.last_boundary in (0, step)

    def told_boundary(self, step: int) -> None:
        """The state after `step` is written once more, as something has changed since the optimizer step."""
        self.last_boundary = step
        self._put_numbers()

    def count_from(self, step: int) -> None:
        """The save that the job goes on with knows of no loop: it was one over range()."""
        self._iteration = step

    def begin(self) -> None:
        if not self.is_used:
            self.is_used = True
            made_in_loop.watch()
            self._begins()
            self._put_numbers()
            self._reached()
        self._of_epochs.loop_begins(is_outermost=not (self._in_epochs or self._in_steps))
        self._leave_dropped()

    def _reached(self, frame: FrameType | None = None) -> None:
        """The script asks for the next minibatch, or is at the loop's end."""
        if self._boundary(frame):
            self.minibatches += 1
            self._has_given = False
        elif frame is not None:
            self._asked(frame)

    def _ended(self) -> None:
        """It is known since then that the loop is at its end.

        Batches that came to no optimizer step (accumulated, of an evaluation) belong to the next one: without
        them it would be another one, so a restart reads them again.
        """
        self._put_numbers()
        if self.is_between and not self._has_given:
            self._loop_ended()
            self._write_again()
        self._no_loop_goes_on()

    def _no_loop_goes_on(self) -> None:
        """A loop has ended: what the script does now is between two of them, if it is in no other one."""
        if self.is_between:
            self._between.begins()

    def _put_numbers(self) -> None:
        numbers = [self._iteration, self._left, self._epoch, self.last_boundary]
        for one in (*self._passes, *self._previous):
            numbers += [one.batches, one.ended, one.left, one.digest]
        self._numbers = array("q", [*numbers, self._epoch_loop, self._step_loop, self._steps_behind])


COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
OF_COMPREHENSION = (
    "Optimizer steps are made in a comprehension over job.batches, or in one that sum() and the like read. "
    "After a failure it goes on with the next batch, and what it has made of those before is lost. Write a "
    "for statement that appends to a list, or adds to a number: these are kept."
)
OF_CYCLE = (
    "itertools.cycle of job.batches(loader) gives the batches of its first round again, which a restart does "
    "not have: from there on the training would differ. Write a generator in its place, `while True: yield "
    "from job.batches(loader)`, which reads the loader in each round."
)
_COUNTS = "of job.batches(loader) counts from 0 again where a restart goes on in the middle of an epoch."
OF_ISLICE = (
    f"islice {_COUNTS} Write `batches = job.batches(loader)` and then `islice(batches, n - batches.first)`."
)
OF_FILTER = (
    f"enumerate of filter {_COUNTS} Count in a variable of the loop's own (`number += 1`), which is kept."
)


class Batches:
    """A loader's batches in a loop whose position is kept; each iteration is one pass over the loader."""

    def __init__(self, loop: Loop, loader: Iterable[Any]) -> None:
        self._loop, self._loader = loop, loader
        self._script_counts = False  # on from `first`

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        if progress_bars.makes_one(caller):
            return iter(self._loader)
        self._loop.begin()
        if self._loop.passes_by(False):
            return iter(())
        names = caller.f_code.co_names
        if _doing(caller).startswith("CALL"):
            if "islice" in names and "first" not in names:
                self._loop.warn_once(OF_ISLICE)
            elif {"enumerate", "filter"} <= {*names}:  # of what filter leaves, which is fewer
                self._loop.warn_once(OF_FILTER)
            if "cycle" in names:
                self._loop.warn_once(OF_CYCLE)
        return Iteration(self._loop, self._loader, counts_on=not self._script_counts)

    @property
    def first(self) -> int:
        """The number of the first batch that the next iteration gives: not 0 where a restart goes on.

        An `enumerate` around that iteration begins with the number that it is given, then.
        """
        self._script_counts = True
        return self._loop.done_of_next(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class Iteration:
    """One pass, as the script iterates it."""

    _asked: Asked | None = None  # for the newest batch
    _exit: "Exit[Any]"  # as it goes
    _asks: left_loops.ForStatement | None = None

    def __init__(self, loop: Loop, loader: Iterable[Any], *, counts_on: bool = False) -> None:
        """counts_on: an `enumerate` around it counts the batches from before a restart, too."""
        self._pass: Pass | None = None
        self._loop = loop
        self._pass, self._number = loop.begin_pass(loader)
        self.begun = self._pass  # stays, when nothing more is to be given
        self._minibatches = loop.minibatches
        self._done = self.begun.state.batches if counts_on and not self.begun.state.ended else 0

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        return self._next(sys._getframe(1))

    def _next(self, frame: FrameType) -> Any:
        if self._pass is None:
            raise StopIteration
        if self._done:
            counted.go_on(self, frame, self._done)
            self._done = 0
        if self._asked is None:
            self._asks = left_loops.for_statement(frame)
        self._asked = frame.f_code, place_in(frame)
        if self._loop.minibatches > self._minibatches and _is_collected(frame):
            self._loop.warn_once(OF_COMPREHENSION)
        try:
            return self._loop.next_batch(self._pass, self._number, frame)
        except StopIteration:
            self._pass = None
            raise

    def leave(self) -> None:
        """Nothing more is asked for: for who does not leave a for statement."""
        if self._pass is not None:
            if not self._pass.state.ended:
                self._loop.leave(self._pass, self._asked)
            self._pass = None

    def let_go(self) -> bool:
        """Let another pass take its place, if nothing was asked of it; return whether it was not."""
        if self._pass is None or self._asked is not None:
            return False
        self._pass.end(left=True)
        self._pass = None
        return True

    def __del__(self) -> None:
        if self._pass is not None and not self._pass.state.ended:
            if (leaves := _who_leaves()) is not None:
                self._loop.leave(self._pass, self._asked)
                _name_elsewhere(self._loop, leaves, self._asks)
                self._pass.drop()
            else:  # what exception it is nobody can tell before this is away
                self._exit = Exit(partial(_goes_by, self._loop, self._pass, self._asked))
        elif self._pass is not None and _who_leaves() is not None:
            self._loop.go_on_now(self._number)  # zip() was at its end, and asked nothing of this one


def _epoch_begins(
    frame: FrameType | None, of_epochs: Epochs, between: BetweenLoops
) -> left_loops.ForStatement | None:
    """The script is given an epoch, in this frame. Returns where it asks for the next."""
    if frame is not None:
        of_epochs.begins(frame)
    between.begins(frame)
    return left_loops.for_statement(frame)


def _goes_by(loop: Loop, one: Pass, asked: Asked | None, exception: BaseException | None) -> None:
    """The iterator over a pass goes, perhaps by an exception of the script's."""
    if exit := exits.told(exception, sys._getframe().f_back):
        one.state.exit = exit
        loop.leave(one, asked)
    else:
        loop.drop(one)


def _begin_again(known: Loader, saved: PassState, host: Generators) -> Pass:
    """Go on with a pass; the process's generators stay as they are."""
    before = host.capture()
    try:
        return known.begin(saved)
    finally:
        host.restore(tree_codec.decode(before.tree, before.tensors))


def _is_collected(frame: FrameType) -> bool:
    """Whether a comprehension iterates and puts all together: no for statement takes it one by one."""
    if frame.f_code.co_name not in COMPREHENSIONS or _doing(frame) != "FOR_ITER":
        return False  # one that calls next() for each of several iterators takes one batch of each
    outer = frame.f_back
    is_generator = frame.f_code.co_name == "<genexpr>"
    return not is_generator or (outer is not None and "CALL" in _doing(outer))  # PRECALL makes some


def _who_leaves() -> FrameType | None:
    """Return which frame a loop's iterator goes in because the loop was left; None if by an exception in it.

    What the interpreter is doing tells: in an exception it is still at the call that raised it.
    """
    frame = sys._getframe(1).f_back  # of who drops it; at the interpreter's end that is nobody
    while frame is not None and _doing(frame) in _IN_A_GENERATOR:
        frame = frame.f_back  # a generator around ours is closed
    return frame if frame is not None and _doing(frame) in _LEAVING else None


def _name_elsewhere(loop: Loop, leaves: FrameType | None, asks: left_loops.ForStatement | None) -> None:
    """Warn if the loop that this frame leaves goes on at another place than its end."""
    if leaves is not None and left_loops.goes_elsewhere(leaves, asks):
        loop.warn_once(left_loops.GOES_ELSEWHERE)


def _doing(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[place_in(frame)]] if frame.f_lasti >= 0 else ""


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell samplers such as DistributedSampler the epoch, unless the script does, or has told another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "set_epoch" in frame.f_code.co_names:
            return
        frame = frame.f_back
    for sampler in _samplers(loader):
        # It begins with 0, as torch's do; with another one the script has told it an epoch before.
        if hasattr(sampler, "set_epoch") and getattr(sampler, _TOLD, 0) == (_epoch_of(sampler) or 0):
            sampler.set_epoch(epoch)
            setattr(sampler, _TOLD, _epoch_of(sampler) or 0)


def _samplers(loader: Iterable[Any]) -> Iterable[Any]:
    return samplers(loader) if isinstance(loader, DataLoader) else ()


def _epoch_of(sampler: Any) -> Any:
    return getattr(sampler, "epoch", None)


def _pieces(kept: Sequence[PassState], stretches: Sequence[Stretch]) -> Iterator[tuple[str, bytes]]:
    """Yield what else is kept of passes and of stretches between two, by names."""
    for number, stretch in enumerate(stretches):
        yield f"loop.between.{number}.drawn", stretch.drawn_from
        yield f"loop.between.{number}.said", stretch.said
    for number, one in enumerate(kept):
        yield f"loop.{number}.begun", one.begun
        yield f"loop.{number}.own", one.own
        yield f"loop.{number}.ahead", one.ahead
        yield f"loop.{number}.chosen", one.chosen
        yield f"loop.{number}.exit", one.exit
        for moment, states in (("start", one.at_start), ("now", one.now)):
            for worker, data in states.items():
                yield f"loop.{number}.{moment}.{worker}", data


def _seen_of(loop: Loop, between: BetweenLoops, left_by: LoopExits, kept: Sequence[PassState]) -> Seen:
    seen = Seen()
    stretches = between.ended
    owners: list[tuple[object, Iterable[str]]] = [(loop, _KEPT), (between, ("ended",)), (left_by, ("told",))]
    owners += [(one, _KEPT_OF_A_STRETCH) for one in stretches]
    owners += [(one, _KEPT_OF_A_PASS) for one in kept]
    for owner, names in owners:
        for name in names:
            seen.attribute(owner, name)
    for name in _KEPT:
        seen.elements(getattr(loop, name))
    seen.elements(stretches)
    for states in (states for one in kept for states in (one.at_start, one.now)):
        seen.size(states)
        for worker in states:
            seen.entry(states, worker)
    return seen


def _take_ends(saved: Sequence[PassState], of_saver: Mapping[str, Any]) -> None:
    """Take over which passes a replica has seen the end of."""
    other = of_saver["numbers"].tolist()
    for at, one in enumerate(saved[: len(of_saver["passes"])]):
        batches, ended, left, _ = _numbers_of(other, at)
        if batches == one.batches:
            if left and not one.ended:
                one.exit = exit_of(of_saver["passes"][at])
            one.ended, one.left = one.ended or bool(ended), one.left or bool(left)


def left_by_replica(own: Mapping[str, Any], of_saver: Mapping[str, Any]) -> bool:
    """Return whether a replica has left a loop over batches by `break`, which this rank was in as well."""
    mine, other = own["numbers"].tolist(), of_saver["numbers"].tolist()
    passes = range(min(len(own["passes"]), len(of_saver["passes"])))
    pairs = [(_numbers_of(mine, at), _numbers_of(other, at)) for at in passes]
    return any(one[0] == its[0] and its[2] and not one[1] for one, its in pairs)


def _tree_of_all(kept: Sequence[PassState], count: int, stretches: int, left_by: LoopExits) -> Json:
    """count: how many of the passes are of this epoch. stretches: how many there are between loops."""
    trees = [*starmap(_tree_of, enumerate(kept))]
    return {
        "numbers": {"$tensor": NUMBERS},
        "between": [_tree_of_stretch(number) for number in range(stretches)],
        "passes": trees[:count],
        "previous": trees[count:],
        "exits": left_by.tree(),
    }


def _tensors_of(
    pieces: Iterable[tuple[str, bytes]], before: Mapping[str, tuple[bytes, Tensor]]
) -> dict[str, tuple[bytes, Tensor]]:
    """Return pieces with tensors of them, by names; of one that is as before, the same."""
    tensors = {}
    for name, data in pieces:
        known = before.get(name)
        if known is None or known[0] is not data:
            known = data, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _EMPTY
        tensors[name] = known
    return tensors


def _numbers_of(numbers: list[int], at: int) -> list[int]:
    begin = _FIRST + at * _OF_A_PASS
    return numbers[begin : begin + _OF_A_PASS]


def _tree_of_stretch(number: int) -> Json:
    return {name: {"$tensor": f"loop.between.{number}.{name}"} for name in ("drawn", "said")}


def _tree_of(at: int, one: PassState) -> Json:
    def workers(kind: str, states: Mapping[int, bytes]) -> Json:
        return [[worker, {"$tensor": f"loop.{at}.{kind}.{worker}"}] for worker in states]

    return {
        "seed": one.seed,
        "dealt": [*one.dealt],
        "before": one.before,
        "number": one.number,
        "begun": {"$tensor": f"loop.{at}.begun"},
        "own": {"$tensor": f"loop.{at}.own"},
        "ahead": {"$tensor": f"loop.{at}.ahead"},
        "chosen": {"$tensor": f"loop.{at}.chosen"},
        "exit": {"$tensor": f"loop.{at}.exit"},
        "start": workers("start", one.at_start),
        "now": workers("now", one.now),
    }


def _pass_of(saved: Mapping[str, Any], numbers: list[int]) -> PassState:
    batches, ended, left, digest = numbers
    return PassState(
        batches=batches,
        ended=bool(ended),
        left=bool(left),
        digest=digest,
        begun=saved["begun"].numpy().tobytes(),
        seed=saved["seed"],
        at_start={worker: state.numpy().tobytes() for worker, state in saved["start"]},
        now={worker: state.numpy().tobytes() for worker, state in saved["now"]},
        own=saved["own"].numpy().tobytes(),
        ahead=saved["ahead"].numpy().tobytes() if "ahead" in saved else b"",
        chosen=saved["chosen"].numpy().tobytes() if "chosen" in saved else b"",
        dealt=(*saved.get("dealt", dealing.NOBODY),),  # saves of earlier versions have none
        before=saved.get("before", 0),
        number=saved.get("number", 0),
        exit=exit_of(saved),
    )
