"""`jitckpt doctor`: before a long run, one table of what would hurt later."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from jitckpt.bindings import libc
from jitckpt.cli import doctor_processes
from jitckpt.cli.exec import add_device_argument, positive_number
from jitckpt.cli.parser import Parser
from jitckpt.cli.progress import shown_progress
from jitckpt.cli.script import script_of
from jitckpt.device import LIBRARY_DIR, check_libraries, choose_device
from jitckpt.doctor import checks, facts, hosts, moved_process, moves
from jitckpt.doctor.checks import Disk, Row
from jitckpt.events import Event
from jitckpt.rehearsal.runs import CHECKPOINTS, OUTPUT, run_job
from jitckpt.system.signals import end_in_order
from jitckpt.wire.environment import SELF_CHECK
from jitckpt.worker.self_check.comparison import FULL_SELF_CHECK

SHOWN_OUTPUT = 4000  # characters
SELF_CHECK_SECONDS = 20.0  # after the first step
SHOWN_STATES = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if there is a problem. Raises DeviceError if the device can't be given."""
    parser = _parser()
    args = parser.parse_args(arguments)
    end_in_order()
    try:
        others = [hosts.said_in(path) for path in args.beside]
    except ValueError as error:
        parser.error(str(error))
    kind = choose_device(args.device, os.environ)
    check_libraries(kind, LIBRARY_DIR)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with shown_progress(*columns) as progress:
        task = progress.add_task("looking at this machine")
        disk = facts.disk(args.checkpoint_dir)
        found = AskedOnce(facts.device(kind), moved_process.try_it())
        rows = look_at_machine(kind, args.nproc_per_node, disk, found)
        host = hosts.this_host(found.moved, " ".join(found.device[:2]))
        if others:
            rows += hosts.check_hosts([host, *others])
        if args.rdzv_endpoint is not None:
            rows.append(look_at_rendezvous(args.rdzv_endpoint))
        output = ""
        if script := script_of(args.script):
            progress.update(task, description="running the script's first steps")
            try_it = try_script if args.mode == "user" else try_transparent
            script_rows, output = try_it(script, kind, args, disk)
            rows += script_rows
    status = int(any(row.state == "problem" for row in rows))
    if args.json:
        said = {"rows": [asdict(row) for row in rows], "host": asdict(host), "status": status}
        print(json.dumps(said, indent=1))
        return status
    if output:
        print(output, file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    counts = {state: sum(row.state == state for row in rows) for state in SHOWN_STATES}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()), highlight=False)
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="jitckpt doctor",
        usage="jitckpt doctor [options] [-- script.py [the script's arguments]]",
        description="Look for what would hurt a long run later; with a script, run its first steps too.",
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path("ckpt"), metavar="DIR", help="where saves will go (ckpt)"
    )
    parser.add_argument("--nproc-per-node", type=positive_number, default=2, metavar="N", help="(default 2)")
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where several hosts will meet, as for jitckpt run"
    )
    parser.add_argument(
        "--mode",
        choices=("user", "transparent"),
        default="user",
        help="for a script, as for jitckpt run; transparent: could its processes be moved, too? (user)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for the script's first steps (300)",
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="what `jitckpt doctor --json` has printed on other hosts: is this one like them?",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_device_argument(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, help="with its arguments, after --")
    return parser


class AskedOnce(NamedTuple):
    """What is asked for once: the devices' name, driver and number; how a move of a process went."""

    device: tuple[str, str, int]
    moved: Mapping[str, Any]


def look_at_machine(kind: str, ranks: int, disk: Disk, found: AskedOnce) -> list[Row]:
    """Return the rows that need no script."""
    return [
        checks.check_device(kind, *found.device, ranks),
        *checks.check_process(*facts.ask_process(kind)),
        checks.check_shared_memory(facts.shared_memory_free()),
        checks.check_memory(facts.memory_available()),
        *checks.check_limits(facts.limits(), kind),
        *checks.check_network(os.environ, facts.interfaces(), *facts.store_address(os.environ)),
        *checks.check_environment(os.environ),
        *checks.check_disk(disk),
        checks.check_criu(found.moved),
        *checks.check_frameworks(facts.frameworks()),
        checks.check_clock(libc.clock_is_synchronised()),
    ]


def look_at_rendezvous(endpoint: str) -> Row:
    """Return the row about the place where several hosts will meet."""
    try:
        found = facts.rendezvous(endpoint)
    except ValueError as error:
        return Row("rendezvous", "problem", f"--rdzv-endpoint {endpoint}: {error}", "give HOST:PORT")
    return checks.check_rendezvous(endpoint, *found)


def try_script(script: list[str], kind: str, args: argparse.Namespace, disk: Disk) -> tuple[list[Row], str]:
    """Run the script until every rank has made a step, end it as a preemption would, and look at its saves.

    Its saves lie beside the checkpoint directory, and are removed. Returns the rows, and the end of what it
    said if it did not come to its first steps.
    """
    ranks: int = args.nproc_per_node

    def first_steps_done(events: Sequence[Event]) -> bool:
        return len([event for event in events if event["event"] == "first_step"]) == ranks

    def may_end(events: Sequence[Event]) -> bool:
        """Whether all is seen: the self-check comes some steps later, if it does."""
        if not first_steps_done(events):
            return False
        checked = {event["rank"] for event in events if event["event"] == "self_check"}
        last = max(event["time"] for event in events if event["event"] == "first_step")
        builtin = all(event["saver"] == "builtin" for event in events if event["event"] == "registered")
        return len(checked) == ranks or not builtin or time.time() > last + SELF_CHECK_SECONDS

    if disk.problem:
        return [Row("script", "problem", "not run: there is nowhere to save")], ""
    with tempfile.TemporaryDirectory(prefix=".jitckpt-doctor-", dir=disk.path) as temporary:
        folder = Path(temporary) / "run"
        status = ""
        events: Sequence[Event] = ()
        try:
            run = run_job(
                ["--max-restarts", "0", "--warm-spares", "0", *script],
                folder,
                ranks=ranks,
                device=kind,
                time_limit=args.time_limit,
                cwd=Path.cwd(),
                end_when=may_end,
                variables=SELF_CHECK.to(FULL_SELF_CHECK),
            )
            events = run.events
            if not first_steps_done(events):
                status = (
                    f"it ended with status {run.status} before every rank had made a step under protection"
                )
        except TimeoutError:
            status = f"not every rank made a step under protection in {args.time_limit:.0f} s"
        saved = facts.saved_ranks(folder / CHECKPOINTS, events)
        said = (folder / OUTPUT).read_text()
        rows = checks.check_recognised(said) + checks.check_script(events, saved, ranks, status, disk)
        return rows, said[-SHOWN_OUTPUT:] if status else ""


def try_transparent(
    script: list[str], kind: str, args: argparse.Namespace, disk: Disk
) -> tuple[list[Row], str]:
    """Run the script in transparent mode until a minibatch was run again; look at its processes, and end it.

    Returns what try_script does.
    """
    ranks: int = args.nproc_per_node
    if disk.problem:
        return [Row("script", "problem", "not run: there is nowhere for its events")], ""
    seen: list[tuple[doctor_processes.Obstacles, doctor_processes.Obstacles]] = []
    with tempfile.TemporaryDirectory(prefix=".jitckpt-doctor-", dir=disk.path) as temporary:
        folder = Path(temporary) / "run"

        def may_end(events: Sequence[Event]) -> bool:
            names = [event["event"] for event in events]
            if names.count("validated") < ranks and not {"switched_off", "validation_left_out"} & {*names}:
                return False
            seen.append(doctor_processes.obstacles(folder, ranks))
            return True

        events: Sequence[Event] = ()
        status = "it ended before a minibatch could be run again, which is the fifth or a later one"
        try:
            options = ["--mode", "transparent", "--checkpoint-dir", str(folder / CHECKPOINTS)]
            run = run_job(
                [*options, "--max-restarts", "0", "--warm-spares", "0", *script],
                folder,
                ranks=ranks,
                device=kind,
                time_limit=args.time_limit,
                cwd=Path.cwd(),
                end_when=may_end,
            )
            events = run.events
        except TimeoutError:
            status = f"no minibatch was run again in {args.time_limit:.0f} s"
        rows = moves.check_transparent(events, ranks, "" if seen else status)
        if seen:
            calls_init = any(event["event"] == "registered" for event in events)
            rows += moves.check_moves(*seen[0], calls_init=calls_init)
        return rows, "" if seen else (folder / OUTPUT).read_text()[-SHOWN_OUTPUT:]


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    result = Table("check", "", "found", "what to do")
    for row in rows:
        result.add_row(row.check, SHOWN_STATES[row.state], row.found, row.advice)
    return result
