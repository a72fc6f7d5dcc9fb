"""The shared host state of the last few steps, of which a save takes the one that the device has come to."""

import operator
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state.host_state import HostState, Shared, differ_by_hand
from jitckpt.state.model_state import HeldParameters
from jitckpt.state.zero_gradients import Gradients
from jitckpt.system.stacks import code_of

_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
LEARNED_STEPS = 2  # until it is known what the host usually does between two minibatches


@dataclass(frozen=True)
class SharedSnapshot:
    """The shared state after a step, as far as the host has come. progress: hyperparameters and schedulers.

    scheduler_steps_due: steps that each scheduler usually makes after an optimizer step and has not made yet.
    scaler_update_due: scaler.update() is still to come.
    """

    shared: Shared
    progress: Encoded
    scheduler_steps_due: tuple[int, ...]
    scaler_update_due: bool

    def says_the_same_as(self, other: "SharedSnapshot") -> bool:
        """Whether a save of either is the same. Of tensors on a device their names are compared."""
        own, others = self.progress.tensors, other.progress.tensors
        return (
            (self.progress.tree, self.scheduler_steps_due, self.scaler_update_due, own.keys())
            == (other.progress.tree, other.scheduler_steps_due, other.scaler_update_due, others.keys())
            and self.shared.gradients == other.shared.gradients
        ) and all(torch.equal(own[name], others[name]) for name in own if own[name].device.type == "cpu")


