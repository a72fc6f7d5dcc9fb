"""A host of one Slurm job that stands by for the training of another: for which run of it, and until when.

Such hosts are the tasks of a job array: Slurm starts one whenever a node is free.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jitckpt.clusters.slurm import SlurmStep, asked
from jitckpt.errors import HostsError, HostsMissing, NotNeeded

# fmt: off
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
    "ENDED",  # so long ago that Slurm has forgotten it
}
# fmt: on
STEP_SECONDS = 60.0  # that the training's step may begin after its job
END_SECONDS = 30.0  # that the training's job may end after its agents
LOOK_SECONDS = 10.0  # between two looks whether the training is still there


def step_of_training(job: str, hosts: int) -> SlurmStep:
    """Return the step of another job, as its agents have it; this host's number is beyond all of theirs.

    hosts: on how many it trains. Raises NotNeeded where that job has ended, HostsMissing where it does not
    run now or has no such step, HostsError if Slurm does not say it.
    """
    until = time.monotonic() + STEP_SECONDS
    while True:
        run = _run_of(job)
        for fields in _lines("show", "step", job):
            number = fields.get("StepId", "").rpartition(".")[2]
            # Those that are no trainings (batch, extern, a copy of data) have a name, or fewer nodes.
            if number.isdigit() and int(fields.get("Nodes", "0")) >= hosts:
                nodes = int(fields["Nodes"])
                return SlurmStep(job, number, run, nodes, nodes, fields["NodeList"])
        if time.monotonic() > until:
            raise HostsMissing(f"--spare-for {job}: that job has no step on {hosts} nodes or more.")
        time.sleep(1)


def check_wanted(step: SlurmStep) -> None:
    """Raise NotNeeded or HostsMissing if the training's job has ended, or runs anew, as far as is known.

    Else those that stand by for a job that was cancelled would go on with it, where they are enough.
    """
    try:
        run = _run_of(step.job)
    except (NotNeeded, HostsMissing):
        raise
    except HostsError:  # Slurm's controller may be away for a while
        return
    if run != step.run:
        raise HostsMissing(f"Job {step.job} has been started anew by Slurm.")


def wait_for_end(step: SlurmStep) -> None:
    """Wait until Slurm says what has become of the training's job, whose agents have ended.

    Raises NotNeeded where it has ended, HostsMissing where it may run again, as far as is known.
    """
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        check_wanted(step)
        time.sleep(1)
    raise HostsMissing(f"The agents of job {step.job} have ended, and it runs on.")


@contextmanager
def until_over(step: SlurmStep, end: Callable[[str], None]) -> Iterator[None]:
    """While in here call `end`, once, with a sentence, if the training's job has ended, or runs anew.

    Not at once: those that stand by mostly hear that it has ended where they meet.
    """
    left = threading.Event()

    def look() -> None:
        seen = 0
        while not left.wait(LOOK_SECONDS):
            try:
                check_wanted(step)
                seen = 0
            except (NotNeeded, HostsMissing) as over:
                seen += 1
                if seen == 2:
                    end(str(over))
                    return

    watch = threading.Thread(target=look, name="jitckpt-spare-for", daemon=True)
    watch.start()
    try:
        yield
    finally:
        left.set()


def _run_of(job: str) -> str:
    """Return how often the job was queued again. Raises NotNeeded, HostsMissing if it does not run now."""
    try:
        fields = next(_lines("show", "job", job), {})
    except HostsError as error:
        if "Invalid job id" not in str(error):
            raise
        fields = {"JobState": "ENDED"}
    state = fields.get("JobState", "unknown")
    if state in ENDED:
        raise NotNeeded(f"Job {job} has ended ({state}); no host has to stand by for it.")
    if state != "RUNNING":
        raise HostsMissing(f"Job {job} does not run now ({state}); a host may stand by for it when it does.")
    return fields.get("Restarts", "0")


def _lines(*what: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each line of Slurm's answer."""
    for line in asked("-o", *what).splitlines():
        yield dict(field.partition("=")[::2] for field in line.split())
