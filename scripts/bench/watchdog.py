"""What the watchdog takes of the processor: its threads' time while collectives are watched, on a device that
does nothing.

    scripts/bench/watchdog.py BUILD_FOLDER [--watches 1000] [--seconds 5] [--runs 3] [--json]

A watch is the event behind one collective, asked for until it has come. What a driver takes to answer each
question comes on top.
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path


def share_of_a_core(build: Path, watches: int, seconds: float) -> float:
    """Return the processor time of the library's threads in a second; `watches`: collectives a second."""
    program = build / "native/interpose/bench/interposed_calls"
    environment = os.environ | {"LD_PRELOAD": str(build / "native/interpose/libjitckpt.so")}
    arguments = [str(program), "watches", str(watches), str(seconds)]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--watches", type=int, default=1000, help="a second (default 1000)")
    parser.add_argument("--seconds", type=float, default=5, help="of a run (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="(default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    args = parser.parse_args()
    build = args.build.resolve()
    found = {
        watches: statistics.median(share_of_a_core(build, watches, args.seconds) for _ in range(args.runs))
        for watches in (0, args.watches)
    }
    if args.json:
        print(json.dumps({str(watches): share for watches, share in found.items()}))
        return
    for watches, share in found.items():
        print(f"{watches} watches a second: {100 * share:.3f} % of a core")


if __name__ == "__main__":
    main()
