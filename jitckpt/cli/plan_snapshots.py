"""`jitckpt plan snapshots`: the best `--snapshot-every`, from a job's events or from options."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from jitckpt.cli.parser import Parser
from jitckpt.cli.tables import WIDTH_OF_FILES, show
from jitckpt.decisions.check import InvalidInput
from jitckpt.events import FILE_NAME, read_events
from jitckpt.planning.snapshots import SnapshotCosts, best_interval_seconds, best_minutes, lost_share
from jitckpt.planning.units import DAY_SECONDS, MINUTE_SECONDS, SECONDS, quantity, show_seconds
from jitckpt.reports.snapshots_measured import MeasuredSnapshots, measured
from jitckpt.reports.timeline import jobs
from jitckpt.reports.whole_events import is_whole

COMPARED = (0.5, 1.0, 2.0)  # times the best interval
NOTHING = MeasuredSnapshots((), (), (), 0, 0.0)


def main(arguments: list[str]) -> int:
    """Print the option to give and what is lost with it; return the exit status. Raises InvalidInput."""
    parser = Parser(
        prog="jitckpt plan snapshots",
        description="Work out how often `jitckpt run --snapshot-every` should write all ranks' processes. "
        "What is not given is taken from the events of the jobs in DIR. Times are such as 4s, 90min, 24h.",
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR", help="the checkpoint directory of a job"
    )
    parser.add_argument("--pause", metavar="TIME", help="for which all ranks are held for a snapshot")
    parser.add_argument(
        "--between-failures", metavar="TIME", help="from one failure that goes back to a snapshot to the next"
    )
    parser.add_argument("--come-back", metavar="TIME", help="from a failure until all ranks go on")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parsed = parser.parse_args(arguments)
    given = {
        option: None if text is None else quantity(f"--{option}", text, SECONDS)
        for option, text in (
            ("pause", parsed.pause),
            ("between-failures", parsed.between_failures),
            ("come-back", parsed.come_back),
        )
    }
    found = NOTHING
    if parsed.directory is not None:
        try:
            events, damages = read_events(parsed.directory)
        except OSError as error:
            parser.error(f"{error.filename} can't be read: {error.strerror}")
        for damage in damages:
            print(f"jitckpt plan snapshots: {damage}", file=sys.stderr)
        found = measured(jobs(event for event in events if is_whole(event)))
    elif given["pause"] is None or given["between-failures"] is None:
        parser.error("name the checkpoint directory of a job, or give --pause and --between-failures")
    costs, grounds = _costs(found, given, parsed.directory)
    minutes = best_minutes(costs)
    shares = {
        minutes * factor: lost_share(costs, minutes * factor * MINUTE_SECONDS)
        for factor in COMPARED
        if factor >= 1 or minutes * factor * MINUTE_SECONDS >= costs.written
    }
    option = f"--snapshot-every {minutes:g}"
    if parsed.json:
        told = [{"minutes": each, "lost_share": share} for each, share in shares.items()]
        document = {"option": option, "intervals": told, "seconds": asdict(costs)}
        print(json.dumps(document | {"measured": asdict(found) if parsed.directory else None}, indent=1))
        return 0
    table = Table("--snapshot-every", "lost", "a day", title="Time lost by snapshots, and by failures")
    for column in table.columns:
        column.justify = "right"
    for each, share in shares.items():
        table.add_row(f"{each:g}", f"{share:.3%}", show_seconds(share * DAY_SECONDS))
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    show(console, table)
    for sentence in [*grounds, option]:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    return 0


def _costs(
    found: MeasuredSnapshots, given: dict[str, float | None], directory: Path | None
) -> tuple[SnapshotCosts, list[str]]:
    """Return what is reckoned with, and sentences that say whence. Raises InvalidInput if something lacks."""
    pause, between, come_back = (given[name] for name in ("pause", "between-failures", "come-back"))
    grounds = []
    if pause is None:
        if not found.pauses:
            raise InvalidInput(
                f"no snapshot was made according to {directory}/{FILE_NAME}: run the job with a "
                "--snapshot-every of a few minutes first, or give --pause"
            )
        pause = fmean(found.pauses)
        grounds.append(f"The pause: {show_seconds(pause)}, {_of(found.pauses, 'snapshot')}.")
    if between is None:
        if not found.failures:
            raise InvalidInput(
                f"nothing has failed in {show_seconds(found.seconds)} of {directory}, rehearsals left out: "
                "give --between-failures, such as 24h"
            )
        between = found.seconds / found.failures
        count = f"{found.failures} in {show_seconds(found.seconds)}"
        grounds.append(f"Between failures: {show_seconds(between)} ({count}).")
    if come_back is None and found.come_back:
        come_back = fmean(found.come_back)
        grounds.append(f"To come back: {show_seconds(come_back)}, {_of(found.come_back, 'failure')}.")
    elif come_back is None:
        grounds.append("The time to come back is not known, and not in the shares (--come-back).")
    written = max(found.written, default=0.0)
    costs = SnapshotCosts(pause, between, come_back or 0.0, written)
    if written and best_interval_seconds(costs) == written:
        grounds.append(
            f"Not more often, as a snapshot was on the disk only after {show_seconds(written)} at most, "
            "before which there is no other."
        )
    return costs, grounds


def _of(values: Sequence[float], what: str) -> str:
    return f"the mean of {len(values)} {what}s" if len(values) > 1 else f"of one {what}"
