"""What a host's launcher leaves in its folder when the job is suspended, for `jitckpt resume`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from jitckpt.agent.migration.shelf import of_hosts

FILE_NAME = "suspended.json"

# Nobody, by its place (--node-rank), by Slurm, at etcd, or in torch's rendezvous, which gives out the places.
Meets = Literal["nobody", "place", "slurm", "etcd", "c10d"]


@dataclass(frozen=True)
class SuspendedJob:
    """By which command a host goes on with its part. options, script: the arguments of `jitckpt run`.

    folder: where that was called. meets: how it meets the others. place: of this host, among so many. step:
    after which the job waits.
    """

    options: Sequence[str]
    script: Sequence[str]
    folder: str
    meets: Meets = "nobody"
    place: int = 0
    hosts: int = 1
    step: int = 0

    def leave(self, directory: Path, place: int, hosts: int, step: int) -> None:
        """Write it to a host's folder, as a whole or not at all. Raises OSError."""
        new = directory / f".{FILE_NAME}.new"
        new.touch(0o600)
        new.write_text(json.dumps(asdict(replace(self, place=place, hosts=hosts, step=step))))
        with open(new) as file:
            os.fsync(file.fileno())
        new.replace(directory / FILE_NAME)


def found(directory: Path) -> dict[int, SuspendedJob]:
    """Return what a suspended job has left in its directory, by the places of its hosts."""
    jobs = {}
    for folder in (directory, *of_hosts(directory)):
        try:
            job = SuspendedJob(**json.loads((folder / FILE_NAME).read_text()))
        except (OSError, ValueError, TypeError):
            continue
        jobs[job.place] = job
    return jobs


def forget(directory: Path) -> None:
    """A host's part of the job goes on. Raises OSError."""
    (directory / FILE_NAME).unlink(missing_ok=True)
