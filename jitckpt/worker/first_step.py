"""Tells the agent when the device has ended the first step, and what the process has loaded by then."""

import os
import sys
import time

from jitckpt.bindings.interpose import Native
from jitckpt.wire import protocol
from jitckpt.worker import spare
from jitckpt.worker.reporter import Reporter

LAST_LOOK_SECONDS = 1.0


class FirstStepWatch:
    """Of one rank; asked after each step until it is told."""

    base = 0  # the step after which the job began
    is_told = False

    def __init__(self, rank: int, native: Native, reporter: Reporter) -> None:
        self._rank, self._native, self._reporter = rank, native, reporter

    def tell(self) -> None:
        """Tell it if the device has come that far."""
        if self._native.progress().device_ended > self.base:
            self.is_told = True
            if self._reporter.has_agent:
                self._tell_what_is_loaded()
            self._reporter.report(protocol.FirstStep(self._rank, self.base + 1))

    def await_it(self, newest_step: int) -> None:
        """A training of few steps ends before the library has looked at the device again."""
        until = time.monotonic() + LAST_LOOK_SECONDS
        while newest_step > self.base and not self.is_told and time.monotonic() < until:
            self.tell()
            time.sleep(0.01)

    def _tell_what_is_loaded(self) -> None:
        modules = spare.importable_modules(sys.modules)
        changed = [list(pair) for pair in spare.changed_environment(os.environ).items()]
        for begin in range(0, len(modules), spare.MODULES_IN_A_MESSAGE):
            part = modules[begin : begin + spare.MODULES_IN_A_MESSAGE]
            self._reporter.report(protocol.Loaded(self._rank, part, changed if begin == 0 else []))
