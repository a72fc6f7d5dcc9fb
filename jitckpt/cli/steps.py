"""`jitckpt steps`: what jitckpt sees of a script's optimizer steps, with no word of the script about it."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jitckpt.cli.exec import add_device_argument, positive_number
from jitckpt.cli.parser import Parser
from jitckpt.cli.script import script_of
from jitckpt.errors import JitckptError
from jitckpt.rehearsal.runs import JITCKPT
from jitckpt.wire import environment

if TYPE_CHECKING:
    from jitckpt.worker.in_place.step_record import Record

SHOWN_NAMES = 5


class StepsError(JitckptError):
    """Nothing was seen; the text is a sentence that says why."""


def main(arguments: list[str]) -> int:
    """Run the script; return 0 if transparent mode supports all that was seen. Raises StepsError."""
    parser = Parser(
        prog="jitckpt steps",
        usage="jitckpt steps [options] -- script.py [the script's arguments]",
        description="Run a script to its end, and say what is seen of its optimizer steps.",
    )
    parser.add_argument("--nproc-per-node", type=positive_number, default=1, metavar="N", help="(default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, a record a rank")
    add_device_argument(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script with its arguments, after --")
    args = parser.parse_args(arguments)
    command = script_of(args.command)
    if not command:
        parser.error("there is no script to run: jitckpt steps [options] -- train.py its arguments")
    with tempfile.TemporaryDirectory(prefix="jitckpt-steps-") as folder:
        output = sys.stderr if args.json else None  # the document is alone on stdout
        records = _run(command, args.nproc_per_node, args.device, Path(folder), output)
    print(json.dumps([asdict(one) for one in records], indent=1) if args.json else "\n".join(lines(records)))
    return 1 if problems(records) else 0


def problems(records: Sequence["Record"]) -> list[str]:
    """Return a sentence for each thing that transparent mode could not recover from, or not exactly."""
    found = [
        f"Rank {one.rank}: {name} changes in the optimizer step, but is none of its parameters nor state."
        for one in records
        for name in one.in_step
    ]
    found += [f"Rank {one.rank}: {reason}." for one in records for reason in one.unsupported]
    for one in records[1:]:
        if one.steps != records[0].steps:
            found.append(
                f"Rank {one.rank} has made {one.steps} steps, rank {records[0].rank} {records[0].steps}."
            )
        if one.optimizers != records[0].optimizers:
            found.append(f"Rank {one.rank} has other optimizers than rank {records[0].rank}.")
    return found


def lines(records: Sequence["Record"]) -> list[str]:
    """Return what the user is told."""
    first = records[0]
    size = sum(prod(shape) for _, shape in first.state.values())
    alike = sum(one.state == first.state for one in records)
    optimizers = ", ".join(f"{kind} ({count} parameters)" for kind, count in first.optimizers)
    said = [
        f"steps: {first.steps}, of {optimizers}",
        f"state: {len(first.state)} tensors of {size} elements, alike on {alike} of {len(records)} ranks",
        f"changes outside the step too: {_some(first.outside)}",
        f"buffers: {len(first.buffers)}, of which change: {_some(first.changing)}",
        f"(values compared in the first {first.compared} steps)",
    ]
    return [*said, *(problems(records) or ["Nothing was seen that transparent mode does not support."])]


def _run(
    command: Sequence[str], ranks: int, device: str, folder: Path, output: IO[str] | None
) -> list["Record"]:
    whole = [*JITCKPT, "run", "--standalone", "--nproc-per-node", str(ranks), "--device", device]
    whole += ["--max-restarts", "0", "--warm-spares", "0", *command]
    # A script that calls jitckpt.init saves there, and neither goes on from its real saves nor adds to them.
    variables = os.environ | {
        **environment.STEPS_RECORD.to(folder),
        **environment.REHEARSAL_DIR.to(folder / "job"),
    }
    status = subprocess.run(whole, env=variables, stdout=output, check=False).returncode
    if status != 0:
        raise StepsError(f"The script ended with status {status}; only what runs to its end is judged.")
    from jitckpt.worker.in_place.step_record import read

    records = read(folder)
    if not records:
        raise StepsError("The script has made no step of an optimizer of torch.optim.")
    return records


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return (", ".join(names[:SHOWN_NAMES]) + rest) or "none"
