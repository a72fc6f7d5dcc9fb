"""All ranks of this host go on on another one, which stands by: dumped here, made again there.

The host that stands by makes the processes again first, while the others notice nothing; then the other hosts
are told, in order with all else that is said between them, and it comes in this one's place. The first host
has the lead and the ranks' store, and stays without ranks: theirs comes beside it, as one more.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.foretold import calls_init
from jitckpt.agent.migration.image_transfer import send_file
from jitckpt.agent.migration.move import Dumped, MoveError, Mover, peeked, reap
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.same_pages import SamePages
from jitckpt.agent.migration.side_by_side import all_of
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.migration.who_takes import LOOK_SECONDS, NotNowError, first_that_takes
from jitckpt.agent.proxies.step_barrier import Messenger, StepBarrier, told_of, told_of_ranks
from jitckpt.bindings import criu
from jitckpt.bindings.criu import CriuError
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import say, show_size
from jitckpt.decisions.recovery import Rank
from jitckpt.errors import HostsError
from jitckpt.events import EventLog
from jitckpt.hosts import link, visiting
from jitckpt.hosts.connections import Arrived, HostLost, Hosts, Unclear
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.visiting import RefusedError
from jitckpt.system import network_lock
from jitckpt.wire import agents
from jitckpt.wire.agents import ProxyOrder
from jitckpt.wire.checked import Kind
from jitckpt.wire.hosts import Host
from jitckpt.wire.moves import (
    WRITTEN,
    DumpedRank,
    HandOver,
    JobFacts,
    Move,
    RanksRestored,
    Taken,
    Unheard,
    Whole,
)

ANSWER_SECONDS = 240.0  # in which the other host makes a rank's processes again, at its second try, too
TAKING_SECONDS = 60.0  # in which it takes a piece of an image
WHO = "The host that stands by"
TURN_SECONDS = 55.0  # in which other hosts that are left at the same time have told all that they are
HEARING_SECONDS = 30.0  # in which all other hosts say their last to this one
UNDOING_SECONDS = 30.0  # in which a host that is not to have the ranks has ended what it has made
CONNECTING_SECONDS = 5.0
MOST_READ = 1 << 20  # bytes at once
LEADER = 0


@dataclass(frozen=True)
class _Sent:
    """To which host the images went, the connection to it, their bytes, and what it said."""

    standby: Standby
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    size: int
    restored: RanksRestored


class Departure:
    """Of this host's ranks. Used by the supervisor's thread."""

    def __init__(
        self,
        mover: Mover,
        hosts: Hosts,
        log: EventLog,
        say: Callable[[str], None],
        *,
        standbys: Callable[[], list[Standby]],
        facts: Callable[[], JobFacts],
        barrier: StepBarrier | None,
        messenger: Messenger | None,
        secret: bytes,
        wait: float,
        is_interrupted: Callable[[], bool],
        known: Callable[[], Sequence[Rank]],
    ) -> None:
        """standbys: who stands by now. secret: that the user gave to all hosts. known: all ranks.

        wait: seconds in which somebody may come to stand by. is_interrupted: whether the job was told to end.
        """
        self._mover, self._hosts, self._log, self._say = mover, hosts, log, say
        self._standbys, self._facts, self._secret = standbys, facts, secret
        self._barrier, self._messenger = barrier, messenger
        self._wait, self._is_interrupted, self._known = wait, is_interrupted, known
        self._until: float | None = None  # somebody may come
        self._handed_over = False

    def is_possible(self) -> bool:
        """Return whether there is a host to go to. If there is none it waits for one, but once only.

        A script that calls jitckpt.init stays: whoever has its ranks would have to know what they have said.
        """
        if calls_init(self._log):
            return False
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._wait
            if self._wait and not self._standbys():
                self._say(f"no host stands by: all ranks are held until one does, for {self._wait:g} s.")
        while not (there := bool(self._standbys())) and now < self._until and not self._is_over():
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
        return there

    def leave(self, orders: Mapping[int, bytes]) -> bool:
        """Have all ranks go on on a host that stands by, with these orders; return whether they do."""
        begun = time.monotonic()
        folders: list[int] = []
        with contextlib.ExitStack() as stack:
            ready: list[Dumped] = []
            dumped: list[Dumped] = []
            stack.enter_context(self._mover.worker(min(orders)).being_made_again())
            try:
                for rank in orders:
                    folders.append(stack.enter_context(nameless_folder()))
                    ready.append(self._mover.prepared(rank, folders[-1], stack, elsewhere=True))
                found = self._mover.dump_all(ready)
                dumped += [one for one in found if isinstance(one, Dumped)]
                all_of(found)
                size, where = self._move(dumped, orders, time.monotonic() - begun)
            except (MoveError, CriuError, StoreError, LinkError, HostsError, OSError) as error:
                self._log.write("move_failed", ranks=sorted(orders), text=str(error))
                self._say(f"the ranks of this host were not moved to another one: {error}")
                if self._handed_over:
                    self._lose(dumped)
                else:
                    self._back(dumped)
                _unlock(folders)
                return False
            _unlock(folders)
            self._forget(dumped)
            seconds = time.monotonic() - begun
        self._say(
            f"ranks {', '.join(map(str, sorted(orders)))} go on on {where}: {show_size(size)} of processes "
            f"in {seconds:.2f} s."
        )
        if self._stays:
            self._say(
                "this host's launcher stays, without ranks: it has the lead and the ranks' store, so the job "
                "needs it to the end."
            )
        return True

    def _is_over(self) -> bool:
        """Whether the job ends anyway, so that no host is to be waited for."""
        return self._is_interrupted() or LEADER in self._hosts.lost

    @property
    def _stays(self) -> bool:
        """Whether this host has to go on without its ranks."""
        return self._hosts.index == LEADER

    def _back(self, dumped: Sequence[Dumped]) -> None:
        """Make the processes again here, as far as that can be done."""
        for one in dumped:
            reap(one.pids)
        for rank, took in self._mover.restore(dumped).items():
            if not isinstance(took, float):
                self._say(f"rank {rank} could not be made again: {took}")

    def _lose(self, dumped: Sequence[Dumped]) -> None:
        """The others expect them on the other host, so they are not made again here: they count as killed."""
        self._forget(dumped)
        for one in dumped:
            self._mover.worker(one.rank).not_made_again()

    def _forget(self, dumped: Sequence[Dumped]) -> None:
        """What they have asked the job's store last is asked by the other host, and not from here, too."""
        for one in dumped:
            reap(one.pids)
            self._mover.relay.forget(list(one.stores.values()))

    def _move(
        self, dumped: Sequence[Dumped], orders: Mapping[int, bytes], dump_seconds: float
    ) -> tuple[int, str]:
        """Return the bytes that were sent, and to whom."""
        index, hosts = self._there()
        move = Move(
            self._facts(),
            index,
            hosts,
            self._hosts.secret.hex(),
            self._mover.relay.name,
            time.monotonic(),
            [self._told_of(one) for one in dumped],
        )
        begun = time.monotonic()
        # Whatever is waited for there has a limit of its own.
        sent = self._hosts.start(self._send_to_one(move, dumped)).result()
        transfer = time.monotonic() - begun - sent.restored.seconds
        if not self._hosts.take_turn(TURN_SECONDS):
            self._hosts.start(_withdraw(sent)).result()
            raise MoveError(f"It was not this host's turn to tell the others within {TURN_SECONDS:g} s.")
        self._tell_all(index, hosts[index], sent)
        taken = self._hosts.take()
        said = [Arrived(LEADER, ProxyOrder(rank), order) for rank, order in orders.items()]
        said += _for_all(taken) if self._stays else [one for one in taken if isinstance(one, Arrived)]
        hand_over = self._hand_over(said, sent, dump_seconds, transfer)
        goes_on = True
        try:
            self._hosts.start(self._finish(sent.reader, sent.writer, hand_over)).result()
            goes_on = self._stays
        finally:
            if goes_on:  # else this host would not know who is lost, and wait for ever
                self._hosts.give_back([one for one in taken if not _are_last_words(one)])
        if self._stays and self._messenger is not None:
            self._messenger.ranks_are_at(index)
        return sent.size, sent.standby.address

    def _tell_all(self, index: int, coming: Host, sent: _Sent) -> None:
        """Tell the other hosts who comes to that place. Raises MoveError."""
        self._handed_over = True  # from here on the others expect that one, and no other
        restored = sent.restored
        coming = replace(coming, address=sent.standby.address, port=restored.port, reserve=restored.reserve)
        tell = self._hosts.give_ranks if self._stays else self._hosts.hand_over
        if not tell(coming, HEARING_SECONDS):
            self._hosts.start(_withdraw(sent)).result()
            raise MoveError(f"Not all hosts have answered within {HEARING_SECONDS:g} s.")

    def _there(self) -> tuple[int, list[Host]]:
        """Return the place of the host to which the ranks go, and all hosts as it is to know them."""
        index, hosts = self._hosts.index, self._all
        if not self._stays:
            return index, hosts
        own = hosts[index]
        hosts[index] = replace(own, ranks=())
        return len(hosts), [*hosts, Host("", 0, own.ranks, own.restarts, ranks_of=index)]

    @property
    def _all(self) -> list[Host]:
        """All hosts as they are now, as another one is told of them."""
        return [replace(host, pasts=()) for host in self._hosts.all]

    def _hand_over(
        self, said: Sequence[Arrived], sent: _Sent, dump_seconds: float, transfer: float
    ) -> HandOver:
        """Return what the other host is to know at last. said: what there is for it to act on."""
        steps, tell_of = None, told_of_ranks if self._stays else told_of
        if self._messenger is not None:
            steps = tell_of(self._messenger.known)
        ranks = self._known()
        return HandOver(
            self._all,
            "" if self._barrier is None else self._barrier.content.hex(),
            steps,
            [Unheard(one.host, agents.encode(one.message), one.data.hex()) for one in said],
            [one.rank for one in ranks if one.finished],
            [(one.rank, one.exit_code, one.told) for one in ranks if one.exit_code is not None],
            sent.size,
            dump_seconds,
            transfer,
            sent.restored.seconds,
        )

    def _told_of(self, one: Dumped) -> DumpedRank:
        sockets = {**self._mover.sockets(one.rank), **one.stores}
        said = {name: peeked(end) for name, end in sockets.items()}  # they may yet go on here
        told = self._mover.told_of(one.rank, one.pids, one.what, stores=one.stores, said=said, files={})
        return replace(told, own_clock=one.keeps_clock)

    async def _send_to_one(self, move: Move, dumped: Sequence[Dumped]) -> _Sent:
        """Have a host that stands by make the processes again. Raises LinkError or OSError."""
        return await first_that_takes(
            self._standbys,
            partial(self._send_to, move, dumped),
            self._say,
            wait=self._wait,
            is_over=self._is_over,
        )

    async def _connected(self, standby: Standby) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NotNowError where it can't be reached: of some nothing but the word is left."""
        try:
            async with asyncio.timeout(CONNECTING_SECONDS):
                reader, writer = await asyncio.open_connection(standby.address, standby.port)
                await link.introduce(reader, writer, self._secret)
        except (OSError, LinkError) as error:
            raise NotNowError(str(error) or "no answer") from error
        return reader, writer

    async def _send_to(self, move: Move, dumped: Sequence[Dumped], standby: Standby) -> _Sent:
        """Raises NotNowError, LinkError or OSError."""
        reader, writer = await self._connected(standby)
        try:
            size, restored = await self._send(reader, writer, move, dumped, standby)
        except (LinkError, OSError):
            writer.close()  # what it may have made is ended there
            raise
        return _Sent(standby, reader, writer, size, restored)

    async def _send(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        move: Move,
        dumped: Sequence[Dumped],
        standby: Standby,
    ) -> tuple[int, RanksRestored]:
        """Send all, and return its size with the answer; a refusal may come before the end."""
        answer = asyncio.create_task(_answer(reader, RanksRestored, None))
        sending = asyncio.create_task(self._send_images(writer, move, dumped, standby))
        try:
            await asyncio.wait({answer, sending}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer
            size = await sending
            async with asyncio.timeout(ANSWER_SECONDS * len(dumped)):
                return size, await answer
        except TimeoutError as error:
            raise LinkError(f"{WHO} does not answer within {ANSWER_SECONDS * len(dumped):g} s.") from error
        finally:
            await _ended(answer, sending)

    async def _send_images(
        self, writer: asyncio.StreamWriter, move: Move, dumped: Sequence[Dumped], standby: Standby
    ) -> int:
        writer.write(visiting.encode(replace(move, clock=time.monotonic())))
        packer, same = Packer(standby.unpacks and packing.can_pack()), SamePages()
        size = 0
        for one in dumped:
            files = {
                name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=one.folder)
                for name in sorted(os.listdir(one.folder))
                if not name.endswith(".log")
            }
            try:
                for name, file in files.items():
                    size += await send_file(
                        writer, one.rank, name, file, packer, patience=TAKING_SECONDS, same=same
                    )
            finally:
                for file in files.values():
                    os.close(file)
            for number, path in enumerate(one.what.written):
                with open(path, "rb") as written:
                    name = f"{WRITTEN}{number}"
                    size += await send_file(
                        writer, one.rank, name, written.fileno(), packer, patience=TAKING_SECONDS
                    )
            ring = self._mover.worker(one.rank).ring_fd
            size += await send_file(writer, one.rank, "", ring, packer, patience=TAKING_SECONDS)
        writer.write(visiting.encode(Whole()))
        say(f"{show_size(size - same.saved)} of {show_size(size)} had to go; the rest are the same pages.")
        if packer.saved:
            say(f"zstd has taken {show_size(packer.saved)} of that off the way.")
        return size

    async def _finish(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: HandOver
    ) -> None:
        writer.write(visiting.encode(last))
        try:
            await _answer(reader, Taken, ANSWER_SECONDS)
        finally:
            writer.close()


