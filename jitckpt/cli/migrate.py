"""`jitckpt migrate`: a running job goes on on other hosts, where launchers wait for it."""

import time
from pathlib import Path

from jitckpt.agent.migration import suspended_job, waiting
from jitckpt.agent.migration.shelf import of_hosts
from jitckpt.cli.parser import Parser, seconds
from jitckpt.cli.suspend import told
from jitckpt.errors import JitckptError
from jitckpt.wire.commands import Suspend

LOOK_SECONDS = 0.5
WITHIN_SECONDS = 600.0


class NotMigrated(JitckptError):
    """The job's directory can't be looked at; the text is a sentence."""


def main(arguments: list[str]) -> int:
    """Return 0 once the job goes on elsewhere, 1 if it runs on or is suspended. Raises JitckptError."""
    parser = Parser(
        prog="jitckpt migrate",
        description="Have a job go on on other hosts. On each of them `jitckpt resume DIR --wait` waits for "
        "it, with the same directory; then this suspends the job, whose launchers end, and sees it go on.",
    )
    parser.add_argument("job", type=Path, metavar="DIR", help="the job's checkpoint directory")
    parser.add_argument(
        "--to", metavar="HOST,...", help="names of hosts: the job stays unless they wait (default: any)"
    )
    parser.add_argument(
        "--within",
        type=seconds,
        metavar="SECONDS",
        default=WITHIN_SECONDS,
        help=f"how long it may take until all wait, and again until the job goes on (default "
        f"{WITHIN_SECONDS:g})",
    )
    parsed = parser.parse_args(arguments)
    directory = parsed.job.absolute()
    if not directory.is_dir():
        raise NotMigrated(f"There is no directory {directory}.")
    to = None if parsed.to is None else set(parsed.to.split(","))
    if lacking := _who_lacks(directory, to, parsed.within):
        print(f"The job runs on: {lacking}")
        return 1
    there = waiting.who(directory)
    status = told(directory, Suspend("", ends=True))
    if status == 0:
        status = _see_it_go_on(directory, there, parsed.within)
    return status


def _who_lacks(directory: Path, to: set[str] | None, within: float) -> str:
    """Wait until somebody waits for each host's part; return who lacks, as a sentence."""
    until = time.monotonic() + within
    while True:
        try:
            places = range(max(1, len(of_hosts(directory))))
            found = waiting.who(directory)
        except OSError as error:
            raise NotMigrated(f"{directory} can't be looked at: {error}") from error
        there = {place: host for place, host in found.items() if to is None or host in to}
        lacking = ", ".join(str(place) for place in places if place not in there)
        if not lacking:
            return ""
        if time.monotonic() > until:
            hosts = f" on {', '.join(sorted(to))}" if to else ""
            return (
                f"nobody waits{hosts} for the part of host {lacking}. Start `jitckpt resume {directory} "
                "--wait --node-rank N` there."
            )
        time.sleep(LOOK_SECONDS)


def _see_it_go_on(directory: Path, there: dict[int, str], within: float) -> int:
    until = time.monotonic() + within
    while suspended_job.found(directory):
        if time.monotonic() > until:
            print(
                f"It has not gone on within {within:g} s. It stays suspended: `jitckpt resume {directory}` "
                "on each host."
            )
            return 1
        time.sleep(LOOK_SECONDS)
    print(f"It goes on on {', '.join(there[place] for place in sorted(there))}.", flush=True)
    return 0
