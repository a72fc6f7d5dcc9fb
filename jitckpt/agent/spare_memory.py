"""What this host keeps of states that no host has room for as a whole (COLLAB): parts, in memory or a folder.

The memory is lent: as soon as this host needs it, it is given back. All lasts over the starts of the workers.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jitckpt.decisions.sources import PartOfShard, Source
from jitckpt.errors import SaveError
from jitckpt.hosts.link import LinkError
from jitckpt.saves.starts import Starts
from jitckpt.tiers import chunks, host_memory, part_peers, part_store, peers
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.tiers.part_store import PartStore
from jitckpt.tiers.parts import HeldParts, ReadPart, put_together
from jitckpt.wire import visits
from jitckpt.wire.visits import HeldPart

# By these numbers the keeper knows them: ranks' memfds have the rank's, parities negative ones.
MEMORY_PARTS, DIRECTORY_PARTS = 1 << 24, 1 << 25
FREE_PART = 0.8  # of a directory's file system
PROBE = 16 << 20  # bytes that are written to see how fast that is


class SpareMemory:
    """Parts of other hosts' ranks, of which two steps may be here."""

    def __init__(
        self,
        memory: HostMemory,
        held: Mapping[int, int],
        directory: str,
        hold: Callable[[int], None],
        drop: Callable[[int], None],
    ) -> None:
        """memory: what this host has beside. held: all that the keeper has held. hold, drop: tell the keeper,
        by its numbers. Raises SaveError if the directory can't be used.
        """
        self._memory, self._hold, self._drop = memory, hold, drop
        self._directory = Path(directory) if directory else None
        kept = {key - MEMORY_PARTS: one for key, one in held.items() if MEMORY_PARTS <= key < DIRECTORY_PARTS}
        filed = {key - DIRECTORY_PARTS: one for key, one in held.items() if key >= DIRECTORY_PARTS}
        self._lent = PartStore(kept, host_memory.create, lambda: self._room_in_memory, "spare memory")
        self._files: PartStore | None = None
        self.into_directory = 0.0  # bytes per second, as measured
        if self._directory is not None:
            self.into_directory = speed_of(self._directory)
            make = partial(part_store.file_in, self._directory)
            self._files = PartStore(filed, make, lambda: self._room_in_directory, directory)
        else:
            for descriptor in filed.values():
                os.close(descriptor)
        self._given_back: list[int] = []
        self._lock = threading.Lock()
        memory.lend_at_most = self._lend_at_most

    @property
    def room(self) -> tuple[int, int]:
        """Return for how many bytes of a step there is room in memory, and in the directory."""
        return max(0, self._room_in_memory) // 2, max(0, self._room_in_directory) // 2

    @property
    def _room_in_memory(self) -> int:
        limit = self._memory.limit
        return 0 if limit is None else limit - self._memory.reserved()

    @property
    def _room_in_directory(self) -> int:
        if self._directory is None or self._files is None:
            return 0
        system = os.statvfs(self._directory)
        return int(FREE_PART * (system.f_bavail * system.f_frsize + self._files.taken()))

    def see_limit(self) -> None:
        """Give memory back that this host's ranks, and what is to be kept here as a whole, need by now."""
        if self._memory.limit is not None:
            self._lend_at_most(self._memory.limit - self._memory.taken())

    def _lend_at_most(self, size: int) -> None:
        given = self._lent.keep_within(max(0, size))
        for rank in given:
            self._drop(MEMORY_PARTS + rank)
        with self._lock:
            self._given_back += given

    def given_back(self) -> list[int]:
        """Return of which ranks parts were given up since this was asked last."""
        with self._lock:
            given, self._given_back = self._given_back, []
        return given

    @property
    def descriptors(self) -> dict[int, int]:
        """All descriptors as the keeper knows them."""
        found = {MEMORY_PARTS + rank: one for rank, one in self._lent.descriptors.items()}
        if self._files is not None:
            found |= {DIRECTORY_PARTS + rank: one for rank, one in self._files.descriptors.items()}
        return found

    def has(self) -> HeldParts:
        """Return what is in memory, and what in the directory."""
        return self._lent.has(), [] if self._files is None else self._files.has()

    async def answer(
        self,
        why_not: Callable[[int], str | None],
        request: visits.OfMemory,
        connection: peers.Connection,
    ) -> bool:
        """Do what a visit asks for (peers.More). why_not: says why nothing of a rank is taken in."""

        def arrived(rank: int, in_directory: bool) -> None:
            self._hold((DIRECTORY_PARTS if in_directory else MEMORY_PARTS) + rank)

        return await part_peers.answer((self._lent, self._files), why_not, arrived, request, connection)

    def bring(
        self, source: Source, timeline: str, own: int, peer_of: Callable[[int], PeerParts], into: HostMemory
    ) -> int:
        """Put a shard together in this host's memory; return its bytes. timeline: as the shards have it.

        own: this host. Raises PieceLost, or SaveError.
        """
        found = [part for part in source.made_of if isinstance(part, PartOfShard)]
        pieces = [self._piece(part, timeline, own, peer_of) for part in found]
        first = found[0]
        try:
            if first.host == own:
                store = self._store(first.in_directory)
                slot, seal, encoded = store.find(first.rank, first.step, timeline)
                of = part_store.of_part(encoded, seal)[1]
            else:
                slot, of = peer_of(first.host).part(
                    first.rank, first.step, timeline, in_directory=first.in_directory
                )
        except (SaveError, LinkError) as error:
            raise PieceLost(first, error) from error
        return put_together(slot, of, pieces, into)

    def _piece(
        self, part: PartOfShard, timeline: str, own: int, peer_of: Callable[[int], PeerParts]
    ) -> ReadPart:
        def read(window: Window, digests: Sequence[bytes]) -> None:
            place = (part.rank, part.step, timeline)
            if part.host != own:
                peer_of(part.host).part_into(*place, window, digests, in_directory=part.in_directory)
                return
            store = self._store(part.in_directory)
            slot, seal, _ = store.find(*place)
            for first, count in part_store.few(len(digests)):
                to = memoryview(window.part(first, count))
                data = store.read(part.rank, slot, first, count, seal.data_bytes)
                chunks.copy(data, digests[first : first + count], to)

        return ReadPart(part, range(part.first, part.first + part.count), read)

    def _store(self, in_directory: bool) -> PartStore:
        if in_directory and self._files is None:
            raise SaveError("This host has no directory for parts of states any more.")
        return self._files if in_directory and self._files is not None else self._lent

    def drop_parts(self, is_old: Callable[[HeldPart], bool]) -> None:
        """Give up the parts that are."""
        for base, store in ((MEMORY_PARTS, self._lent), (DIRECTORY_PARTS, self._files)):
            for rank in () if store is None else store.drop(is_old):
                self._drop(base + rank)

    def close(self) -> None:
        self._memory.lend_at_most = lambda size: None
        self._lent.close()
        if self._files is not None:
            self._files.close()


def speed_of(directory: Path) -> float:
    """Return how many bytes per second can be written there. Raises SaveError if none can."""
    descriptor = part_store.file_in(directory)
    try:
        begun = time.monotonic()
        host_memory.write(descriptor, os.urandom(PROBE), host_memory.data_place(0))
        os.fdatasync(descriptor)
        return PROBE / max(1e-6, time.monotonic() - begun)
    except OSError as error:
        raise SaveError(f"{directory} can't take parts of states: {error.strerror}.") from error
    finally:
        os.close(descriptor)


def as_parts(held: Mapping[int, HeldParts], ranks: int, known: Starts) -> list[PartOfShard]:
    """Return what hosts have, of a job with so many ranks and these starts, for the policy."""
    return [
        PartOfShard(
            *(
                one.rank,
                one.step,
                f"{one.job}/{one.timeline}",
                host,
                one.first,
                one.count,
                one.chunks,
                one.of,
            ),
            *(one.bytes, in_directory),
        )
        for host, of_host in held.items()
        for in_directory, some in ((False, of_host[0]), (True, of_host[1]))
        for one in some
        if one.rank < ranks == one.world_size and known.problem(one.start, one.step) is None
    ]
