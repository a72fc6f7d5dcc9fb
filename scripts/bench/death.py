"""When a killed process is known to die, by its lifeline, and when it has ended, as its pidfd says.

    .venv/bin/python scripts/bench/death.py [--mib 1024] [--runs 7] [--json]

A process that has written to so much memory is sent SIGKILL. Medians, in milliseconds from then on.
"""

import argparse
import json
import mmap
import os
import select
import signal
import statistics
import time

from rich.console import Console
from rich.table import Table

from jitckpt.system.lifeline import Lifeline, hold


def deaths(mib: int) -> tuple[float, float]:
    """Return the seconds until the lifeline is released, and until the process has ended."""
    lifeline = Lifeline()
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        hold(lifeline.descriptor)
        memory = mmap.mmap(-1, mib << 20)
        for begin in range(0, len(memory), mmap.PAGESIZE):
            memory[begin] = 1
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    ended = os.pidfd_open(pid)
    lifeline.watch()
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    seen = []
    for descriptor in (lifeline.released, ended):
        select.select([descriptor], [], [])
        seen.append(time.perf_counter() - begun)
    os.waitpid(pid, 0)
    for descriptor in (ended, ready, tell):
        os.close(descriptor)
    lifeline.close()
    return seen[0], seen[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="When is a death known?")
    parser.add_argument("--mib", type=int, default=1024, help="the process's memory (default 1024)")
    parser.add_argument("--runs", type=int, default=7, help="how often (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    lifelines, pidfds = zip(*(deaths(args.mib) for _ in range(args.runs)), strict=True)
    found = {"lifeline_ms": statistics.median(lifelines) * 1e3, "pidfd_ms": statistics.median(pidfds) * 1e3}
    if args.json:
        print(json.dumps(found))
        return
    table = Table("known by", "ms after SIGKILL")
    for name, value in found.items():
        table.add_row(name.removesuffix("_ms"), f"{value:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