class History:
    """Filled by the training thread, read by the saver."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self._steps: dict[int, Shared] = {}
        self.thread = 0  # the training's
        self._settled = 0  # how many steps have been settled here
        self._set_by_hand = False
        self._counts: tuple[int, ...] = ()  # of schedulers' steps, when a step was settled last
        # Of each scheduler whether a minibatch has passed without a step of it, as where it has one an epoch.
        self._irregular = [False] * len(host.schedulers)
        self.is_irregular = False  # whether a scheduler is not stepped in every minibatch
        self._gradients = Gradients(), Gradients()  # as the newest step ended, and as it was settled
        self._taken_away: frozenset[str] = frozenset()  # the parameters that had one only in the former
        self._gradients_of_step = Gradients()  # as the newest step has left them
        self._begun = 0  # the newest minibatch that has come to its optimizer step
        self._passes = 0  # forward passes of this minibatch so far
        self._usual_passes: set[int] = set()  # of those before
        self.waits_for_boundary = False  # the loop tells when nothing is still to come of a step
        # Scheduler steps made after each of the last two optimizer steps; one alone may have ended an epoch.
        self._recent: deque[tuple[int, ...]] = deque([(0,) * len(host.schedulers)], maxlen=2)

    @property
    def usual_scheduler_steps(self) -> tuple[int, ...]:
        """How often each scheduler is stepped after every optimizer step."""
        return tuple(map(min, zip(*self._recent, strict=True)))

    def expect_scheduler_steps(self, usual: Iterable[int]) -> None:
        """Start with what was usual when a save was made."""
        self._recent = deque([tuple(usual)], maxlen=2)

    def add(self, step: int, shared: Shared) -> None:
        """Keep the state as the optimizer step left it."""
        self.thread = threading.get_ident()
        self._steps[step] = shared
        self._gradients_of_step = self._host.gradients()
        self._usual_passes.add(self._passes)
        self._passes = 0

    def settle(self, step: int) -> None:
        """The host has begun the next minibatch: what was still to come of `step` has come."""
        self._passes += 1
        shared = self._steps.get(step)
        if shared is not None and shared.progress is None:
            before, self._counts = self._counts, (counts := self._host.counts())
            made = tuple(map(operator.sub, counts, shared.counts))
            self._recent.append(made)
            self._settled += 1
            if before and any(map(operator.eq, before, counts)):
                for number, (was, count) in enumerate(zip(before, counts, strict=True)):
                    self._irregular[number] |= was == count
                self.is_irregular = any(self._irregular)
            groups = self._host.groups()
            if not self._set_by_hand:
                self._set_by_hand = differ_by_hand(shared.groups, groups, scheduled=any(made))
            progress = self._host.take_progress(groups)
            gradients = self._settle_gradients()
            shared = self._host.shared_again(shared)
            self._steps[step] = Shared(
                shared.optimizers, shared.counts, groups, shared.held, progress, gradients
            )

    def _settle_gradients(self) -> Gradients:
        gradients = self._host.gradients()
        if self._gradients != (self._gradients_of_step, gradients):
            self._gradients = self._gradients_of_step, gradients
            self._taken_away = self._gradients_of_step.taken_away(gradients)
        return gradients

    def settle_again(self, step: int) -> None:
        """One more forward pass begins: if a scheduler was stepped since, that belongs to `step`, too."""
        shared = self._steps.get(step)
        if shared is not None and shared.progress is not None and self._counts != self._host.counts():
            self._recent.pop()
            self._settled -= 1
            self._steps[step] = shared._replace(progress=None)
            self.settle(step)
        else:
            self._passes += 1
            if shared is not None and any(shared.gradients.kinds):
                # Those that are gone since the minibatch's first pass are taken away in each.
                gone = shared.gradients.taken_away(self._host.gradients())
                self._taken_away |= gone
                self._steps[step] = shared._replace(gradients=shared.gradients.without(gone))

    def hold(self, step: int, held: HeldParameters) -> None:
        """The parameters after `step` are these: they were changed after it."""
        shared = self._steps.get(step)
        if shared is not None:
            self._steps[step] = shared._replace(held=held)

    def shared(self, step: int) -> Shared:
        """Return the state after `step`, which is kept."""
        return self._steps[step]

    def step_begins(self, step: int) -> None:
        """The minibatch has come to its optimizer step: so all has come of the one before."""
        self._begun = step

    def may_come(self, step: int) -> bool:
        """Whether something may still come of `step` that comes now and then, a scheduler's step, say.

        A forward pass is no sure sign of the next minibatch: an evaluation may take gradients, too.
        """
        shared = self._steps.get(step)
        if shared is None or self._begun > step or not self.is_irregular:
            return False
        if self.waits_for_boundary:
            return not self.is_settled(step)
        made = self._steps_since(shared) if shared.progress is None else self._recent[-1]
        return any(map(operator.gt, self._irregular, made))

    def goes_on(self, step: int) -> bool:
        """Whether the iteration that made `step` has not ended yet: a loop tells when it does.

        What it changes of variables, `extra` and random numbers until then belongs to it.
        """
        return self.waits_for_boundary and step in self._steps and not self.is_settled(step)

    def may_lack(self, step: int) -> bool:
        """Whether it is likely that a save of `step` lacks something that would still have come.

        Where all minibatches have had as many forward passes, one more is taken for the next minibatch's.
        """
        one_more = len(self._usual_passes) < 2 and self._passes <= max(self._usual_passes, default=1)
        return self.may_come(step) and not (one_more and self.is_settled(step))

    def is_settled(self, step: int) -> bool:
        """Whether nothing is still to come of `step`: the host is in the next minibatch, or further."""
        shared = self._steps.get(step)
        return shared is not None and shared.progress is not None

    def is_foreseen(self, step: int) -> bool:
        """Whether a snapshot has all that is to come of `step`, although the host may run on.

        So it is where nothing but steps of schedulers ever comes, each as often as usual, and none is being
        made now. A scheduler that is not stepped after every optimizer step may be stepped at any time, after
        an evaluation, say; so may hyperparameters change that the training has ever set itself.
        """
        shared = self._steps.get(step)
        if shared is None or self._settled < LEARNED_STEPS or self._set_by_hand or self.is_changing():
            return False
        return all(
            usual > 0 and (scheduler.can_step or made >= usual)
            for scheduler, usual, made in zip(
                self._host.schedulers, self.usual_scheduler_steps, self._steps_since(shared), strict=True
            )
        )

    def is_changing(self) -> bool:
        """Whether the training thread is inside a scheduler's step or the scaler's update, or may be."""
        code = self._host.changing_code
        return None in code or not code.isdisjoint(code_of(self.thread))

    def is_in_backward(self) -> bool:
        """Whether the training thread waits for autograd's, which waits at the gate while that is closed."""
        frame = sys._current_frames().get(self.thread)
        return frame is not None and frame.f_code is _BACKWARD

    def place(self) -> object:
        """Return where the training thread is; the same as long as it gets no further."""
        frame = sys._current_frames().get(self.thread)
        return None if frame is None else (id(frame), frame.f_lasti)

    def forget_before(self, step: int) -> None:
        while (oldest := next(iter(self._steps), step)) < step:  # they were added in their order
            del self._steps[oldest]

    def snapshot(self, step: int) -> SharedSnapshot | None:
        """Return the state after `step`; while the host is still at that step, together with what is due.

        None if the step is not kept: the device has gone on.
        """
        shared = self._steps.get(step)
        if shared is None:
            return None
        if shared.progress is not None:
            return SharedSnapshot(shared, shared.progress(), (0,) * len(self._host.schedulers), False)
        made = self._steps_since(shared)
        due = tuple(
            max(0, usual - count) if scheduler.can_step else 0
            for scheduler, usual, count in zip(
                self._host.schedulers, self.usual_scheduler_steps, made, strict=True
            )
        )
        update_due = self._host.scaler_update_is_due()
        groups = self._host.groups()
        progress = self._host.take_progress(groups)()
        # Those that are there for now: what is still to come takes away what it has taken away before.
        gradients = self._host.gradients().without(self._taken_away)
        shared = self._host.with_new_groups(shared)._replace(groups=groups, gradients=gradients)
        return SharedSnapshot(shared, progress, due, update_due)

    def _steps_since(self, shared: Shared) -> tuple[int, ...]:
        return tuple(map(operator.sub, self._host.counts(), shared.counts))
