"""The shared host state of the last few steps, of which a save takes the one that the device has come to."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jitckpt.host_state import HostState, Shared
from jitckpt.tree_codec import Encoded


@dataclass(frozen=True)
class Snapshot:
    """The shared state after a step, as far as the host has come. progress: hyperparameters and schedulers.

    scheduler_steps_due: steps that each scheduler usually makes after an optimizer step and has not made yet.
    scaler_update_due: scaler.update() is still to come. version: differs once any of this has changed.
    """

    shared: Shared
    progress: Encoded
    scheduler_steps_due: tuple[int, ...]
    scaler_update_due: bool
    version: object


class History:
    """Filled by the training thread, read by the saver."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self._steps: dict[int, Shared] = {}
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
        self._steps[step] = shared

    def settle(self, step: int) -> None:
        """The host has begun the next minibatch: what was still to come of `step` has come."""
        shared = self._steps.get(step)
        if shared is not None and shared.progress is None:
            self._recent.append(self._steps_since(shared))
            self._steps[step] = replace(shared, progress=self._host.progress())

    def is_settled(self, step: int) -> bool:
        """Whether nothing is still to come of `step`: the host is in the next minibatch, or further."""
        shared = self._steps.get(step)
        return shared is not None and shared.progress is not None

    def forget_before(self, step: int) -> None:
        for old in [old for old in self._steps if old < step]:
            del self._steps[old]

    def snapshot(self, step: int) -> Snapshot | None:
        """Return the state after `step`; while the host is still at that step, together with what is due.

        None if the step is not kept: the device has gone on.
        """
        shared = self._steps.get(step)
        if shared is None:
            return None
        if shared.progress is not None:
            return Snapshot(
                shared, shared.progress, (0,) * len(self._host.schedulers), False, (step, "settled")
            )
        made = self._steps_since(shared)
        due = tuple(
            max(0, usual - count) if scheduler.can_step else 0
            for scheduler, usual, count in zip(
                self._host.schedulers, self.usual_scheduler_steps, made, strict=True
            )
        )
        update_due = self._host.scaler_update_is_due()
        version = (step, made, update_due)
        return Snapshot(shared, self._host.progress(), due, update_due, version)

    def _steps_since(self, shared: Shared) -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(self._host.counts(), shared.counts, strict=True))
