"""Looks whether an average of the model is updated where a failure may lose that."""

from collections.abc import Callable

from jitckpt.data.loop import Loop
from jitckpt.state.host_state import HostState

CHANGES_LATE = (
    "An AveragedModel is updated between an optimizer step and the next forward pass, where a failure may "
    "lose the last of it. Write the loop as `for epoch in job.epochs(n):` and `for batch in "
    "job.batches(loader):`, or `for step in job.steps(n):`, to which it belongs then; or update it before "
    "the optimizer step."
)


class Averages:
    """In every minibatch: an average may begin in a late epoch."""

    def __init__(self, host: HostState, loop: Loop, warn: Callable[[str], None]) -> None:
        self._host, self._loop, self._warn = host, loop, warn
        self._updates: list[int] = []  # as the newest step ended
        self.are_there = False  # the same; others come only as a step ends

    def step_ended(self) -> None:
        self._updates = self._host.updates_of_averages()
        self.are_there = bool(self._updates)

    def forward_begins(self) -> None:
        if self.are_there and not self._loop.is_used and self._updates != self._host.updates_of_averages():
            self._warn(CHANGES_LATE)
