"""What libjitckpt.so costs a device call: paired runs with and without it, on a device that does nothing.

    scripts/bench/interposed_call.py BUILD_FOLDER [--pairs N] [--json]

Prints the median nanoseconds of a launch without the library, with it, and with it and a registered job; and
of a collective, whose watch (an event of our own, the list) is part of the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path


def measure(build: Path, call: str, mode: str) -> float:
    """Nanoseconds of one call. mode: plain, preloaded, or job."""
    environment = dict(os.environ)
    if mode != "plain":
        environment["LD_PRELOAD"] = str(build / "native/interpose/libjitckpt.so")
    program = build / "native/interpose/bench/interposed_calls"
    arguments = [str(program), call, "job" if mode == "job" else "no_job"]
    return float(
        subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    found: dict[str, dict[str, float]] = {}
    for call in ("launch", "collective"):
        runs: dict[str, list[float]] = {"plain": [], "preloaded": [], "job": []}
        for _ in range(arguments.pairs):
            for mode, times in runs.items():
                times.append(measure(build, call, mode))
        found[call] = {"plain": statistics.median(runs["plain"])}
        for mode in ("preloaded", "job"):
            found[call][mode] = statistics.median(
                with_it - without for with_it, without in zip(runs[mode], runs["plain"], strict=True)
            )
    if arguments.json:
        print(json.dumps(found))
        return
    for call, medians in found.items():
        print(f"{call}: {medians['plain']:.1f} ns without the library")
        print(f"{call}: {medians['preloaded']:+.1f} ns preloaded")
        print(f"{call}: {medians['job']:+.1f} ns with a registered job")


if __name__ == "__main__":
    main()
