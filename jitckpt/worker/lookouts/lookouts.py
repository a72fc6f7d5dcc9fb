"""All lookouts of a job, told together of its steps."""

from collections.abc import Callable

from torch import nn

from jitckpt.data.loop import Loop
from jitckpt.state.host_state import HostState, Shared
from jitckpt.worker.lookouts.averages import Averages
from jitckpt.worker.lookouts.chosen_by_time import ChosenByTime
from jitckpt.worker.lookouts.draws import Draws
from jitckpt.worker.lookouts.extra_changes import CHANGES_LATE, ExtraChanges
from jitckpt.worker.lookouts.late_schedulers import LateSchedulers
from jitckpt.worker.lookouts.left_gradients import LeftGradients
from jitckpt.worker.lookouts.pruning import Pruning
from jitckpt.worker.lookouts.stepped_by_script import SteppedByScript
from jitckpt.worker.lookouts.structure import Structure

IRREGULAR = (
    "A scheduler is not stepped after every optimizer step. If a failure comes between an optimizer step and "
    "the scheduler's, and no other rank comes to the latter within seconds, the restart can't make that up. "
    "Write `for epoch in job.epochs(n):` and `for batch in job.batches(loader):`, or `for step in "
    "job.steps(n):`."
)


class Lookouts:
    """They look until `end`."""

    def __init__(
        self,
        host: HostState,
        loop: Loop,
        model: nn.Module | None,
        *,
        has_barrier: bool,
        is_alone: bool,
        turn_off: Callable[[str], None],
        warn: Callable[[str], None],
        warn_on_first: Callable[[str], None],
        warn_once: Callable[[str], None],
    ) -> None:
        """model: as jitckpt.init was given it. is_alone: there is no other rank.

        turn_off: called with the reason where nothing can be saved any more.
        warn_on_first, warn_once: as a Reporter's, for what all ranks see alike, and in every step.
        """
        self._host, self._loop, self._is_alone, self._warn_once = host, loop, is_alone, warn_once
        self.draws = Draws(
            model, lambda: loop.is_used, warn_on_first, host.numbers_drawn, has_barrier=has_barrier
        )
        self.extra = ExtraChanges(host, warn_once, has_barrier=has_barrier)
        self.schedulers = SteppedByScript(host, warn_on_first)
        self.structure = Structure(host, warn_once, turn_off)
        self._pruning = Pruning(model, warn_on_first)
        self._averages = Averages(host, loop, warn_once)
        self._chosen = ChosenByTime(model, warn_on_first)
        self._gradients = LeftGradients(host, warn, warn_on_first)
        self._late = LateSchedulers(host, warn_on_first)

    def batch_drawn(self, number: int) -> None:
        """The loop was given a batch, of that pass of the epoch."""
        self.draws.batch_drawn(number)
        self._late.batch_drawn(self._loop.epoch)

    def forward_begins(self, *, is_irregular: bool) -> None:
        """is_irregular: a scheduler is not stepped in every minibatch."""
        if self.extra.is_looking:
            self.extra.goes_on(CHANGES_LATE)
        if self._averages.are_there:
            self._averages.forward_begins()
        if is_irregular:
            self._warn_once(IRREGULAR)

    def step_ended(self, step: int, shared: Shared) -> None:
        # Few calls: each costs some microseconds where all is cold in the caches.
        model = self._host.model
        if model is not None and (model.has_averages or self._averages.are_there):
            self._averages.step_ended()
        if not self._chosen.has_looked:
            self._chosen.step_ended()
        # A rank that is alone is behind nobody.
        if self.extra.is_looking and not (self._loop.is_used and self._is_alone):
            self.extra.step_ended(step)
        self._gradients.step_ended(shared)
        self.structure.step_ended()
        if model is not None and self._pruning.is_looking:
            self._pruning.step_ended(model.attributes)

    def end(self) -> None:
        self._gradients.end()
        self.draws.end()
