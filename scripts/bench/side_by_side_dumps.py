"""How long CRIU takes to dump the processes of several ranks: one rank after the other, and side by side.

    python scripts/bench/side_by_side_dumps.py [--ranks 2] [--pairs 5] [--json]

Takes root, and CRIU that works (`jitckpt doctor`). A rank is a process that has loaded torch, and two that it
has forked; they are dumped to memory, and run on. Each pair is the one way and then the other.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from jitckpt.agent.migration.side_by_side import all_of, side_by_side
from jitckpt.bindings import criu
from jitckpt.system import network_lock

RANK = """
import os, signal, torch
for _ in range(2):
    if os.fork() == 0:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        signal.pause()
print("there", flush=True)
signal.pause()
"""
LIMIT = 120.0  # seconds
SETTLED = 5.0  # by then the forked ones wait, too


def dump(rank: "subprocess.Popen[bytes]") -> None:
    name = tempfile.mkdtemp(dir="/dev/shm")
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        output = os.stat(f"/proc/{rank.pid}/fd/1").st_ino
        options = criu.Options(folder, LIMIT, [f"pipe[{output}]"], leaves_running=True)
        criu.dump(criu.find(), rank.pid, options)
    finally:
        network_lock.unlock(criu.locks(folder))
        os.close(folder)
        shutil.rmtree(name)


def took(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def end(rank: "subprocess.Popen[bytes]") -> None:
    os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--pairs", type=int, default=5, help="default 5")
    parser.add_argument("--json", action="store_true", help="print the seconds of each pair as JSON")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        ranks = []
        for _ in range(options.ranks):
            rank = subprocess.Popen(
                [sys.executable, "-c", RANK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.callback(end, rank)
            ranks.append(rank)
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        time.sleep(SETTLED)
        calls = [partial(dump, rank) for rank in ranks]
        pairs = [
            (took(lambda: [call() for call in calls]), took(lambda: all_of(side_by_side(calls))))
            for _ in range(options.pairs)
        ]
    if options.json:
        print(json.dumps({"pairs": pairs, "load": load, "cores": os.cpu_count()}))
        return
    one, both = (statistics.median(way) for way in zip(*pairs, strict=True))
    loads = f"load {load:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{options.ranks} ranks, medians of {options.pairs} pairs, {loads}:")
    print(f"one after the other {one:.2f} s, side by side {both:.2f} s ({both / one:.2f} of it)")


if __name__ == "__main__":
    main()
