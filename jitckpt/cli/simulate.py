"""`jitckpt simulate`: play a job through failures, and say where its time went."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jitckpt.cli.parser import Parser
from jitckpt.cli.plan import check_tiers
from jitckpt.cli.progress import shown_progress
from jitckpt.cli.tables import show
from jitckpt.planning.cluster import Description, read_description
from jitckpt.planning.failures import (
    Failure,
    exponential_failures,
    recorded_failures,
    weibull_failures,
    with_triggered,
)
from jitckpt.planning.plan import analyse
from jitckpt.planning.policies import parse_policy
from jitckpt.planning.simulator import Result, simulate
from jitckpt.planning.units import DAY_SECONDS, show_seconds
from jitckpt.system import regular_file

_WIDTH_OF_FILES = 200  # nothing is folded where no screen is too narrow


def main(arguments: list[str]) -> int:
    """Simulate and print; return the exit status."""
    parser = Parser(
        prog="jitckpt simulate", description="Play a job through failures, and say where its time went."
    )
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.toml", help="as for `jitckpt plan`")
    parser.add_argument(
        "--policy", required=True, help='tiers joined by "+", such as user-jit+gemini=2+periodic=6h; or none'
    )
    parser.add_argument("--days", type=float, default=90.0, help="of wall time (default 90)")
    parser.add_argument("--seed", type=int, default=1, help="of the failures (default 1)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weibull", type=float, metavar="SHAPE", help="components age; 1 is without memory")
    source.add_argument(
        "--failures", type=Path, metavar="FILE", help="recorded: CSV with seconds,failure,component"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the time line (.png, .svg, .pdf)")
    parsed = parser.parse_args(arguments)
    check_tiers(parsed.policy)
    if parsed.failures is not None and (fault := unreadable(parsed.failures)):
        parser.error(f"--failures {parsed.failures} can't be read: {fault}")
    description = read_description(parsed.cluster)
    policy = parse_policy(parsed.policy, description)
    analysis = analyse(description, policy)
    with shown_progress() as progress:
        task = progress.add_task("simulating", total=1.0)
        result = simulate(
            description,
            policy,
            _failures(description, parsed),
            days=parsed.days,
            minibatches_per_save=analysis.minibatches_per_save,
            seed=parsed.seed,
            report=lambda share: progress.update(task, completed=share),
        )
    if parsed.plot:
        from jitckpt.planning.pictures import draw_simulation

        title = f"{parsed.policy}, {description.cluster.gpus} GPUs, {parsed.days:g} days"
        draw_simulation(result, description.job.minibatch_seconds, title, parsed.plot)
    if parsed.json:
        print(json.dumps({**asdict(result), "wasted_share": result.wasted_share}, indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    for table in _tables(result):
        show(console, table)
    console.print(
        f"{result.wasted_share:.3%} of the time was wasted; `jitckpt plan` expects "
        f"{analysis.wasted_share:.3%}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def unreadable(path: Path) -> str:
    """Return why the file can't be read; "" where it can."""
    try:
        regular_file.reading(path).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _failures(description: Description, parsed: argparse.Namespace) -> Iterator[Failure]:
    if parsed.failures is not None:
        return recorded_failures(description, parsed.failures)
    if parsed.weibull is not None:
        first = weibull_failures(description, parsed.weibull, parsed.days * DAY_SECONDS, parsed.seed)
    else:
        first = exponential_failures(description, parsed.seed)
    return with_triggered(description, first, parsed.seed)


def _tables(result: Result) -> list[Table]:
    times = Table("cause", "time", "share", title="Where the time went")
    for cause, seconds in result.seconds.items():
        times.add_row(cause, show_seconds(seconds), f"{seconds / result.wall_seconds:.3%}")
    failures = Table("failure", "times", title="Failures")
    for name, count in result.failures.items():
        failures.add_row(name, str(count))
    outages = Table("ended by", "outages", title="Outages")
    for tier, count in result.recoveries.items():
        outages.add_row(tier, str(count))
    return [times, failures, outages]
