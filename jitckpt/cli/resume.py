"""`jitckpt resume`: a suspended job goes on where it was."""

import os
import sys
import time
from pathlib import Path

from jitckpt.agent.migration import suspended_job, waiting
from jitckpt.agent.migration.shelf import of_hosts
from jitckpt.agent.migration.suspended_job import SuspendedJob
from jitckpt.cli.parser import Parser
from jitckpt.cli.suspend import told
from jitckpt.clusters import slurm
from jitckpt.console import say
from jitckpt.errors import JitckptError
from jitckpt.wire.commands import ResumeJob

LOOK_SECONDS = 0.5  # between two looks whether the job is suspended


class NotResumed(JitckptError):
    """There is nothing that could go on here; the text is a sentence."""


def main(arguments: list[str]) -> int:
    """Have the job go on; return 0 once all ranks run, 1 if they don't. Raises JitckptError.

    Where its launchers have ended, another one takes the place of this process.
    """
    parser = _parser()
    parsed, changed = parser.parse_known_args(arguments)
    directory = parsed.job.absolute()
    if parsed.wait:
        directory.mkdir(parents=True, exist_ok=True)
        with waiting.seen(directory, parsed.node_rank or 0):
            while (job := _own(directory, parsed.node_rank)) is None:
                if parsed.node_rank is None and len(suspended_job.found(directory)) > 1:
                    raise NotResumed(_which(directory, None))
                time.sleep(LOOK_SECONDS)
                waiting.note(directory, parsed.node_rank or 0)
    elif (job := _own(directory, parsed.node_rank)) is None:
        if parsed.node_rank is None and not suspended_job.found(directory):
            return told(parsed.job, ResumeJob())
        raise NotResumed(_which(directory, parsed.node_rank))
    _launch(directory, job, [*_meeting(job, parsed.master_addr), *changed])
    return 1


def _parser() -> Parser:
    parser = Parser(
        prog="jitckpt resume",
        description="Have a job go on that `jitckpt suspend` or `jitckpt migrate` has suspended. Its "
        "devices have to be free. Of a job on several hosts each host's part goes on where this is called; "
        "options of `jitckpt run` may follow, in the place of those that the job was started with.",
    )
    parser.add_argument("job", type=Path, metavar="DIR", help="the job's checkpoint directory")
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="N",
        help="which host's part goes on here (default: the only one that is there)",
    )
    parser.add_argument(
        "--master-addr",
        metavar="HOST",
        help="where the host with --node-rank 0 is now (default: as before)",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait until the job is suspended (`jitckpt migrate`)"
    )
    return parser


def _own(directory: Path, place: int | None) -> SuspendedJob | None:
    """Return the part of a suspended job that goes on here; None if that is not there, or not known."""
    jobs = suspended_job.found(directory)
    if place is None and any(job.meets == "slurm" for job in jobs.values()):
        place = slurm.step_of(os.environ).node
    if place is None and len(jobs) == 1 and len(of_hosts(directory)) < 2:
        (place,) = jobs
    return None if place is None else jobs.get(place)


def _which(directory: Path, place: int | None) -> str:
    there = ", ".join(str(one) for one in sorted(suspended_job.found(directory)))
    if place is None:
        return f"The parts of hosts {there} are in {directory}: say which goes on here, with --node-rank."
    return f"There is no part of host {place} of a suspended job in {directory}" + (
        f", only of {there}." if there else "."
    )


def _launch(directory: Path, job: SuspendedJob, changed: list[str]) -> None:
    """Have `jitckpt run` take the place of this process. Raises NotResumed."""
    options = [*job.options, *changed, "--from-snapshot"]
    options += ["--checkpoint-dir", str(directory)]
    try:
        os.chdir(job.folder)
    except OSError as error:
        raise NotResumed(f"The job was started in {job.folder}, which is needed here: {error}") from error
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # how this program is called
    command = [sys.executable, *before, "run", *options, *job.script]
    say(f"goes on with the part of host {job.place} of the job that was suspended after step {job.step}.")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _meeting(job: SuspendedJob, master: str | None) -> list[str]:
    """Return options by which a host of several has its place again. master: where the first one is now."""
    place = ["--node-rank", str(job.place)]
    if job.meets == "etcd":
        if master is not None:
            raise NotResumed("The job's hosts meet at etcd, wherever they are: leave --master-addr out.")
        return place
    if master is not None:
        return [*place, "--rdzv-backend", "static", "--rdzv-endpoint", "", "--master-addr", master]
    if job.meets == "c10d":
        raise NotResumed(
            "The job's hosts have met at --rdzv-endpoint: say where the host with --node-rank 0 is, with "
            "--master-addr."
        )
    return place if job.meets == "place" else []
