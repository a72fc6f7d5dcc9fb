"""What a launcher has of its job's snapshots of processes, over all starts of the ranks."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jitckpt.agent.migration import going_back, suspended_job
from jitckpt.agent.migration.all_made_again import AllMadeAgain
from jitckpt.agent.migration.going_back import MadeAgain, NotMadeAgain
from jitckpt.agent.migration.shelf import HOST, ProcessSnapshot, Shelf, left, of_hosts
from jitckpt.bindings.criu import Criu
from jitckpt.console import say
from jitckpt.decisions import whole_snapshots
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.errors import CheckpointError, HostsError
from jitckpt.events import EventLog

Place = tuple[int, int]  # a host's number, and of how many
ALONE: Place = (0, 1)


def place_in(directory: Path) -> int | None:
    """Return which host this is, if there are snapshots of one alone: its own, as nobody shares it."""
    hosts = [one for one in of_hosts(directory) if left(one)]
    return int(hosts[0].name.removeprefix(HOST)) if len(hosts) == 1 else None


class KeptSnapshots:
    """shelf: where they are; of several hosts each has its own, once it has a place among them."""

    def __init__(
        self,
        directory: Path,
        found: Criu,
        log: EventLog,
        *,
        hold: Callable[[Path], str | None],
        whose: Callable[[Place], Mapping[str, Any]],
        needed: bool = False,
    ) -> None:
        """hold: takes a folder for this launcher (saves/directory_lock.py).

        whose: of what those are that the job goes on from, if this host has that place. needed: the job does
        not begin anew.
        """
        self._directory, self._criu, self._log = directory, found, log
        self._hold_folder, self._whose, self._needed = hold, whose, needed
        self.mark = ""  # by which all processes of the job are found
        self.shelf: Shelf | None = None

    def take_place(self, place: Place) -> None:
        """Have those of the host that has this place, and wait for one that is on its way.

        Raises HostsError.
        """
        folder, number = self._directory, f"{HOST}{place[0]}"
        if place != ALONE:
            folder /= number
        if self.shelf is None or self.shelf.directory != folder:
            if place != ALONE:
                self._hold(folder)
            self.shelf = Shelf(folder, self._whose(place), several="" if place == ALONE else self.mark)
            self.mark = self.shelf.mark
            self._say_what_lies_there(self.shelf, number)
        self.shelf.settle()

    def _hold(self, folder: Path) -> None:
        """Take a host's folder for this launcher. Raises HostsError."""
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            if (unlocked := self._hold_folder(folder)) is not None:
                say(unlocked)
        except (CheckpointError, OSError) as error:
            raise HostsError(f"This host's snapshots can't be in {folder}: {error}") from error

    def _say_what_lies_there(self, shelf: Shelf, number: str) -> None:
        """Say what of it is not gone on from, and where others' are if there is nothing."""
        for snapshot, sentence in shelf.refused:
            self._log.write("snapshot_refused", step=snapshot.step, text=sentence)
            say(f"the snapshot after step {snapshot.step} in {snapshot.path} is not gone on from: {sentence}")
        others = [one.name for one in of_hosts(self._directory) if left(one) and one != shelf.directory]
        if others and not shelf.named and not shelf.refused:
            say(
                f"there are snapshots of {', '.join(others)} in {self._directory}, and none of {number}, "
                "which this host is now. With --node-rank on every launcher each host gets the place that it "
                "had."
            )

    @property
    def named(self) -> tuple[Named, ...]:
        """Those that are whole here, each with its step and its name."""
        return () if self.shelf is None else tuple(self.shelf.named)

    def agree(self, hosts: Sequence[Sequence[Named]]) -> None:
        """Find which all hosts have: to the newest of them the job can go back. hosts: what each has."""
        assert self.shelf is not None
        common = whole_snapshots.common(hosts)
        self.shelf.agree_on(common)
        if not common and any(hosts):
            text = "not all hosts have the same snapshot"
            self._log.write("not_gone_back", step=0, text=text)
            if self._log.leading:
                say(f"{text}." if self._needed else f"the job begins anew: {text}.")

    def go_back(
        self,
        store: tuple[str, int],
        fired: Sequence[str],
        *,
        is_first: bool,
        together: AllMadeAgain | None,
    ) -> MadeAgain | None:
        """Make all ranks again from the newest one, if there is any, before another start.

        store: a new one, for their job. fired: rehearsed failures that have happened by now. is_first: this
        launcher has started no ranks yet. together: with the other hosts. Raises HostsError if there is none
        and the job does not begin anew.
        """
        shelf = self.shelf
        if shelf is None:
            return None
        shelf.settle()
        while (snapshot := shelf.newest) is not None:
            again, why = None, ""
            try:
                hosts = 1 if together is None else together.hosts
                again = going_back.made_again(self._criu, snapshot, store, fired, mark=self.mark, hosts=hosts)
            except NotMadeAgain as error:
                why = str(error)
            if together is not None:
                why = together.why_not(snapshot.name, why)
            if not why:
                if is_first and again is not None and self._log.leading:
                    made = datetime.fromtimestamp(again.plan["made"]).isoformat(sep=" ", timespec="seconds")
                    say(f"goes on from the snapshot of step {snapshot.step}, made at {made}.")
                self._begin(shelf)
                return again
            if again is not None:
                again.undo()
            self._pass_over(shelf, snapshot, why)
        if is_first and self._needed:
            raise HostsError(
                f"There is no snapshot in {shelf.directory} that the job can go on from, so it does not "
                "begin (--from-snapshot)."
            )
        self._begin(shelf)
        return None

    def _begin(self, shelf: Shelf) -> None:
        """The ranks start: the job is not suspended any more."""
        self._needed = False
        with contextlib.suppress(OSError):
            suspended_job.forget(shelf.directory)

    def _pass_over(self, shelf: Shelf, snapshot: ProcessSnapshot, why: str) -> None:
        self._log.write("not_gone_back", step=snapshot.step, text=why)
        shelf.pass_over(snapshot)
        older = shelf.newest
        last = "There is no other." if self._needed else "The job begins anew."
        then = last if older is None else f"That after step {older.step} is tried."
        if self._log.leading:
            say(f"the snapshot after step {snapshot.step} is of no use: {why} {then}")

    def close(self, *, succeeded: bool, suspended: bool = False) -> None:
        """The job has ended, or goes on without this host. Unless it has succeeded, all of them stay."""
        if self.shelf is None:
            return
        self.shelf.settle()
        if succeeded:
            self.shelf.forget()
        elif (newest := self.shelf.newest) is not None and suspended:
            say(
                f"the job is suspended after step {newest.step}: `jitckpt resume {self._directory}`, or the "
                "same command, has it go on; on several hosts, on each."
            )
        elif newest is not None:
            say(f"the snapshot after step {newest.step} stays: the same command goes on from it.")
