"""A host's ranks leave it, of which each step may fail: they are here, or there, or count as killed."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_leaving import FACTS, HOSTS, RANK, SECRET

from jitckpt.agent.migration import leaving
from jitckpt.agent.migration.image_receiver import receive_files
from jitckpt.agent.migration.leaving import Departure
from jitckpt.agent.migration.move import Dumped
from jitckpt.bindings.criu import CriuError
from jitckpt.decisions.belongings import Carried
from jitckpt.decisions.recovery import Rank
from jitckpt.hosts import link, visiting
from jitckpt.hosts.connections import Arrived, HostLost
from jitckpt.hosts.standbys import Standby
from jitckpt.ring import local_state
from jitckpt.system import network_lock
from jitckpt.wire import agents
from jitckpt.wire.agents import Come, Ended, LastWords, Said, StepsCome
from jitckpt.wire.moves import DumpedRank, HandOver, Move, RanksRestored, Taken
from jitckpt.wire.visits import Refused

LAST_WORDS = b"what it has said last"
NOBODY = 1 << 30  # no process has such a number
ALL = [1, 2]  # the ranks of the host that is left
ORDERS = dict.fromkeys(ALL, b"an order")
NO_ROOM = "There is no room here."

Called = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class MadeUpMover:
    """Of two ranks, of which the first has just said something.

    fails: the rank that can't be dumped. restored: who was made again here. lost: who counts as killed.
    """

    relay = SimpleNamespace(name="relay", forget=lambda ends: None)

    def __init__(self) -> None:
        self.fails, self.ring = 0, local_state.create()
        self.restored: list[int] = []
        self.lost: list[int] = []
        self.agent, self._worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._worker.send(LAST_WORDS)

    def close(self) -> None:
        os.close(self.ring)
        self.agent.close()
        self._worker.close()

    def worker(self, rank: int) -> Any:
        return SimpleNamespace(
            ring_fd=self.ring, being_made_again=nullcontext, not_made_again=lambda: self.lost.append(rank)
        )

    def prepared(self, rank: int, folder: int, _: ExitStack, *, elsewhere: bool) -> Dumped:
        assert elsewhere
        return Dumped(rank, folder, Carried(), {})

    def sockets(self, rank: int) -> dict[str, socket.socket]:
        return {"agent": self.agent} if rank == ALL[0] else {}

    def dump_all(self, ready: list[Dumped]) -> list[Dumped | CriuError]:
        return [self._dump(one) for one in ready]

    def _dump(self, one: Dumped) -> Dumped | CriuError:
        for name, content in (("dump.log", b"CRIU run id = of-%d\n" % one.rank), ("core-7.img", b"core" * 9)):
            file = os.open(name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=one.folder)
            os.write(file, content)
            os.close(file)
        if one.rank == self.fails:
            return CriuError("It can't be dumped.")
        return replace(one, pids=[NOBODY + one.rank])

    def told_of(self, rank: int, *_: object, said: dict[str, list[bytes]], **others: object) -> DumpedRank:
        return replace(
            RANK, rank=rank, said={name: [one.hex() for one in all_] for name, all_ in said.items()}
        )

    def restore(self, dumped: list[Dumped]) -> dict[int, float]:
        self.restored += [one.rank for one in dumped]
        assert self.agent.recv(99, socket.MSG_DONTWAIT) == LAST_WORDS
        return {one.rank: 0.0 for one in dumped}


class MadeUpHosts:
    """Two, of which this one is left. answers: the other one says its last when this one tells it.

    stays: this one has said that it does.
    """

    index, secret, lost = 1, SECRET, frozenset[int]()
    all = (HOSTS[0], replace(HOSTS[1], ranks=tuple(ALL)))

    def __init__(self) -> None:
        self.answers, self.stays, self.has_turn = True, False, True
        self.told: list[int] = []  # the ports of those that come
        self.heard: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.start(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def take_turn(self, within: float) -> bool:
        return self.has_turn

    def hand_over(self, to: Any, within: float) -> bool:
        self.told.append(to.port)
        return self.answers

    def give_ranks(self, to: Any, within: float) -> bool:
        self.stays = True
        return self.hand_over(to, within)

    def take(self) -> list[Any]:
        heard, self.heard = self.heard, []
        return heard

    def give_back(self, taken: list[Any]) -> None:
        self.heard = [*taken, *self.heard]


class Leaving:
    """All that takes part. unlocked: the tables of CRIU's that were taken away."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mover, self.hosts = MadeUpMover(), MadeUpHosts()
        stack.callback(self.mover.close)
        stack.callback(self.hosts.close)
        self.unlocked: set[str] = set()
        monkeypatch.setattr(network_lock, "unlock", self.unlocked.update)
        self.said: list[str] = []
        self.came: list[str] = []  # what hosts that stand by have got
        self.standbys: list[Standby] = []
        self.ranks: list[Rank] = []
        self.moves: list[Move] = []
        self.handed_over: list[HandOver] = []

    def stands_by(self, called: Called) -> None:
        """Have one more host stand by, which acts like that."""

        async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await link.admit(reader, writer, SECRET)
                await called(reader, writer)
            finally:
                writer.close()

        async def listen() -> asyncio.Server:
            return await asyncio.start_server(admit, "127.0.0.1")

        server = self.hosts.start(listen()).result()
        self.standbys.append(Standby("127.0.0.1", server.sockets[0].getsockname()[1]))

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear all that comes, up to the end of the images."""
        move, _ = await visiting.hear(reader, Move)
        self.moves.append(move)
        self.came += move.ranks[0].said.get("agent", [])
        await receive_files(reader, writer, lambda _: os.memfd_create("image"), 60)

    async def refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.take(reader, writer)
        writer.write(visiting.encode(Refused(NO_ROOM)))

    async def restore(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.take(reader, writer)
        writer.write(visiting.encode(RanksRestored(4711, 0.0)))
        self.handed_over.append((await visiting.hear(reader, HandOver))[0])

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.restore(reader, writer)
        writer.write(visiting.encode(Taken()))

    def departure(self, wait: float = 0.0) -> Departure:
        mover: Any = self.mover
        hosts: Any = self.hosts
        log: Any = SimpleNamespace(write=lambda *_, **__: None, events=())
        return Departure(
            mover,
            hosts,
            log,
            self.said.append,
            standbys=lambda: self.standbys,
            facts=lambda: FACTS,
            barrier=None,
            messenger=None,
            secret=SECRET,
            wait=wait,
            is_interrupted=lambda: False,
            known=lambda: self.ranks,
        )

    def leave(self) -> bool:
        return self.departure().leave(ORDERS)

    @property
    def whereabouts(self) -> tuple[list[int], list[int], list[int]]:
        """Who was made again here, who counts as killed, and which hosts the others were told of."""
        return self.mover.restored, self.mover.lost, self.hosts.told


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaving]:
    with ExitStack() as stack:
        yield Leaving(stack, monkeypatch)


def test_ranks_go_to_a_host_that_stands_by_with_what_they_have_said_last(job: Leaving) -> None:
    job.stands_by(job.accept)
    assert job.leave()
    assert job.whereabouts == ([], [], [4711])
    assert job.came == [LAST_WORDS.hex()]
    assert {"CRIU-of-1", "CRIU-of-2"} <= job.unlocked


def test_what_ranks_say_once_goes_with_them(job: Leaving) -> None:
    """A rank at its end does not say so again: the host that comes would wait for it for ever."""
    job.ranks = [Rank(0, finished=True), Rank(1, finished=True), Rank(2), Rank(3, exit_code=0)]
    job.stands_by(job.accept)
    assert job.leave()
    (last,) = job.handed_over
    assert (last.at_end, last.ended) == ([0, 1], [(3, 0, "nothing")])


FIRST = [Said(0, "to all"), StepsCome(Come()), Ended(0, 0, "nothing"), LastWords(), Said(0, "to both")]


@pytest.fixture
def first(job: Leaving) -> Leaving:
    """The host that is left has the lead."""
    job.hosts.index = leaving.LEADER
    job.hosts.all = (replace(HOSTS[0], ranks=tuple(ALL)), replace(HOSTS[1], ranks=(3,)))
    job.hosts.heard = [Arrived(1, one) for one in FIRST]
    return job


def test_the_first_host_stays_and_the_one_that_comes_is_one_more(first: Leaving) -> None:
    first.stands_by(first.accept)
    assert first.leave()
    assert first.whereabouts == ([], [], [4711])
    assert first.hosts.stays
    (move,) = first.moves
    assert (move.index, [(host.ranks, host.ranks_of) for host in move.hosts]) == (
        2,
        [((), -1), ((3,), -1), ((1, 2), 0)],
    )
    assert "the job needs it to the end" in first.said[-1]


def test_one_more_host_hears_what_others_said_before_they_knew_of_it_and_the_first_one_too(
    first: Leaving,
) -> None:
    """What they say afterwards they tell both."""
    first.stands_by(first.accept)
    assert first.leave()
    ((order, *said),) = ([agents.decode(one.message) for one in last.unheard] for last in first.handed_over)
    assert isinstance(order, agents.ProxyOrder)
    assert said[1:] == [FIRST[0], FIRST[2]]
    assert [one.message for one in first.hosts.heard] == [one for one in FIRST if one != LastWords()]


def test_the_first_hosts_ranks_count_as_killed_where_one_more_host_is_gone_at_once(first: Leaving) -> None:
    first.stands_by(first.restore)
    assert not first.leave()
    assert first.whereabouts == ([], ALL, [4711])
    assert [one.message for one in first.hosts.heard] == [one for one in FIRST if one != LastWords()]


def test_where_one_can_not_be_dumped_all_go_on_here(job: Leaving) -> None:
    job.mover.fails = 2
    job.stands_by(job.accept)
    assert not job.leave()
    assert job.whereabouts == ([1], [], [])  # the other one has never ended
    assert {"CRIU-of-1", "CRIU-of-2"} <= job.unlocked
    assert "It can't be dumped." in job.said[-1]


def test_where_nobody_can_make_them_again_all_go_on_here_with_what_they_have_said_last(job: Leaving) -> None:
    for _ in range(3):
        job.stands_by(job.refuse)
    assert not job.leave()
    assert job.whereabouts == (ALL, [], [])
    assert len(job.came) == 2, "the images went to more than two hosts, or to one"
    assert {"CRIU-of-1", "CRIU-of-2"} <= job.unlocked
    assert f"The host that stands by says: {NO_ROOM}" in job.said[-1]


def test_that_another_host_is_lost_is_heard_here_where_the_ranks_have_not_gone(job: Leaving) -> None:
    """Else this host would wait for the end of that one's ranks for ever."""
    job.hosts.heard = [HostLost(0, "it is gone")]
    job.stands_by(job.restore)  # and is gone itself, before it has taken the place
    assert not job.leave()
    assert job.whereabouts == ([], ALL, [4711])
    assert job.hosts.heard == [HostLost(0, "it is gone")]


