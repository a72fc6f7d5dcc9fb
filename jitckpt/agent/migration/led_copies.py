"""On the first host: has all hosts' parts of a snapshot copied to others, and says whether one may be lost.

One snapshot after the other, the newest each time; the training goes on, and so do snapshots.
"""

import time
from collections.abc import Callable
from math import inf
from queue import SimpleQueue

from jitckpt.agent.migration.part_copier import PartCopier
from jitckpt.agent.proxies.control import LEADER
from jitckpt.console import show_size
from jitckpt.decisions.copied_snapshots import Copying
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.wire import agents

SPREAD = 4  # of the time between two snapshots, the part over which a copy may be spread


class LedCopies:
    """Of one start of the ranks. Whoever calls this is the supervisor's thread."""

    def __init__(
        self,
        copies: int,
        copier: PartCopier,
        hosts: Hosts,
        log: EventLog,
        say: Callable[[str], None],
        *,
        every: float,
    ) -> None:
        """copies: of each host's part. every: seconds from one snapshot to the next."""
        self._seconds = every / SPREAD if every < inf else 0.0
        self._copies, self._copier, self._hosts, self._log, self._say = copies, copier, hosts, log, say
        self._now: Copying | None = None
        self._begun = 0.0
        self._tried: Named | None = None  # the last that was copied, or could not be
        self._newest: Named | None = None  # of which all parts are on other hosts
        self._was_made: bool | None = None  # what was said last
        self._own: SimpleQueue[tuple[str, str, int]] = SimpleQueue()

    @property
    def is_under_way(self) -> bool:
        """Whether this host's own part is being copied, so that it is to be looked at."""
        return self._now is not None and LEADER in self._now.awaited

    def copy_newest(self) -> None:
        """Have the newest snapshot copied, unless it was, or another one is on its way."""
        newest = self._copier.shelf.newest
        if not self._copies or self._now is not None or newest is None:
            return
        named = (newest.step, newest.name)
        if named == self._tried:
            return
        self._now = Copying(named, frozenset(range(len(self._hosts.all))))
        self._tried, self._begun = named, time.monotonic()
        asked = agents.CopySnapshot(*named, self._copies, self._copier.shelf.images, self._seconds)
        self._hosts.broadcast(asked)
        self._copier.begin(asked, lambda why, size: self._own.put((named[1], why, size)))

    def look(self) -> None:
        """Hear whether this host's own part has its copies."""
        while not self._own.empty():
            self.hear(LEADER, agents.SnapshotCopied(*self._own.get()))

    def hear(self, host: int, said: agents.SnapshotCopied) -> None:
        """Take in what a host says of its part."""
        if self._now is None or self._now.named[1] != said.name:
            return
        why = said.why and f"of {self._hosts.name(host)}: {said.why}"
        self._now = self._now.heard(host, why, said.bytes)
        if self._now.is_over:
            over, self._now = self._now, None
            self._end(over)
            self.copy_newest()

    def tidy(self) -> None:
        """Older snapshots have gone."""
        self._copier.tidy()

    def forget(self) -> None:
        """No snapshot is of any use any more."""
        self._now = self._newest = None
        self._copier.forget()

    def _end(self, over: Copying) -> None:
        step, made, seconds = over.named[0], over.is_protected, time.monotonic() - self._begun
        self._hosts.broadcast(agents.SnapshotProtected(*over.named, made))
        self._copier.end(over.named, made=made)
        before, self._was_made = self._was_made, made
        if made:
            self._newest = over.named
            self._log.write(
                "snapshot_copied", step=step, copies=self._copies, bytes=over.bytes, seconds=seconds
            )
            if not before:
                others = "another host" if self._copies == 1 else f"{self._copies} other hosts"
                self._say(
                    f"each host's part of the snapshot after step {step} is on {others}, too "
                    f"({show_size(over.bytes)} sent in {seconds:.2f} s)."
                )
            return
        text = f"not all parts of the snapshot after step {step} have their copies: {'; '.join(over.lacking)}"
        newest = None if self._newest is None else self._newest[0]
        self._log.write("snapshot_not_copied", step=step, text=text, newest=newest)
        if before is not False:
            has = (
                "there is none" if newest is None else f"the newest that has all is that after step {newest}"
            )
            self._say(f"{text}. The training goes on; {has}.")
