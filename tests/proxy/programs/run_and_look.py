"""Runs a script as if it were the program, then prints what of a device this process holds."""

import os
import re
import runpy
import sys
from pathlib import Path

DEVICE = re.compile(r"libsoftgpu\.so|memfd:softgpu|/dev/nvidia\S*")


def held() -> list[str]:
    """The device's libraries, memory and files that this process has mapped or open."""
    mapped = Path("/proc/self/maps").read_text()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sorted(set(DEVICE.findall("\n".join([mapped, *opened]))))


def server() -> int:
    """The process id of this process's server; 0 if it has none."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if "jitckpt-proxy-server" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return 0


def main() -> None:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    # One write with its newline: the ranks share their output.
    line = f"held by rank {os.environ.get('RANK', '0')}: server {server()} {' '.join(held())}\n"
    print(line, end="", flush=True)


if __name__ == "__main__":
    main()
