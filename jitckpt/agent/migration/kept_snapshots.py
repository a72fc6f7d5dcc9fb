"""What a launcher has of its job's snapshots of processes, over all starts of the ranks."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jitckpt.agent.migration import going_back, lost_job, suspended_job
from jitckpt.agent.migration.all_made_again import AllMadeAgain
from jitckpt.agent.migration.going_back import MadeAgain, NotMadeAgain
from jitckpt.agent.migration.held_copies import VISIT, HeldCopies
from jitckpt.agent.migration.part_copier import fetch
from jitckpt.agent.migration.shelf import (
    HOST,
    UNFINISHED,
    DamagedSnapshot,
    ProcessSnapshot,
    Shelf,
    left,
    of_hosts,
)
from jitckpt.bindings.criu import Criu
from jitckpt.console import say, show_size
from jitckpt.decisions import copied_snapshots, whole_snapshots
from jitckpt.decisions.copied_snapshots import Copied
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.errors import CheckpointError, HostBeginsAgain, HostsError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError

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
        copies: int = 0,
    ) -> None:
        """hold: takes a folder for this launcher (saves/directory_lock.py).

        whose: of what those are that the job goes on from, if this host has that place. needed: the job does
        not begin anew. copies: that other hosts get of each host's part.
        """
        self.copies = copies
        self._directory, self._criu, self._log = directory, found, log
        self._hold_folder, self._whose, self._needed = hold, whose, needed
        self.mark = ""  # by which all processes of the job are found
        self.shelf: Shelf | None = None
        self.held: HeldCopies | None = None  # of other hosts' parts
        self._holders: Mapping[Named, Sequence[int]] = {}  # who has copies of this host's

    def take_place(self, place: Place) -> None:
        """Have those of the host that has this place, and wait for one that is on its way.

        Raises HostsError.
        """
        folder, number = self._directory, f"{HOST}{place[0]}"
        if place != ALONE:
            folder /= number
            self.held = self.held or HeldCopies(self._directory)
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

    @property
    def copied(self) -> tuple[Copied, ...]:
        """Of which this host has copies of other hosts' parts."""
        return () if self.held is None else self.held.held

    @property
    def room(self) -> int:
        """How many MiB there are for snapshots and copies, with those that are there; 0: it is not known."""
        if self.shelf is None or self.held is None:
            return 0
        try:
            return max(1, (self.shelf.free + self.shelf.bytes_on_disk + self.held.bytes_on_disk) >> 20)
        except OSError:  # something of it goes just now
            return 0

    def serve(self, hosts: Hosts) -> None:
        """Take copies from other hosts, and give them."""
        if self.held is not None and (shelf := self.shelf) is not None:
            hosts.answers[VISIT] = partial(self.held.serve, lambda: shelf.images)

    def agree(
        self, hosts: Sequence[Sequence[Named]], copies: Sequence[Sequence[Copied]] = (), place: int = 0
    ) -> None:
        """Find of which all parts are to be had: to the newest of them the job can go back.

        hosts, copies: what each has, of its own part and of others'. place: this host's.
        """
        assert self.shelf is not None
        copies = copies or [()] * len(hosts)
        there = copied_snapshots.to_be_had(hosts, copies)
        common = whole_snapshots.common(there)
        self._holders = {named: copied_snapshots.having(copies, place, named) for named in common}
        self.shelf.agree_on(
            common,
            {named: who for named, who in self._holders.items() if named not in hosts[place]},
            copied_snapshots.protected(hosts, copies, min(max(self.copies, 1), len(hosts) - 1)),
        )
        if not common and any(there):
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
                again = self._made_again(shelf, snapshot, store, fired, together)
            except NotMadeAgain as error:
                why = str(error)
            snapshot = shelf.newest or snapshot  # it may have come from another host
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

    def _made_again(
        self,
        shelf: Shelf,
        snapshot: ProcessSnapshot,
        store: tuple[str, int],
        fired: Sequence[str],
        together: AllMadeAgain | None,
    ) -> MadeAgain:
        """Make this host's ranks again, from a copy where its own part is lost or damaged.

        Raises NotMadeAgain, or HostBeginsAgain if another launcher has to do it.
        """
        hosts = 1 if together is None else together.hosts
        if snapshot.holders and together is not None:
            snapshot = self._fetched(shelf, snapshot, snapshot.holders, shelf.directory, together)
            if os.getpid() != 1 and lost_job.where_to_count_from(self._directory) is not None:
                raise HostBeginsAgain(
                    "numbers that its processes have to have again are others' here: this host begins again."
                )
        try:
            return going_back.made_again(self._criu, snapshot, store, fired, mark=self.mark, hosts=hosts)
        except NotMadeAgain as error:
            holders = self._holders.get((snapshot.step, snapshot.name))
            if not isinstance(error.__cause__, DamagedSnapshot) or together is None or not holders:
                raise
            say(f"this host's part of the snapshot after step {snapshot.step} is damaged: {error}")
            shelf.forget_pages()
            # Beside its own, of which older snapshots may have what is not damaged.
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=shelf.directory) as folder:
                copy = self._fetched(shelf, snapshot, holders, Path(folder), together)
                return going_back.made_again(self._criu, copy, store, fired, mark=self.mark, hosts=hosts)

    def _fetched(
        self,
        shelf: Shelf,
        lost: ProcessSnapshot,
        holders: Sequence[int],
        folder: Path,
        together: AllMadeAgain,
    ) -> ProcessSnapshot:
        """Return this host's part, which comes from another host into a folder. Raises NotMadeAgain."""
        whys = []
        for holder in holders:
            name, begun = together.connected.name(holder), time.monotonic()
            try:
                one, size = together.run(fetch(together.connected, holder, folder, lost))
                if folder == shelf.directory:
                    shelf.take_in(lost, one)
            except (LinkError, DamagedSnapshot, OSError) as error:
                text = f"the copy of this host's part after step {lost.step} on {name} is of no use: {error}"
                self._log.write("warning", text=text)
                say(text)
                whys.append(f"{name}: {error}")
                continue
            seconds = time.monotonic() - begun
            self._log.write("snapshot_fetched", step=lost.step, host=holder, bytes=size, seconds=seconds)
            say(
                f"this host's part of the snapshot after step {lost.step} has come from {name}: "
                f"{show_size(size)} in {seconds:.2f} s."
            )
            return one
        raise NotMadeAgain(f"Its part could not be had from another host ({'; '.join(whys)}).")

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
            if self.held is not None:
                self.held.forget()
        elif (newest := self.shelf.newest) is not None and suspended:
            say(
                f"the job is suspended after step {newest.step}: `jitckpt resume {self._directory}`, or the "
                "same command, has it go on; on several hosts, on each."
            )
        elif newest is not None:
            say(f"the snapshot after step {newest.step} stays: the same command goes on from it.")
