"""The Python stacks of a process that may hang, without its GIL: a signal makes it write them to a memfd."""

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import BinaryIO

_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class StackWriter:
    """On the worker's side: this signal makes all threads' stacks be written to this file descriptor.

    signal_number: 0 if none is free.
    """

    signal_number: int
    descriptor: int


@cache
def stack_writer() -> StackWriter:
    """Return this process's, for good: a signal that comes late must not end the process."""
    candidates = range(signal.SIGRTMIN, signal.SIGRTMAX)
    number = next((one for one in candidates if signal.getsignal(one) is signal.SIG_DFL), 0)
    descriptor = os.memfd_create("jitckpt-stacks")
    if number:
        faulthandler.register(number, descriptor, all_threads=True)
    return StackWriter(number, descriptor)


def code_of(thread: int) -> set[CodeType]:
    """Return the code of all functions that a thread of this process (its get_ident()) is inside of."""
    frame = sys._current_frames().get(thread)
    found = set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def ask_for_stacks(pid: int, signal_number: int, descriptor: int) -> BinaryIO:
    """Have a live process with a StackWriter write its stacks; return where. Raises OSError if it is gone.

    Only who sees to it that the process is not reaped meanwhile may call this.
    """
    file = open(f"/proc/{pid}/fd/{descriptor}", "rb")  # noqa: SIM115
    try:
        file.seek(0, os.SEEK_END)
        os.kill(pid, signal_number)
    except BaseException:
        file.close()
        raise
    return file


def read_stacks(file: BinaryIO, within: float = 0.5) -> str:
    """Return what a process that was asked for its stacks writes, empty if it doesn't in these seconds."""
    with file:
        text, end = b"", time.monotonic() + within
        while time.monotonic() < end:
            more = file.read()
            if text and not more and text.endswith(b"\n"):
                break
            text += more
            time.sleep(_LOOK_SECONDS)
    return text.decode(errors="replace")