def _are_last_words(one: Arrived | Unclear | HostLost) -> bool:
    return isinstance(one, Arrived) and isinstance(one.message, agents.LastWords)


def _for_all(taken: Sequence[Arrived | Unclear | HostLost]) -> list[Arrived]:
    """Return what the other hosts have told all, each until it said that it tells one more from there on."""
    found, told_last = list[Arrived](), set[int]()
    for one in taken:
        if _are_last_words(one):
            told_last.add(one.host)
        elif isinstance(one, Arrived) and isinstance(one.message, agents.TO_ALL):
            found += [] if one.host in told_last else [one]
    return found


def _unlock(folders: Sequence[int]) -> None:
    """Take away CRIU's locks on connections that were not made again."""
    for folder in folders:
        with contextlib.suppress(OSError):  # the network's tables went before
            network_lock.unlock(criu.locks(folder))


async def _ended(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel what is not done, and take note of what came of it: nobody else asks."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _withdraw(sent: _Sent) -> None:
    """Have a host that has made processes again end them: they go on here once it has."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(UNDOING_SECONDS):
            sent.writer.write_eof()
            while await sent.reader.read(MOST_READ):
                pass
    sent.writer.close()


async def _answer(reader: asyncio.StreamReader, kind: type[Kind], patience: float | None) -> Kind:
    try:
        return (await visiting.answer(reader, WHO, patience, kind))[0]
    except RefusedError as error:
        raise (NotNowError if error.busy else LinkError)(f"{WHO} says: {error}") from error
