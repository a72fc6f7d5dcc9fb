"""The self-check while it looks at the first steps, and what is left of it after that."""

from torch.optim import Optimizer

from jitckpt.state.host_state import HostState, Shared
from jitckpt.worker.self_check.checker import SelfChecker

LAST_CHECK_SECONDS = 10.0


class FirstSteps:
    """Told of the steps by the training's thread, which waits for nothing but at the end."""

    _last: SelfChecker | None = None  # nothing but its thread may still be at work

    def __init__(self, checker: SelfChecker | None, host: HostState) -> None:
        self._checker, self._host = checker, host
        self.is_looking = checker is not None  # else it need be told of no step

    def is_pending(self, step: int) -> bool:
        """Whether the state after this step is being copied."""
        return self._checker is not None and self._checker.is_pending(step)

    def step_begins(self) -> None:
        """The optimizer is about to change what is copied."""
        if self._checker is not None:
            self._checker.step_begins()
            if self._checker.is_done:
                self._last, self._checker = self._checker, None
                self.is_looking = False

    def other_step_begins(self) -> None:
        """One that was not given may change it, too."""
        if self._checker is not None:
            self._checker.step_begins()

    def step_ended(self, step: int, shared: Shared) -> None:
        if self._checker is not None:
            self._checker.step_ended(step, self._host.local, shared)

    def settle(self, step: int, *, changed: bool, tells_apart: bool) -> None:
        """The host's state after `step` is complete. changed: the device's is another than the step's end."""
        if self._checker is not None:
            if tells_apart:
                self._checker.step_begins()
            self._checker.settled(step, self._host.local if changed else None)
            if changed:
                self._checker.step_begins()  # what the next epoch begins with may change what it copies now

    def has_named(self, optimizer: Optimizer) -> bool:
        """Whether it has said of an optimizer that jitckpt.init was not given it."""
        return self._last is not None and self._last.has_named(optimizer)

    def finish(self, step: int) -> None:
        """The training has ended with `step`: wait a while for what is being compared."""
        if self._checker is not None:
            self._checker.settled(step)
            self._last = self._checker
        if self._last is not None:
            self._last.wait(LAST_CHECK_SECONDS)

    def stop(self) -> None:
        checker = self._checker or self._last
        if checker is not None:
            checker.stop()
