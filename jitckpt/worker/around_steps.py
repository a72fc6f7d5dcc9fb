"""What is done around each optimizer step, in its order: what the hooks tell is passed on to who needs it."""

import sys
from collections.abc import Callable

from jitckpt.bindings.interpose import Native
from jitckpt.data.loop import Loop
from jitckpt.state.host_state import HostState
from jitckpt.state.parallel import DeviceBarrier
from jitckpt.worker import advice
from jitckpt.worker.first_step import FirstStepWatch
from jitckpt.worker.lookouts.draws import TWO_LINES
from jitckpt.worker.lookouts.extra_changes import CHANGES_AT_THE_END
from jitckpt.worker.lookouts.lookouts import Lookouts
from jitckpt.worker.own_state import OwnState
from jitckpt.worker.read_by_function import ReadByFunction
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.savers import Savers
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.outside_changes import OutsideChanges
from jitckpt.worker.saving.watched import Watched
from jitckpt.worker.script_variables import ScriptVariables
from jitckpt.worker.self_check.first_steps import FirstSteps
from jitckpt.worker.steps_ahead import KEPT_BESIDE
from jitckpt.worker.switch import Switch, harmless

UNEQUAL_TURNS = (
    "an optimizer has made another step before every optimizer has made one, so that nobody can tell where a "
    "minibatch of the loop ends. Write it as `for step in job.steps(n):`, which tells."
)
STEP_BEHIND_BATCHES = (
    "An optimizer step is made behind a loop over job.batches, with what its last batches have left over. "
    "After a failure between that step and the next loop's first batch the job can't go on as if nothing had "
    "happened: the code behind the loop comes again, and no batch before it. Make the step in the loop: with "
    "jitckpt.init(..., accumulation=N), `if job.sync_gradients:` is true at each Nth batch and at the last."
)
CAPTURED_STEP = (
    "the script replays a CUDA graph in which an optimizer makes its step, as far as jitckpt knows, and "
    "nobody can tell of the state on the device to which step it belongs. Capture the forward and the "
    "backward pass, behind jitckpt.init or with `jitckpt run`, and call optimizer.step() outside of the "
    "graph."
)


