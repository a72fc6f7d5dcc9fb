"""The paper's Table 6 for this machine: how long ranks wait while CRIU makes those of a broken device anew.

    python scripts/bench/moves.py [--loaders 0 2] [--where here elsewhere] [--times 1] [--json]

Takes root, and CRIU that works (`jitckpt doctor`). here: of two ranks one has a device that is broken, and is
made anew on its host with another. elsewhere: of two hosts of two ranks, network namespaces of this machine,
one has such a device and no other: both its ranks are dumped, sent to a host that stands by, and made again
there. loaders: the DataLoader's processes of each rank.

failed: from the dump until the processes are made again, of the ranks that are; healthy: from the finding of
the failure until all ranks go on; dump, transfer, restore: the parts of the first; minibatch: the median of
an undisturbed run. Each job has to end with the losses, parameters and optimizer state of the undisturbed
one, bit for bit; else the exit status is 1. With several times the medians are shown.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workload_tables import PAPER_MOVE

from jitckpt.console import say
from jitckpt.events import read_events
from jitckpt.rehearsal.namespaces import APART, namespaces
from jitckpt.reports.timeline_transparent import transparent_recoveries

HERE, ELSEWHERE = "here", "elsewhere"
RANKS = {HERE: 2, ELSEWHERE: 4}
GOALS = {0: 3.0, 2: 6.0}  # seconds for the failed rank, by loaders
STEPS, FAILS_AT = 24, 8
WIDTH = 130  # characters of the table, where it does not go to a terminal
LIMIT = 900  # seconds: finds hangs, however slow the machine
JITCKPT = [sys.executable, "-P", "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "run"]
COMMON = ["--device", "softgpu", "--mode", "transparent", "--warm-spares", "0", "--max-restarts", "0"]
MEET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400", "--rdzv-id", "job"]
PARTS = ("dump", "transfer", "restore")
Row = dict[str, Any]


class WrongEnd(Exception):
    """A job did not do what the undisturbed one does."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loaders", type=int, nargs="+", default=[0, 2], help="default 0 2")
    parser.add_argument("--where", nargs="+", choices=tuple(RANKS), default=tuple(RANKS), help="default both")
    parser.add_argument("--times", type=int, default=1, help="default 1")
    parser.add_argument("--json", action="store_true", help="print each job's figures as JSON")
    options = parser.parse_args()
    rows = []
    try:
        for where in options.where:
            for loaders in options.loaders:
                rows += measured(where, loaders, options.times)
    except (WrongEnd, ValueError) as error:
        say(str(error))
        return 1
    if options.json:
        print(json.dumps(rows))
    else:
        console = Console()
        show(rows, console if console.is_terminal else Console(width=WIDTH))
    return 0


def measured(where: str, loaders: int, times: int) -> list[Row]:
    """Return what so many moves took. Raises WrongEnd."""
    alone = [*JITCKPT, "--standalone", "--nproc-per-node", str(RANKS[where]), *COMMON]
    out, _ = ended([(alone, RANKS[where])], loaders)
    expected = ends_of(out)
    rows = []
    for _ in range(times):
        load = os.getloadavg()[0]
        out, events = move_here(loaders) if where == HERE else move_elsewhere(loaders)
        if {rank: end for rank, (end, _) in ends_of(out).items()} != {
            rank: end for rank, (end, _) in expected.items()
        }:
            raise WrongEnd("The job has not ended as the undisturbed one.")
        name = "worker_moved" if where == HERE else "ranks_moved"
        moved = [one for one in events if one["event"] == name]
        if not moved:
            raise WrongEnd("No process was made anew, see `jitckpt doctor`.")
        row: Row = {"where": where, "loaders": loaders, "bytes": moved[0]["bytes"]}
        row |= {part: moved[0].get(part, 0.0) for part in PARTS}
        row["failed"] = sum(row[part] for part in PARTS)
        row["healthy"] = max(one.seconds for one in transparent_recoveries(events))
        row["minibatch"] = statistics.median(seconds for _, seconds in expected.values())
        rows.append(row | {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "cores": os.cpu_count()})
    return rows


def move_here(loaders: int) -> tuple[str, list[Any]]:
    fault = ["--fault", f"rank=1 step={FAILS_AT} phase=backward kind=device-lost-hard"]
    command = [*JITCKPT, "--standalone", "--nproc-per-node", "2", *COMMON, "--broken-device", "move", *fault]
    return ended([(command, 3)], loaders)


def move_elsewhere(loaders: int) -> tuple[str, list[Any]]:
    fault = ["--fault", f"rank=3 step={FAILS_AT} phase=backward kind=device-lost-hard"]
    command = [*JITCKPT, *MEET, "--nproc-per-node", "2", *COMMON, "--broken-device", "move", *fault]
    command += ["--secret-file", "secret"]
    with namespaces(3) as hosts:
        places = [[*command, "--node-rank", "0"], [*command, "--node-rank", "1"]]
        places += [[*APART, *command, "--standby"]]
        return ended([([*hosts.in_network_of(host), *one], 2) for host, one in enumerate(places)], loaders)


def ended(commands: Sequence[tuple[list[str], int]], loaders: int) -> tuple[str, list[Any]]:
    """Run a job's launchers, each with so many devices; return what all print, and the job's events."""
    training = [str(Path(__file__).with_name("moves_training.py")), "--steps", str(STEPS)]
    training += ["--loaders", str(loaders)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (secret := folder / "secret").write_bytes(b"0123456789abcdef")
        secret.chmod(0o600)
        started = []
        for number, (command, devices) in enumerate(commands):
            said = stack.enter_context((folder / f"out-{number}").open("w+"))
            process = subprocess.Popen(
                [*command, "--checkpoint-dir", f"job-{number}", *training],
                cwd=folder,
                env={**os.environ, "SOFTGPU_DEVICES": str(devices), "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            started.append((process, folder / f"out-{number}"))
        statuses = [process.wait(LIMIT) for process, _ in started]
        out = "".join(path.read_text() for _, path in started)
        if any(statuses):
            raise WrongEnd(f"The job has ended with {statuses}:\n{out[-6000:]}")
        return out, read_events(folder / "job-0")[0]


def ends_of(out: str) -> dict[int, tuple[str, float]]:
    """Return by rank what it ends with, and its median minibatch's seconds."""
    found = re.findall(r"^rank (\d+): (\w+) ([\d.e-]+)$", out, re.MULTILINE)
    return {int(rank): (end, float(seconds)) for rank, end, seconds in found}


def show(rows: Sequence[Row], console: Console) -> None:
    columns = ("failed", "healthy", *PARTS, "minibatch")
    table = Table("", "MB", *columns, "goal (failed)", "load", title="Seconds; the paper's below")
    for where, loaders in dict.fromkeys((row["where"], row["loaders"]) for row in rows):
        own = [row for row in rows if (row["where"], row["loaders"]) == (where, loaders)]
        loads = [load for row in own for load in row["load"]]
        table.add_row(
            f"{where}, {loaders} loaders",
            f"{statistics.median(row['bytes'] for row in own) / 1e6:.0f}",
            *(f"{statistics.median(row[one] for row in own):.3g}" for one in columns),
            f"{GOALS[loaders]:g}" if loaders in GOALS else "",
            f"{min(loads)} to {max(loads)} on {own[0]['cores']} cores",
        )
    for name, (healthy, failed, minibatch) in PAPER_MOVE.items():
        cells = (f"{failed:g}", f"{healthy:g}", "", "", "", f"{minibatch:g}")
        table.add_row(f"paper: {name}", "", *cells, "", "eight V100")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
