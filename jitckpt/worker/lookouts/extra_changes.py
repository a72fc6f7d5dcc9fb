"""Looks, in the first minibatches, where `extra` changes: at some places a failure loses what has changed."""

from collections.abc import Callable
from typing import Any

from jitckpt.state.host_state import HostState

LOOKED_AT = 3  # minibatches: a loop does in each what it does in these

CHANGES_EARLY = (
    "`extra` changes between forward pass and optimizer step. A rank that fails there has lost that change, "
    "and the others may have made the step: then this run would differ from an undisturbed one. Change it "
    "before the forward pass ends, or give jitckpt.init step_barrier=True: then no rank makes a step without "
    "the others."
)
CHANGES_LATE = (
    "`extra` changes between an optimizer step and the next forward pass, where a failure may lose the last "
    "of it. Write the loop as `for epoch in job.epochs(n):` and `for batch in job.batches(loader):`, or `for "
    "step in job.steps(n):`, to which it belongs then; or change it before the optimizer step."
)
CHANGES_AT_THE_END = (
    "`extra` changes between an optimizer step and the end of its iteration. A rank that fails there, where "
    "others have made the step, has lost that change: then this run would differ from an undisturbed one. "
    "Change it at the top of the next iteration, before the forward pass, and nothing of it is lost."
)


class ExtraChanges:
    """Of one job; `warn` gets a sentence, which may come again."""

    base = 0  # the step after which the job began
    _behind_forward: tuple[Any, ...] | None = None  # in the first minibatches
    _behind_step: tuple[Any, ...] | None = None  # the same

    def __init__(self, host: HostState, warn: Callable[[str], None], *, has_barrier: bool) -> None:
        """has_barrier: no rank makes an optimizer step without the others."""
        self._host, self._warn, self._has_barrier = host, warn, has_barrier
        self.is_looking = host.extra is not None  # else none of what follows need be called

    def trust(self) -> None:
        """`extra` is an adapter's, which makes up what a failure may lose of it: that is not warned of."""
        self.is_looking = False
        self._behind_forward = self._behind_step = None

    def forward_ended(self, step: int) -> None:
        looks = self.is_looking and step <= self.base + LOOKED_AT
        # That of a step before is none of this one's: of several optimizers each tells as its step ends.
        self._behind_forward = self._host.extra_now() if looks else None

    def step_begins(self) -> None:
        before, self._behind_forward = self._behind_forward, None
        if not self._has_barrier and before is not None and before != self._host.extra_now():
            self._warn(CHANGES_EARLY)

    def step_ended(self, step: int) -> None:
        if self.is_looking and step <= self.base + LOOKED_AT:
            self._behind_step = self._host.extra_now()

    def goes_on(self, text: str) -> None:
        """The next minibatch begins; text: what is to be said if `extra` is not as the step has left it."""
        before, self._behind_step = self._behind_step, None
        if before is not None and before != self._host.extra_now():
            self._warn(text)
