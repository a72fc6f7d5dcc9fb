"""What the device proxy costs a call: runs through it and without it in turns, on softgpu.

    scripts/bench/proxy.py BUILD_FOLDER [--runs N]

Prints the median nanoseconds of a launch (nobody waits for it), of a query (answered at once) and of waiting
for a stream that is empty, as the calling thread sees them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from pathlib import Path

CALLS = ("launch", "query", "synchronize")


def measure(build: Path, program: str, call: str) -> float:
    """Nanoseconds of one call. program: direct_calls or proxied_calls."""
    server = build / "native/proxy/tests/proxy_server_with_softgpu"
    ended = subprocess.run(
        [str(build / "native/proxy/bench" / program), call],
        env=os.environ | {"JITCKPT_PROXY_SERVER": str(server)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for call in CALLS:
        times: dict[str, list[float]] = {"direct_calls": [], "proxied_calls": []}
        for _ in range(arguments.runs):
            for program, measured in times.items():
                measured.append(measure(build, program, call))
        direct, proxied = (statistics.median(measured) for measured in times.values())
        print(f"{call}: {direct:.0f} ns without the proxy, {proxied:.0f} ns through it")


if __name__ == "__main__":
    main()
