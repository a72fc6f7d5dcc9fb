"""A clock that jumps: one process has another time of day, by a preloaded library (native/clock)."""

import ctypes
import re
from collections.abc import Mapping

from jitckpt.errors import JitckptError

LIBRARY = "libjitckpt_clock.so"
HOUR = 3600
_AHEAD = "jitckpt_clock_ahead"  # seconds


class ClockError(JitckptError):
    """The time of day can't be changed; the text is a sentence."""


def is_preloaded() -> bool:
    """Return whether the library is in this process."""
    return hasattr(ctypes.CDLL(None), _AHEAD)


def preloaded(library: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that has the library, and whose children have it."""
    others = re.split(r"[\s:]+", environment.get("LD_PRELOAD", ""))
    return {**environment, "LD_PRELOAD": ":".join(filter(None, [*others, library]))}


def jump(seconds: int) -> None:
    """Let this process's time of day jump. Raises ClockError where the library is not preloaded."""
    if not is_preloaded():
        raise ClockError(
            f"{LIBRARY} is not preloaded, so the time of day stays: rehearse it with `jitckpt run --fault`."
        )
    ctypes.c_int64.in_dll(ctypes.CDLL(None), _AHEAD).value += seconds


def jump_of(pid: int, library: str, seconds: int) -> None:
    """Let another process's time of day jump, as root may. Raises OSError and ClockError."""
    ours = ctypes.c_int64.in_dll(ctypes.CDLL(library), _AHEAD)
    address = ctypes.addressof(ours) - _begin("self", library) + _begin(str(pid), library)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        ahead = ctypes.c_int64.from_buffer_copy(memory.read(ctypes.sizeof(ours))).value
        memory.seek(address)
        memory.write(bytes(ctypes.c_int64(ahead + seconds)))


def _begin(pid: str, library: str) -> int:
    """Return where the library lies in a process."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            if line.rstrip().endswith(library):
                return int(line.partition("-")[0], 16)
    raise ClockError(f"{library} is not in process {pid}, so its time of day stays.")
