"""Parts of copies that no host has room for as a whole: who is to have them, found together, and sent there.

The first host asks all for how much they have room, and how much they have to send, decides
(decisions/spreading.py), and tells all. That is done anew when another copy has no place, and when a host has
needed its memory itself.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from jitckpt.agent.spare_memory import SpareMemory
from jitckpt.console import say, show_size
from jitckpt.decisions import spreading
from jitckpt.decisions.sources import listed
from jitckpt.decisions.spreading import Spread
from jitckpt.events import EventLog
from jitckpt.tiers import parts, shard
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.tiers.tier import Shard
from jitckpt.wire import agents
from jitckpt.wire.agents import SentPart

BESIDE = 4 << 10  # bytes that a part's index has beside the shard's, and its own checksums
PLAN_SECONDS = 2.0  # that a sender waits for the others


class Spreading:
    """For one start of the workers. Told of everything by one thread; others send."""

    def __init__(
        self,
        spare: SpareMemory,
        hosts: Collection[int],
        log: EventLog,
        tell: Callable[[agents.OfSpreading], None],
        publish: Callable[[agents.OfSpreading], None],
    ) -> None:
        """tell: the first host. publish: tells all, from there."""
        self._spare, self._hosts, self._log = spare, frozenset(hosts), log
        self._tell, self._publish = tell, publish
        self._needs: dict[int, int] = {}  # bytes of each rank of this host
        self._indexes: dict[int, int] = {}  # what a part of each has beside its chunks
        self._rates: dict[int, float] = {}  # bytes per second to other hosts, the fastest that was seen
        self._parts: dict[int, list[SentPart]] = {}  # by rank, as was decided
        self._lacking: frozenset[int] = frozenset()
        self._decided = threading.Condition()
        self._number = 0  # at the first host: of the newest question
        self._rooms: dict[int, spreading.HostRoom] = {}  # at the first host: the answers to it
        self._asks = self._asks_again = False
        self._said = ""

    def measured(self, host: int, size: int, seconds: float) -> None:
        """So many bytes went to a host in so many seconds, with nothing that slowed them down."""
        if size >= shard.CHUNK and seconds > 0:  # of less it says how long an answer takes
            self._rates[host] = max(self._rates.get(host, 0.0), size / seconds)

    def parts_of(self, rank: int, of: Shard) -> list[SentPart]:
        """Return where parts of a shard of this length go, as was decided; none if that was not."""
        with self._decided:
            found = self._parts.get(rank, [])
        chunks = shard.chunks_in(of.seal.data_bytes)
        return found if sum(part.count for part in found) == chunks else []

    def wanted_parts(self, rank: int, of: Shard) -> list[SentPart]:
        """Have it decided where parts of a shard go; return that, or none if there is no room."""
        with self._decided:
            if rank in self._lacking and self._needs.get(rank) == of.seal.data_bytes:
                return []  # until somebody has more room
            self._needs[rank] = of.seal.data_bytes
            self._indexes[rank] = 3 * of.seal.index_bytes + BESIDE
            self._parts.pop(rank, None)
            self._lacking -= {rank}
        self._tell(agents.NoRoom())
        with self._decided:
            self._decided.wait_for(lambda: rank in self._parts or rank in self._lacking, PLAN_SECONDS)
        return self.parts_of(rank, of)

    def send(
        self,
        found: Sequence[SentPart],
        one: Shard,
        peer_of: Callable[[int], PeerParts],
        *,
        is_measured: bool,
    ) -> list[int]:
        """Send parts to where they belong, all at once; return the hosts. Raises SaveError or LinkError.

        is_measured: nothing slows them down.
        """
        known = set(self._rates)

        def put(part: SentPart) -> None:
            piece = parts.part_of(one, part.first, part.count)
            begun = time.monotonic()
            peer_of(part.host).put_part(piece, in_directory=part.in_directory)
            if is_measured and not part.in_directory:
                self.measured(part.host, piece.seal.size, time.monotonic() - begun)

        with ThreadPoolExecutor(len(found), "jitckpt-memory-parts") as pool:
            list(pool.map(put, found))
        if set(self._rates) - known:
            self._tell(agents.NoRoom())  # by what is known now it may be done sooner
        return sorted({part.host for part in found})

    def failed(self, rank: int) -> None:
        """A part of a rank's state did not get where it belongs: the next step finds another way."""
        with self._decided:
            self._parts.pop(rank, None)

    def hear(self, host: int, said: agents.OfSpreading) -> None:
        """Take in what another host says, or this one."""
        match said:
            case agents.NoRoom() | agents.GivenBack():
                self._ask()
            case agents.WantRoom(number):
                self._tell(self._room(number))
            case agents.Room(number) if number == self._number:
                self._rooms[host] = spreading.HostRoom(
                    {int(rank): size for rank, size in said.needs.items()},
                    said.memory,
                    said.directory,
                    said.beside,
                    {int(to): rate for to, rate in said.rates.items()},
                    said.into_directory,
                )
                if self._rooms.keys() >= self._hosts:
                    self._decide()
            case agents.SpreadOut():
                with self._decided:
                    self._parts = {}
                    for part in said.parts:
                        self._parts.setdefault(part.rank, []).append(part)
                    self._lacking = frozenset(said.lacking)
                    self._decided.notify_all()
                self._tell_user(said)

    def _room(self, number: int) -> agents.Room:
        memory, directory = self._spare.room
        with self._decided:
            needs = {str(rank): size for rank, size in self._needs.items()}
            beside = sum(self._indexes.values())
        rates = {str(to): rate for to, rate in dict(self._rates).items()}
        return agents.Room(number, needs, memory, directory, beside, rates, self._spare.into_directory)

    def _ask(self) -> None:
        self._asks_again = self._asks
        if self._asks:
            return  # once that is decided
        self._asks = True
        self._number += 1
        self._rooms = {}
        self._publish(agents.WantRoom(self._number))

    def _decide(self) -> None:
        found: Spread = spreading.spread(self._rooms, shard.CHUNK)
        known = any(one.rates for one in self._rooms.values())
        seconds = found.seconds if known else 0.0
        self._publish(agents.SpreadOut(list(found.parts), seconds, list(found.lacking)))
        self._asks = False
        if self._asks_again:
            self._ask()

    def _tell_user(self, said: agents.SpreadOut) -> None:
        if not self._log.leading:
            return
        self._log.write(
            "memory_spread",
            parts=[
                {"rank": one.rank, "host": one.host, "in_directory": one.in_directory, "chunks": one.count}
                for one in said.parts
            ],
            lacking=said.lacking,
            seconds=said.seconds,
        )
        text = in_words(said.parts, said.seconds, said.lacking)
        if text != self._said:
            self._said = text
            say(f"memory tier: {text}.")


def in_words(found: Sequence[SentPart], seconds: float, lacking: Sequence[int]) -> str:
    """Return a sentence without its full stop."""
    texts = []
    if found:
        places = []
        for in_directory, what in ((False, "spare memory"), (True, "directories")):
            some = [one for one in found if one.in_directory == in_directory]
            if some:
                size = show_size(sum(one.count for one in some) * shard.CHUNK)
                count = len({one.host for one in some})
                places.append(f"{size} to {what} of {count} host{'s' if count > 1 else ''}")
        ranks = listed(sorted({one.rank for one in found}))
        took = f", in about {seconds:.2g} s by what the links have carried" if seconds else ""
        texts.append(
            f"no host has room for the whole state of {ranks}: it goes in parts, {' and '.join(places)}{took}"
        )
    if lacking:
        texts.append(
            f"for a copy of the state of {listed(lacking)} there is no room in all hosts together (more "
            "--memory-limit, or --memory-spill DIR)"
        )
    return "; ".join(texts)
