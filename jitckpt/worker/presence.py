"""What the agent hears of a rank beside its saves: that it is there, how it begins and how it ends."""

import os
import traceback
from collections.abc import Callable

from jitckpt.state import parallel
from jitckpt.system.stacks import stack_writer
from jitckpt.wire import protocol
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.ends import at_end
from jitckpt.worker.ends.exceptions import ExceptionHook, ExitHook
from jitckpt.worker.reporter import Reporter


class Presence:
    """From jitckpt.init on until `end`: the script's exceptions are heard of as well."""

    def __init__(self, arguments: Arguments, reporter: Reporter) -> None:
        self._identity, self._reporter = arguments.identity, reporter
        self._register(arguments)
        self._exception_hook = ExceptionHook(self._report_exception)
        self._exit_hook = ExitHook()

    def _register(self, arguments: Arguments) -> None:
        self._reporter.report(
            protocol.Registered(
                rank=self._identity.rank,
                pid=os.getpid(),
                world_size=self._identity.world_size,
                shard=self._identity.shard,
                shards=self._identity.shards,
                fingerprint=self._identity.fingerprint,
                saver="builtin" if arguments.save_function is None else "callback",
                checkpoint_dir=str(arguments.root),
                named_directory=arguments.named_directory,
                stack_signal=stack_writer().signal_number,
                stack_fd=stack_writer().descriptor,
            )
        )
        if self._identity.world_size > 1 and self._reporter.has_agent:
            for name, ranks in parallel.named_groups():
                self._reporter.report(protocol.Group(self._identity.rank, name, list(ranks)))

    def _report_exception(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        self._reporter.report(protocol.Raised(self._identity.rank, text))

    def stay(self, may_end: Callable[[], bool]) -> None:
        """Wait, with the state, until the scripts of all ranks are at their ends: another may yet fail."""
        if not self._reporter.has_agent or self._identity.world_size == 1:
            return
        if self._exit_hook.status != 0:
            return  # its end is a failure
        self._reporter.report(protocol.AtEnd(self._identity.rank))
        at_end.stay(lambda: not self._reporter.has_agent or may_end())

    def end(self, newest_step: int, *, at_exit: bool) -> None:
        """at_exit: the process ends, whose script has come to its end."""
        self._exception_hook.remove()
        self._exit_hook.remove()
        self._reporter.report(protocol.Finished(self._identity.rank, newest_step, at_exit))
