#!/usr/bin/env python3
"""Runs torch's own operator database on softgpu and compares every result with the CPU's, bit for bit.

jitckpt exec --device softgpu -- python scripts/softgpu_sweep.py [--only NAME] [--shard I/N] [--json FILE]

A case is one operator of torch.testing._internal's op_db, one dtype and one direction (forward and backward;
in place and out= in float32), on all sample inputs of that database. It is

  passed       every sample gives the CPU's bits, shapes, dtypes and strides (random numbers: the shapes, and
               the same numbers for the same seed)
  failed       a sample gives anything else, an error, a crash, or nothing for --timeout seconds
  refused      a sample needs what softgpu says that it does not have
  not on CUDA, not on the CPU   torch has no such operator there, so there is nothing to compare

Exits with 1 if a case failed.
"""

import argparse
import json
import multiprocessing
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic

import torch
from operator_comparison import (
    DIRECTIONS,
    FAILED,
    REFUSED,
    STATUSES,
    Case,
    Result,
    cases_of,
    database,
    first_line,
    run_case,
    status_of,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64")
CASES_PER_PROCESS = 1000  # then another goes on, which bounds the memory


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this operator (repeat)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="this dtype (repeat); default all")
    parser.add_argument(
        "--shard", type=shard, default=(1, 1), metavar="I/N", help="every Nth operator, from I"
    )
    parser.add_argument("--samples", type=int, default=1000, help="of each case at most (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one case (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case's result there")
    args = parser.parse_args()
    if args.jobs < 1 or args.samples < 1:
        parser.error("--jobs and --samples must be at least 1")
    args.dtype = [name for name in DTYPES if not args.dtype or name in args.dtype]
    return args


def shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N")
    return int(number), int(count)


def work(pipe: Connection, args: argparse.Namespace) -> None:
    """A process's part: say which cases there are, then run those that come, until none does."""
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: run this with `jitckpt exec --device softgpu -- ...`.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, about operators and options of the samples
    number, count = args.shard
    operators = {op.formatted_name: op for op in database(args.only)[number - 1 :: count]}
    pipe.send([case for op in operators.values() for case in cases_of(op, args.dtype)])
    while (case := pipe.recv()) is not None:
        try:
            pipe.send(run_case(operators[case.operator], case, args.samples))
        except torch.AcceleratorError as error:
            pipe.send(Result(status_of(error), first_line(error)))
            return  # nothing may work on this device any more


class Worker:
    """A process that runs one case after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        self.left = CASES_PER_PROCESS
        self.case: Case | None = None
        try:
            self.cases: list[Case] = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(2) from None  # it has said why

    def begin(self, case: Case, timeout: float) -> None:
        self.case, self.deadline, self.left = case, monotonic() + timeout, self.left - 1
        self.pipe.send(case)

    def finish(self) -> tuple[Case, Result]:
        """The case and its result, which is there, or the process is at its end, or the time is over."""
        assert self.case is not None
        case, self.case = self.case, None
        if not self.pipe.poll():
            self.end()
            return case, Result(FAILED, "nothing came for too long")
        try:
            result: Result = self.pipe.recv()
        except EOFError:
            self.end()
            return case, Result(FAILED, f"the process ended with status {self.process.exitcode}")
        if result.reason.startswith("AcceleratorError") or self.left == 0:
            self.end()
        return case, result

    def end(self) -> None:
        self.left = 0
        self.process.join(5)
        self.process.kill()
        self.process.join()


def sweep(args: argparse.Namespace) -> Iterator[tuple[int, Case, Result]]:
    """Yield how many cases there are, and each with its result."""
    workers = [Worker(args)]
    count = len(workers[0].cases)
    waiting = deque(workers[0].cases)
    while True:
        for worker in workers:
            if worker.case is None and waiting:
                worker.begin(waiting.popleft(), args.timeout)
        busy = [worker for worker in workers if worker.case is not None]
        if not busy:
            break
        patience = min(worker.deadline for worker in busy) - monotonic()
        ready = wait([worker.pipe for worker in busy], max(patience, 0))
        for worker in busy:
            if worker.pipe in ready or worker.deadline <= monotonic():
                yield count, *worker.finish()
        workers = [worker for worker in workers if worker.left > 0]
        while len(workers) < min(args.jobs, len(waiting) + len(workers)):
            workers.append(Worker(args))
    for worker in workers:
        worker.pipe.send(None)
        worker.end()


def table(results: dict[Case, Result]) -> Table:
    counts = Counter((case.direction, case.dtype, result.status) for case, result in results.items())
    shown = Table("direction", "dtype", *STATUSES, title=f"softgpu and torch {torch.__version__}'s CPU")
    rows = {(case.direction, case.dtype) for case in results}
    for direction, dtype in sorted(
        rows, key=lambda row: (list(DIRECTIONS).index(row[0]), DTYPES.index(row[1]))
    ):
        shown.add_row(direction, dtype, *(str(counts[direction, dtype, status]) for status in STATUSES))
    totals = Counter(result.status for result in results.values())
    shown.add_section()
    shown.add_row("all", "", *(str(totals[status]) for status in STATUSES))
    return shown


def main() -> int:
    args = parse_arguments()
    results: dict[Case, Result] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    err = Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)
        for count, case, result in sweep(args):
            results[case] = result
            progress.update(bar, total=count, completed=len(results), description=case.operator)
    console = Console()
    console.print(table(results))
    failed = {case: result for case, result in results.items() if result.status == FAILED}
    for case, result in failed.items():
        console.print(f"failed: {case}: {result.reason}", markup=False, highlight=False, soft_wrap=True)
    refused = sorted({case.operator for case, result in results.items() if result.status == REFUSED})
    console.print(f"refused: {', '.join(refused) or 'none'}", highlight=False, soft_wrap=True)
    if args.json:
        cases = [asdict(case) | asdict(result) for case, result in results.items()]
        totals = Counter(result.status for result in results.values())
        document = {"torch": torch.__version__, "counts": totals, "cases": cases}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
