"""Signals that reach all processes of a job at once are left to the agent (native/interpose/hold_still.h).

scancel and `srun --signal` send to every process of a step: ranks, the DataLoader's workers, spares, servers
and the guardian. The agent is sent them, too, and decides.
"""

import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from jitckpt.bindings import symbols
from jitckpt.wire.environment import AGENT_PID

HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def end_in_order() -> None:
    """Let signals that would end this process at once unwind its stack as ^C does: nothing is left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def hold_still() -> None:
    """Leave these signals to the agent, where the program has no handler of its own for them."""
    for number in HELD:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _hold(number)


def hold_still_in_loaders() -> None:
    """Have the workers of torch's DataLoader do so, too: they set a handler, which ends them."""
    if not AGENT_PID.is_set():
        return
    signal_handling: Any = import_module("torch.utils.data._utils.signal_handling")
    original: Callable[[], None] = signal_handling._set_worker_signal_handlers
    if getattr(original, "holds_still", False):
        return

    def set_handlers() -> None:
        original()
        _hold(signal.SIGTERM)

    set_handlers.holds_still = True  # type: ignore[attr-defined]
    signal_handling._set_worker_signal_handlers = set_handlers


def _hold(number: int) -> None:
    agent, process = AGENT_PID.get(), _process()
    if agent is not None and process is not None and process.jitckpt_hold_still(int(number), int(agent)) != 0:
        raise OSError(f"Signal {number} can't be left to the agent.")


def _process() -> Any:
    """Return the symbols of this process; None where jitckpt's library is not preloaded."""
    return symbols.with_name("jitckpt_hold_still")


def comes_from_signal(error: BaseException) -> bool:
    """Return whether an exception was raised by a handler of a signal, wherever that was called."""
    handlers = {
        code
        for number in signal.valid_signals()
        if (code := getattr(signal.getsignal(number), "__code__", None)) is not None
    }
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False
