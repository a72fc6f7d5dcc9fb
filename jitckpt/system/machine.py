"""What of a machine a process depends on that was begun on another one."""

import platform
import re
from pathlib import Path

CPU_INFO = "/proc/cpuinfo"


def kernel() -> str:
    """Return the kernel's release, and for which processors it is."""
    return f"{platform.release()} {platform.machine()}"


def processor() -> list[str]:
    """Return what the processor can do; none where the kernel says it otherwise."""
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", Path(CPU_INFO).read_text(), re.MULTILINE)
    return sorted({*found[1].split()}) if found else []
