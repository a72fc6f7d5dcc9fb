"""Prints what a run of scripts/test found, and with which versions: a line of docs/data/versions.jsonl.

    python scripts/version_record.py LOGS COMMAND

LOGS is the folder of the run's logs, COMMAND what it was. `scripts/test --record` calls this in the
environment that was tested.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

PYTEST = re.compile(r"(\d+) (passed|failed|error|skipped)")
CTEST = re.compile(r"(\d+) tests failed out of (\d+)")


def counted(logs: Iterable[str]) -> Counter[str]:
    """Return how many tests passed, failed and were skipped.

    Args:
        logs: the text of each log of pytest and of ctest; of others nothing is counted.
    """
    counts: Counter[str] = Counter()
    for log in logs:
        if of_ctest := CTEST.search(log):
            failed, tests = map(int, of_ctest.groups())
            counts += Counter(passed=tests - failed, failed=failed)
            continue
        last = next((line for line in reversed(log.splitlines()) if re.search(r" in [\d.]+s", line)), "")
        for number, what in PYTEST.findall(last):
            counts["failed" if what == "error" else what] += int(number)
    return counts


def main() -> int:
    """Print the line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path)
    parser.add_argument("command")
    given = parser.parse_args()
    logs = [*given.logs.glob("pytest-*.log"), *given.logs.glob("native-*.log")]
    counts = counted(log.read_text(errors="replace") for log in logs)
    if not counts["passed"]:
        print(f"{given.logs} has no log that says how many tests passed", file=sys.stderr)
        return 1
    commit = subprocess.run(
        ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    system = platform.freedesktop_os_release()
    row = {
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "system": f"{system['NAME'].partition(' ')[0]} {system['VERSION_ID']}",
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "command": given.command,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
