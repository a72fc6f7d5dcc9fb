"""Memory in which the ranks' device servers tell each other which optimizer steps they are ready for.

The agent makes it, and the servers map it: it outlives each of them. See native/proxy/transport/together.h.
With one host only the servers write there; with several, their agents tell each other what all of theirs
have come to.
"""

import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace

from jitckpt._step_barrier import MAGIC, STEP_BITS, Memory
from jitckpt.decisions.step_tree import TreePlace
from jitckpt.hosts.connections import Hosts
from jitckpt.wire import agents
from jitckpt.wire.agents import Come
from jitckpt.wire.hosts import Host
from jitckpt.wire.moves import Steps

HEAD_BYTES = 4096
RANK_BYTES = 64
LONGEST_WAIT = 1000  # milliseconds


class StepBarrier:
    """Of one start of this host's ranks. file, path: of the memory, while this object lives."""

    def __init__(self, ranks: int, hosts: int = 1) -> None:
        self.file = os.memfd_create("jitckpt-steps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, HEAD_BYTES + ranks * RANK_BYTES)
        os.pwrite(self.file, struct.pack("<QQQ", MAGIC, ranks, hosts), 0)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def content(self) -> bytes:
        """What is in it."""
        return os.pread(self.file, os.fstat(self.file).st_size, 0)

    def fill(self, content: bytes) -> None:
        """Go on with what was in another host's, before anybody has mapped this one."""
        os.pwrite(self.file, content, 0)

    def of(self, local_rank: int) -> str:
        """Return what environment.PROXY_TOGETHER is for one of this host's ranks."""
        return f"{self.path}#{local_rank}"

    def close(self) -> None:
        """Who has it mapped keeps it."""
        os.close(self.file)


class Messenger:
    """Tells the other hosts what this one's ranks have come to, and these what all have."""

    def __init__(self, barrier: StepBarrier, hosts: Hosts, known: TreePlace | None = None) -> None:
        """known: what the host has known in whose place this one is."""
        self._memory = Memory(barrier.path)
        self._hosts = hosts
        self._lock = threading.Lock()
        self._place = known or TreePlace(hosts.index, len(hosts.all), STEP_BITS)
        self._ends = False
        self._thread = threading.Thread(target=self._watch, name="jitckpt-steps", daemon=True)
        self._thread.start()

    def hear(self, host: int, said: agents.StepsCome) -> None:
        """Take in what another agent says. Raises KeyError if that has nothing to say here."""
        with self._lock:
            self._take(*self._place.hear(host, said.come))

    @property
    def known(self) -> TreePlace:
        """What this host knows; nothing more is said of its own ranks' memory from here on."""
        if self._thread.is_alive():
            self.close()
        return self._place

    def ranks_are_at(self, host: int) -> None:
        """This host's own ranks go on on that one, which says from here on what they have come to."""
        with self._lock:
            self._place = replace(self._place, ranks_at=host)

    def close(self) -> None:
        """Say nothing more."""
        self._ends = True
        self._memory.notify()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends:
            seen = self._memory.happenings()
            with self._lock:
                self._take(*self._place.here(Come(*self._memory.here())))
            self._memory.wait(seen, LONGEST_WAIT)

    def _take(self, place: TreePlace, said: Iterable[tuple[int, Come]]) -> None:
        before, self._place = self._place, place
        for host, come in said:
            self._hosts.send(host, agents.StepsCome(come))
        if place.everywhere != before.everywhere:
            self._memory.everywhere(*astuple(place.everywhere))


def told_of(place: TreePlace) -> Steps:
    """Return what is told to the host that comes in this one's place."""
    return Steps(place.own, place.told, place.everywhere, [*place.below.items()])


def told_of_ranks(place: TreePlace) -> Steps:
    """Return what is told to the host on which this one's own ranks go on, while this one stays."""
    return Steps(place.own, place.own, place.everywhere, [])


def known_again(host: int, hosts: Sequence[Host], steps: Steps) -> TreePlace:
    """Return what a host has told of that this one is in the place of, or has the ranks of."""
    ranks_of = hosts[host].ranks_of
    return TreePlace(
        host,
        sum(one.ranks_of < 0 for one in hosts),
        STEP_BITS,
        steps.own,
        dict(steps.below),
        steps.told,
        steps.everywhere,
        ranks_of=None if ranks_of < 0 else ranks_of,
    )