def test_another_host_that_stands_by_is_asked_where_the_first_one_can_not(job: Leaving) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await visiting.hear(reader, Move)

    job.stands_by(die)
    job.stands_by(job.accept)
    assert job.leave()
    assert job.whereabouts == ([], [], [4711])
    assert job.came == [LAST_WORDS.hex()]
    assert "so another is asked" in job.said[0]


def test_images_may_take_long_as_long_as_they_go(job: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "ANSWER_SECONDS", 0.5)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await job.take(reader, writer)
        await asyncio.sleep(0.7)  # two ranks are made again, in less than the time for both
        writer.write(visiting.encode(RanksRestored(4711, 0.7)))
        await visiting.hear(reader, HandOver)
        writer.write(visiting.encode(Taken()))

    job.stands_by(slow)
    assert job.leave()


def test_who_takes_nothing_is_waited_for_so_long_and_no_longer(
    job: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears that it is over, too: it must not have the ranks that go on here."""
    monkeypatch.setattr(leaving, "ANSWER_SECONDS", 0.2)
    ended: Future[float] = Future()

    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await job.take(reader, writer)
        await reader.read()
        ended.set_result(time.monotonic())

    job.stands_by(stop)
    assert not job.leave()
    assert job.whereabouts == (ALL, [], [])
    ended.result(10)


def test_where_it_is_not_this_hosts_turn_in_time_all_go_on_here_once_they_are_gone_there(
    job: Leaving,
) -> None:
    """Another host that is left tells the others, and does not come to an end."""
    job.hosts.has_turn = False
    gone: Future[None] = Future()

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await job.take(reader, writer)
        writer.write(visiting.encode(RanksRestored(4711, 0.0)))
        await reader.read()
        await asyncio.sleep(0.2)
        gone.set_result(None)

    job.stands_by(end)
    restore = job.mover.restore

    def restored(dumped: list[Dumped]) -> dict[int, float]:
        assert gone.done(), "they were there twice"
        return restore(dumped)

    job.mover.restore = restored  # type: ignore[method-assign]
    assert not job.leave()
    assert job.whereabouts == (ALL, [], [])
    assert "It was not this host's turn" in job.said[-1]


@pytest.mark.parametrize("others_answer", [True, False])
def test_once_the_others_expect_them_elsewhere_they_are_not_made_again_here(
    job: Leaving, others_answer: bool
) -> None:
    job.hosts.answers = others_answer
    job.stands_by(job.restore)  # and then it is gone
    assert not job.leave()
    assert job.whereabouts == ([], ALL, [4711])
    assert {"CRIU-of-1", "CRIU-of-2"} <= job.unlocked
    assert "were not moved" in job.said[-1]


def test_nobody_is_waited_for_once_the_first_host_is_lost(job: Leaving) -> None:
    """Neither before the ranks are dumped, nor afterwards."""
    job.hosts.lost = frozenset({leaving.LEADER})
    waits = job.departure(wait=600.0)
    assert not waits.is_possible()
    assert not waits.leave(ORDERS)
    assert job.whereabouts == (ALL, [], [])


def test_the_ranks_are_held_until_a_host_stands_by_once_and_so_long(
    job: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not job.departure().is_possible()
    assert job.said == []
    waits = job.departure(wait=600.0)
    slept: list[float] = []

    def comes(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            job.standbys.append(Standby("127.0.0.1", 1))

    monkeypatch.setattr(time, "sleep", comes)
    assert waits.is_possible()
    assert len(slept) == 3
    assert job.said == ["no host stands by: all ranks are held until one does, for 600 s."]
    job.standbys.clear()
    monkeypatch.setattr(time, "sleep", slept.append)
    short = job.departure(wait=0.001)
    assert not short.is_possible()  # the clock goes on, if little is slept
    slept.clear()
    assert not short.is_possible()
    assert slept == [], "it has waited twice"
