"""What a restart can't cure: what jitckpt refuses, and what a script does wrong before its first step.

In the worker: the agent is told of it before the process ends, whether or not the script gets as far as
jitckpt.init. What the agent makes of it is decided in recovery.py.
"""

import atexit
import os
import socket
from collections.abc import Iterator

from jitckpt.errors import JitckptError
from jitckpt.system import descriptors
from jitckpt.wire import protocol
from jitckpt.worker.ends.exceptions import ExceptionHook, ExitHook

# Classes of exceptions, by name, that may come from the surroundings, or from another process's end: they may
# pass, and so are no mistakes. Where torch has no class of its own for it, the text tells.
_OF_SURROUNDINGS = frozenset(
    [
        "OSError",
        "MemoryError",
        "EOFError",
        "BrokenExecutor",
        "SubprocessError",
        "ProcessException",
        "DistError",
        "AcceleratorError",
        "OutOfMemoryError",
        "ChildFailedError",
        "SignalException",
        "RehearsedFailure",
    ]
)
USAGE = 2  # the exit status of a program that does not understand its arguments
_OF_A_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TEXTS_OF_SURROUNDINGS = (
    "CUDA",
    "NCCL",
    "cuDNN",
    "CUDNN",
    "CUBLAS",
    "DataLoader worker",
    "DefaultCPUAllocator",
)
# Of a device, or of a process that the program started, and yet the program's own: no other start has more.
_TEXTS_OF_MISTAKES = ("invalid device ordinal",)


def refusal(error: BaseException) -> str | None:
    """Return what jitckpt refused if that, itself or as its cause, ends the program; else None."""
    for one in _with_causes(error):
        if isinstance(one, JitckptError) and not one.restart_helps:
            return str(one)
    return None


def may_pass(error: BaseException) -> bool:
    """Return whether the exception may come from a device, the network, a disk or another process."""
    for one in _with_causes(error):
        if any(text in str(one) for text in _TEXTS_OF_MISTAKES):
            return False
        names = {kind.__name__ for kind in type(one).__mro__}
        if not names.isdisjoint(_OF_SURROUNDINGS) and not isinstance(one, _OF_A_PATH):
            return True
        if isinstance(one, RuntimeError) and any(text in str(one) for text in _TEXTS_OF_SURROUNDINGS):
            return True
    return False


class Watch:
    """Tells the agent how this process's program ends, as far as that is a mistake."""

    def __init__(self, given: descriptors.GivenDescriptors) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._given = given
        self._process = os.getpid()
        self._stepped = False
        register_optimizer_step_post_hook(self._steps)
        self._exit_hook = ExitHook()
        atexit.register(self._at_exit)
        ExceptionHook(self._raised)
        self._tell(protocol.TorchLoaded(given.rank))

    def _steps(self, *_: object) -> None:
        self._stepped = True

    def _raised(self, error: BaseException) -> None:
        reason = refusal(error)
        if reason is not None:
            self._tell(protocol.WorkRefused(self._given.rank, reason))
        elif not self._stepped and not may_pass(error):
            self._tell(protocol.Failing(self._given.rank, f"{type(error).__name__}: {error}"))

    def _at_exit(self) -> None:
        status = self._exit_hook.status
        # Any other number a script may have chosen to be started again.
        is_mistake = status == USAGE or (isinstance(status, str) and not may_pass(RuntimeError(status)))
        if is_mistake and not self._stepped:
            self._tell(protocol.Failing(self._given.rank, f"SystemExit: {status}"))

    def _tell(self, message: protocol.WorkerMessage) -> None:
        if os.getpid() != self._process:
            return  # a process that the training has forked
        try:
            if descriptors.given() == self._given:
                with socket.socket(fileno=os.dup(self._given.agent)) as agent:
                    agent.send(protocol.encode(message))
        except (OSError, descriptors.NotOursError):
            return  # the program has closed what it did not open, or the agent has ended


_watch: Watch | None = None


def watch() -> None:
    """Begin; once is enough. Does nothing in a process that is no worker."""
    global _watch  # noqa: PLW0603
    try:
        given = descriptors.given()
    except descriptors.NotOursError:
        return  # jitckpt.init, if it is called here, says so
    if given is not None and (_watch is None or _watch._process != os.getpid()):
        _watch = Watch(given)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__
