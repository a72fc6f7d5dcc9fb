"""What a rank alone knows of each step: when it goes into its ring, and when another host has it."""

from functools import partial

import torch

from jitckpt.data.loop import Loop
from jitckpt.ring.copies import Asker
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.state.host_state import HostState
from jitckpt.system.descriptors import GivenDescriptors
from jitckpt.wire import environment
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving.waiting import hold_in_device_calls


def asker(given: GivenDescriptors | None, device: torch.device | None, reporter: Reporter) -> Asker | None:
    """Return by whom another host is asked whether it has a copy, if one is to have it."""
    if given is None or given.copies is None:
        return None
    return Asker(
        given.copies, reporter.warn, environment.COPY_PATIENCE.get(), partial(hold_in_device_calls, device)
    )


class OwnState:
    """Told of the steps by the training's thread."""

    base = 0  # the step after which the job began
    _told_before = 0  # the newest step before which an adapter has had all written that it knows
    _buffer_versions = b""  # as the newest step ended

    def __init__(
        self,
        host: HostState,
        loop: Loop,
        ring: Ring,
        recorder: Recorder,
        copies: Asker | None,
        *,
        has_barrier: bool,
    ) -> None:
        """has_barrier: no rank makes an optimizer step without this one's part in it."""
        self._host, self._loop, self._ring, self._recorder = host, loop, ring, recorder
        self._copies, self._has_barrier = copies, has_barrier
        self.has_copies = copies is not None  # for which it may have to wait

    def told_before(self, step: int) -> None:
        """An adapter has all written before this step, and makes up what a failure may lose of it."""
        self._told_before = step

    def forward_ended(self, step: int) -> None:
        if not self._recorder.write_again(step, final=False):
            self._write(step, final=False)

    def await_copy(self, step: int) -> None:
        """Wait where the next collective may be the last that the others need."""
        if self._copies is not None and not self._has_barrier:
            self._copies.wait(step)

    def step_begins(self, step: int) -> None:
        """Write all again that has changed since the forward pass: random numbers drawn for a gradient, say.

        Other ranks may make the step without this one. What has changed on a device can't always be seen.
        """
        if step == self._told_before or self._recorder.is_as_written():
            return
        parts = self._host.local()
        if self._host.extra_is_on_device or not self._recorder.is_taken(parts):
            # With a barrier no other rank makes the step without these. Else one may that this rank's
            # gradients have reached, while what is written here is still on its way.
            self._recorder.write(step, False, parts, self._host.unchanged(), beside=not self._has_barrier)

    def await_copy_of_all(self, step: int) -> None:
        """Wait where this rank's part in the barrier comes next: without it no other makes the step."""
        if self._has_barrier and self._copies is not None:
            self._copies.wait(step, partial(self._ring.is_written, step))

    def step_ended(self, step: int) -> None:
        if step == self.base + 1:
            if self._host.model is not None:
                self._host.model.look_again()
            self._write(step, final=True)
        elif not self._recorder.write_again(step, final=True):
            self._write(step, final=True)

    def note_buffers(self) -> None:
        """The step is over: what is written to buffers from now on, the script does behind it."""
        if self._loop.is_used:
            self._buffer_versions = self._host.buffer_versions()

    def goes_on(self, step: int) -> None:
        """Write the same again if the script has changed it after its optimizer step.

        From the first time on it is done in every minibatch: then it tells whether a rank came to its end.
        """
        # Of what lies on a device not every change can be seen, as an average's through its parameters' data.
        changed = self._host.extra_is_on_device or self._host.buffer_versions() != self._buffer_versions
        if not (changed or self._loop.last_boundary) and self._recorder.is_as_written():
            return
        if changed or self._loop.last_boundary or not self._recorder.is_taken(self._host.local()):
            self._loop.told_boundary(step)
            self._write(step, final=True)

    def write_again(self, step: int) -> None:
        """Write what it was after the newest step again, if the loop's end has changed it."""
        if step > self.base:
            unchanged = self._host.unchanged()
            if self._loop.last_boundary:
                self._loop.told_boundary(step)
            self._recorder.write_if_changed(step, self._host.local(), unchanged)

    def _write(self, step: int, final: bool) -> None:
        self._recorder.write(step, final, self._host.local(), self._host.unchanged())
