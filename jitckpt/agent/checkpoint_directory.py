"""The job's checkpoint directory, as this host sees it: whose it is, which starts and saves it knows of."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from jitckpt.agent import object_copies
from jitckpt.agent.object_copies import WantedObjects
from jitckpt.console import say, show_size
from jitckpt.errors import CheckpointError, HostsError, JitckptError, SaveError
from jitckpt.events import EventLog
from jitckpt.hosts import fetch
from jitckpt.hosts.connections import Hosts
from jitckpt.saves import folders, starts
from jitckpt.saves.starts import Start
from jitckpt.system.disk_thread import waited_for
from jitckpt.wire.hosts import Host


class CheckpointDirectory:
    """For the agent's main thread."""

    def __init__(
        self,
        log: EventLog,
        given: Path | None,
        objects: WantedObjects | None,
        own_start: Callable[[], Start],
    ) -> None:
        """given: by the command; else the ranks tell where it is. objects: where it is copied to.

        own_start: returns the start that this agent has a part in, as far as something numbers it.
        """
        self._log, self._given, self._objects, self._own_start = log, given, objects, own_start

    @property
    def path(self) -> Path | None:
        """The directory, as far as it is known."""
        registered = (event["checkpoint_dir"] for event in self._log.events if event["event"] == "registered")
        found = self._given or next(registered, "")
        return Path(found) if found else None

    @property
    def text(self) -> str:
        """The same for others; "" where it is not known."""
        return str(self.path or "")

    def newest_saved(self) -> int:
        """Return the newest step of which this agent knows a save, 0 for none."""
        return max((event["step"] for event in self._log.events if event["event"] == "saved"), default=0)

    def job(self) -> str:
        """Return whose it is; "" if nobody has used it, or it can't be read."""
        return "" if self.path is None else job_of(self.path)

    def starts_known(self) -> tuple[tuple[int, int], ...]:
        """Return the starts that it knows, each with the step that it has gone on from."""
        return () if self.path is None else tuple(sorted(starts.read(self.path).went_on_from.items()))

    def newest_start_known(self) -> int:
        """Return the newest start that it knows of, or where it is new the object store."""
        newest = 0 if self.path is None else starts.read(self.path).newest
        if newest == 0 and self._objects is not None:
            newest = waited_for(partial(object_copies.newest_start, self._objects))
        return newest

    def note_start(self, path: Path | None, met: Sequence[Host] = ()) -> None:
        """Fence off those of earlier starts. Where the directory is not known yet, the ranks do it.

        path: also one that another host has told. Raises HostsError.
        """
        start = self._own_start()
        self._log.start = start.number
        if path is None or start.number == 0:
            return
        try:
            starts.note_of_others(path, (one for host in met for one in host.starts))
            starts.note_begun(path, start)
        except (OSError, SaveError) as error:
            raise HostsError(f"Start {start.number} can't begin: {error}") from error

    def fetch(self, path: Path, met: Hosts) -> None:
        """Have it be this job's, also where it is new, and get the saves that only other hosts have."""
        job = next((host.job for host in met.all if host.job), "")
        try:
            if job:
                folders.open_directory(path, job)
        except (CheckpointError, OSError) as error:
            say(f"{path} can't be used yet: {error}")  # the ranks say so, too, and end if it stays so
        try:
            fetched = waited_for(partial(fetch.fetch, met, path, self._log.start))
        except (JitckptError, OSError) as error:
            # If a host is gone, that is noticed; ranks that would not go on from one step refuse to.
            say(f"{met.name(met.index)} could not fetch from the others what it lacks: {error}")
            return
        if fetched is not None:
            self._log.write("fetched", **asdict(fetched))
            size = show_size(fetched.bytes)
            say(
                f"{met.name(met.index)} has fetched step {fetched.step} from the others, in {fetched.saves} "
                f"save{'s' if fetched.saves > 1 else ''}: {size} in {fetched.seconds:.2f} s."
            )


def job_of(directory: Path) -> str:
    """Return whose a checkpoint directory is; "" if nobody has used it, or it can't be read."""
    try:
        return folders.read_job(directory) or ""
    except (CheckpointError, OSError):
        return ""  # the ranks say what is wrong with it
