"""What the agent that leads a job takes to agree on one transparent recovery of so many ranks.

    .venv/bin/python scripts/bench/agreement.py [--ranks 100 1000 10000] [--json]

The ranks' proxies are those of the unit tests, and answer at once; only the agent's own work is timed. It is
in Python and on one thread, so this is added to what the slowest rank takes.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "unit"))
from test_transparent_agreement import Job, job  # type: ignore[import-not-found, unused-ignore]


def seconds(ranks: int) -> float:
    """Return what the agent takes from a rank's alarm until all have made their calls again."""
    now: Job = job(ranks)
    hear, taken = now.agreement.hear, []

    def timed(*message: object) -> None:
        began = time.perf_counter()
        hear(*message)
        taken.append(time.perf_counter() - began)

    now.agreement.hear = timed
    now.alarm(0)
    now.run_by_turns()
    now.goes_on(7)
    return sum(taken)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {ranks: seconds(ranks) for ranks in args.ranks}
    if args.json:
        print(json.dumps(found))
        return
    table = Table("ranks", "seconds of the agent")
    for ranks, taken in found.items():
        table.add_row(str(ranks), f"{taken:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