class AroundSteps:
    """Hears of the training's steps (jitckpt.hooks.torch_training.Listener), on its thread."""

    _awaits_forward = False  # a save lets the script go on to its next forward pass
    _awaits_step = False  # or to its next optimizer step

    def __init__(
        self,
        native: Native,
        switch: Switch,
        *,
        stream: Callable[[], int],
        barrier: DeviceBarrier | None,
        host: HostState,
        history: History,
        loop: Loop,
        variables: ScriptVariables,
        goes_on: Callable[[], None],
        outside: OutsideChanges,
        watched: Watched,
        own: OwnState,
        savers: Savers,
        check: FirstSteps,
        read: ReadByFunction,
        lookouts: Lookouts,
        first_step: FirstStepWatch,
        reporter: Reporter,
        max_ahead: int,
        saves_now_and_then: bool,
    ) -> None:
        """stream: the device's current one. goes_on: called as the loop goes on behind an optimizer step.

        max_ahead: steps that the host may be ahead of the device. saves_now_and_then: periodically.
        """
        self._native, self.switch = native, switch
        self._stream, self._barrier = stream, barrier
        self._host, self._history, self._loop = host, history, loop
        self._variables: ScriptVariables | None = variables  # while it looks
        self._goes_on, self._outside, self._watched = goes_on, outside, watched
        self._own, self._savers, self._check, self._read = own, savers, check, read
        self._lookouts, self._first_step, self._reporter = lookouts, first_step, reporter
        self._kept = max_ahead + KEPT_BESIDE  # steps
        self._saves_now_and_then = saves_now_and_then

    def minibatch_begun(self, step: int) -> None:
        self._settle_at_forward(step)
        if self._awaits_forward:
            self._native.await_boundary(False)

    @harmless
    def _settle_at_forward(self, step: int) -> None:
        self._lookouts.schedulers.forward_begins()
        if self._variables is not None and self._variables.ended and not self._loop.is_used:
            self._variables.minibatch_begun(sys._getframe())
            if not self._variables.is_looking:
                self._variables = None
        # Few calls, here and below: each costs some microseconds where all is cold in the caches.
        pending = self._savers.pending(step - 1)
        changed = self._outside.minibatch_begun(step, look=bool(pending))
        self._settle(step - 1, changed)
        if pending or self._outside.tells_apart:
            self._savers.forward_begins(pending, step, changed=changed)
        if self._check.is_looking:
            is_checked = self._check.is_pending(step - 1)
            self._settle_check(step - 1, changed or (is_checked and self._outside.has_changed))
        self._lookouts.forward_begins(is_irregular=self._is_irregular())

    def _settle(self, step: int, changed: bool) -> None:
        """All that the host knows after `step` is there; changed: the device's state was, behind the step."""
        if changed and self._host.model is not None:
            self._history.hold(step, self._host.model.held())
        if self._read.has_function:
            self._read.settle(step)
        self._history.settle(step)  # last: a save that waits for this reads all that on another thread

    def _settle_check(self, step: int, changed: bool) -> None:
        self._check.settle(step, changed=changed, tells_apart=self._outside.tells_apart)

    def _is_irregular(self) -> bool:
        """Whether a scheduler is not stepped in every minibatch."""
        return self._history.is_irregular or (self._read.has_function and self._read.is_irregular)

    @harmless
    def passed_again(self, step: int) -> None:
        self._history.settle_again(step - 1)  # the pass before was an evaluation's, perhaps
        self._read.settle_again(step - 1)

    def forward_ended(self, step: int) -> None:
        if self.switch.off is None:
            self._forward_ended(step)
        else:
            self.switch.begun(step)

    @harmless
    def _forward_ended(self, step: int) -> None:
        if self._lookouts.draws.is_looking:
            self._lookouts.draws.forward_ended()
        self._own.forward_ended(step)
        if self._lookouts.extra.is_looking:
            self._lookouts.extra.forward_ended(step)
        if self._own.has_copies:
            self._own.await_copy(step)

    def step_begun(self, step: int) -> None:
        self._step_begins(step)
        if self._awaits_step:
            self._native.await_boundary(False)
        if self._barrier is not None:
            self._native.step_enter()
            self._barrier.enqueue()
        self._native.step_begin(step, self._stream())
        self._await_what_comes()

    def _await_what_comes(self) -> None:
        """Let a save, should it be ordered now, come to where the state after this step is complete."""
        is_used = self._loop.is_used
        self._awaits_forward = not is_used and self._outside.end_the_step
        self._awaits_step = not is_used and self._is_irregular() and not self._outside.tells_apart
        if is_used or self._awaits_forward or self._awaits_step:
            self._native.await_boundary(True)

    @harmless
    def _step_begins(self, step: int) -> None:
        self._lookouts.draws.step_begins()
        self._history.step_begins(step)
        if self._read.has_function:
            self._read.step_begins(step)
        if self._lookouts.extra.is_looking:
            self._lookouts.extra.step_begins()
        self._own.step_begins(step)
        if self._savers.snapshots is not None:
            self._savers.optimizer_begins(step)
        is_unknown = self._outside.step_begun(step)
        self._savers.step_begun(step, is_unknown=is_unknown, may_settle=not self._loop.is_used)
        if self._check.is_looking:
            self._check.step_begins()
        if self._own.has_copies:
            self._own.await_copy_of_all(step)

    @harmless
    def closure_again(self, step: int) -> None:
        self._outside.closure_again(step)

    def captured_step(self, step: int) -> None:
        self.switch.turn_off(CAPTURED_STEP)

    def unequal_turns(self, step: int) -> None:
        self.switch.astride = 1
        self.switch.turn_off(UNEQUAL_TURNS)

    def step_ended(self, step: int) -> None:
        self._step_ends(step)
        self._native.step_end(step, self._stream())
        self._step_is_over(step)

    @harmless
    def _step_ends(self, step: int) -> None:
        self._lookouts.structure.follow(step)
        self._own.step_ended(step)
        shared = self._host.shared()
        self._history.add(step, shared)
        self._outside.ended(step, self._watched.after(shared), shared.all_tensors)
        if self._loop.is_used:
            self._own.note_buffers()
        self._lookouts.step_ended(step, shared)
        if self._read.has_function:
            self._read.step_ended(step, oldest=step - self._kept)

    @harmless
    def _step_is_over(self, step: int) -> None:
        if not self._loop.is_used:
            self._savers.save_if_due(step)
            if self._variables is not None:
                self._variables.step_ended(sys._getframe())
        if self._check.is_looking:
            self._check.step_ended(step, self._history.shared(step))
        self._history.forget_before(step - self._kept)  # the device has come further than that
        if not self._first_step.is_told:
            self._first_step.tell()

    def minibatch_ended(self, step: int) -> None:
        self._settle_at_boundary(step)
        self._native.await_boundary(False)

    @harmless
    def _settle_at_boundary(self, step: int) -> None:
        is_checked = self._check.is_pending(step)
        at_end = self._loop.is_at_end
        changed = self._outside.minibatch_begun(step + 1, look=is_checked, boundary=True, at_end=at_end)
        self._lookouts.extra.goes_on(CHANGES_AT_THE_END)
        self._goes_on()
        self._own.goes_on(step)
        self._settle(step, changed)
        self._savers.save_if_due(step)
        self._savers.boundary(step)
        self._settle_check(step, changed)

    def drawn_ahead(self) -> None:
        _, _, passes, _ = self._loop.round
        if passes and self._loop.is_between:
            self._reporter.warn_once(STEP_BEHIND_BATCHES)
            return
        self._reporter.warn_once(
            "The loop draws its next batch between a forward pass and the optimizer step, so after a failure "
            f"that batch would be left out. Draw it at the top of the loop: write {TWO_LINES}, or next() as "
            "the first thing in an iteration."
        )

    def steps_again(self) -> None:
        self._reporter.warn_once(
            "Several optimizer steps are made in one iteration, before it was one: a failure between these "
            "would go on with the next iteration. From the next one on they are taken as one."
        )

    def several_steps(self) -> None:
        if not self._saves_now_and_then:
            self._reporter.warn_once(
                "Several optimizer steps are made in one iteration. A failure between them, in which no rank "
                "comes to the end of the iteration, leaves nothing to save: the job goes back to an older "
                f"save. To have one, {advice.current().save_every}."
            )
