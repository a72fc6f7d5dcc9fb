"""The agents of one job on several hosts: connections between all of them, for one start of the workers.

A thread with an event loop of its own does the talking, so nobody who sends ever waits. The supervisor takes
what arrives. A host is lost when its connection ends, or when its machine does not acknowledge for too long
what was sent: an agent with nothing to say says every second that it lives. Machines acknowledge however
busy their agents are: an agent whose machine does, and that itself says nothing, has more time.
"""

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jitckpt.console import say
from jitckpt.hosts import link
from jitckpt.hosts.last_words import Leave
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.receipts import Receipts
from jitckpt.hosts.way_in import WayIn
from jitckpt.wire import agents, checked
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.hosts import Host

HEARTBEAT = 1.0  # seconds
PATIENCE = 6  # times the seconds that a machine may be silent, for an agent on a machine that is not
MOST_STRANGERS = 256  # connections that have not proved yet that they belong here
# What the kernel says of a connection whose other end is silent.
SILENT_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(frozen=True)
class Arrived:
    """A message from another host."""

    host: int
    message: agents.AgentMessage
    data: bytes = b""


@dataclass(frozen=True)
class Unclear:
    """What came from another host, and is no message."""

    host: int
    error: ProtocolError


@dataclass(frozen=True)
class HostLost:
    """A host that will say nothing more, and why, as a sentence without its full stop."""

    host: int
    reason: str


def heard(host: int, header: link.Header, data: bytes) -> Arrived | Unclear:
    """Return what has come from another host."""
    try:
        return Arrived(host, agents.decode(header), data)
    except ProtocolError as error:
        return Unclear(host, error)


Value = TypeVar("Value")
Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Hosts:
    """All hosts of one start of the workers; this one's place among them is `index`."""

    def __init__(
        self,
        index: int,
        hosts: Sequence[Host],
        listener: socket.socket,
        secret: bytes,
        silence: float,
        *,
        takes_place: bool = False,
        memory_listener: socket.socket | None = None,
    ) -> None:
        """listener: a listening socket, this object's from now on. silence: seconds until a machine that
        does not answer is lost; an agent has PATIENCE times as long. takes_place: this host comes in the
        place of another, which has told all others (`hand_over`), so it calls them all. memory_listener: a
        second one, at `memory_address`.
        """
        self._takes_place = takes_place
        self.is_changed = takes_place  # another has come in the place of a host that was there as they met
        self.index, self.all = index, tuple(hosts)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when something is to be taken
        # Who looks after an agent that visits, by what it wants, until that returns or raises LinkError.
        self.answers: dict[str, Visit] = {}
        self._listeners = [one for one in (listener, memory_listener) if one is not None]
        self._secret, self._silence = secret, silence
        self._patience = PATIENCE * silence
        self._way_in = WayIn(secret, silence, self._patience)
        self._beats_missed: dict[int, int] = {}
        self._receipts = Receipts()
        self._inbox: deque[Arrived | Unclear | HostLost] = deque()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._lost: set[int] = set()
        self._connected = {host: threading.Event() for host in range(len(hosts)) if host != index}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._kept_for: dict[int, list[bytes]] = {}  # hosts in whose places others are about to come
        self._looks: dict[int, asyncio.Task[None]] = {}  # that the agents of those who are to call are there
        self._leave = Leave(index, lambda host, message: self._send(message, host))
        self._strangers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}  # oldest first
        self._thread = threading.Thread(target=self._run, name="jitckpt-hosts", daemon=True)

    def connect(self, within: float) -> None:
        """Begin to talk to the others; who can't be reached within so many seconds is lost."""
        self._thread.start()
        deadline = time.monotonic() + within
        for host, connected in tuple(self._connected.items()):  # one more may come meanwhile
            if not connected.wait(max(0.0, deadline - time.monotonic())):
                reason = f"no connection to {self.name(host)} could be made within {within:g} s"
                self._loop.call_soon_threadsafe(self._lose, host, reason)

    def name(self, host: int) -> str:
        """Return a host's name for the user."""
        return f"host {host} ({self.all[host].address})"

    @property
    def secret(self) -> bytes:
        """The job's."""
        return self._secret

    @property
    def lost(self) -> frozenset[int]:
        """The hosts that are lost by now."""
        return frozenset(self._lost)

    def host_of(self, rank: int) -> int:
        """Return which host has this rank."""
        return next(number for number, host in enumerate(self.all) if rank in host.ranks)

    def send(self, host: int, message: agents.AgentMessage, data: bytes = b"") -> None:
        """Send a message, to a host that is lost in vain. Never waits. Raises LinkError if it is too long."""
        self._in_loop(self._write, (host,), link.encode(agents.encode(message), data))

    def confirm(self, host: int, received: Callable[[], None]) -> None:
        """Call `received`, on another thread, once a host has all that was sent to it before, or is lost."""
        self._in_loop(self._ask_for_receipt, host, received)

    def broadcast(self, message: agents.AgentMessage) -> None:
        """Send a message to all other hosts."""
        self._in_loop(self._send, message)

    def take_turn(self, within: float) -> bool:
        """Wait until no other host is just telling that it is left; return whether that is so in time.

        To be called before `hand_over` and `give_ranks`.
        """
        self._in_loop(self._leave.ask, agents.WantsTurn(), self._lost)
        if self._leave.wait_for_turn(within):
            return True
        self._in_loop(self._leave.ask, agents.LeavesTurn(), self._lost)
        return False

    def hand_over(self, to: Host, within: float) -> bool:
        """Tell the other hosts that another comes in this one's place, and hear them to their last words.

        What they say afterwards waits for the other. Returns whether all that are not lost have done so in
        time.
        """
        self._in_loop(self._tell_last, agents.TakesPlace(to.address, to.port, to.reserve))
        return self._leave.wait_for_all(within)

    def give_ranks(self, to: Host, within: float) -> bool:
        """Tell the other hosts that this one's ranks go on on one more, and that this one stays.

        `take` returns each host's LastWords: what that says behind them the other hears, too. Returns whether
        all that are not lost have said them in time.
        """
        self._leave.stays = True
        self._in_loop(self._tell_last, agents.GivesRanks(to.address, to.port))
        return self._leave.wait_for_all(within)

    def waiting(self, host: int) -> int:
        """Return how many bytes for a host are not on their way yet."""
        writer = self._writers.get(host)
        return 0 if writer is None else writer.transport.get_write_buffer_size()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> "Future[Value]":
        """Run it on the connections' thread; it is cancelled when they end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def keeper(self, host: int) -> int:
        """Return which host keeps copies of this one's rank-local states."""
        return (host + 1) % len(self.all)

    def take(self) -> list[Arrived | Unclear | HostLost]:
        """Return what has come since the last time, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def give_back(self, taken: Sequence[Arrived | Unclear | HostLost]) -> None:
        """Have what was taken come again, before all else: nobody has acted on it."""
        self._inbox.extendleft(reversed(taken))
        os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """End all connections, once what was sent is on its way."""
        if self._thread.is_alive():
            self._in_loop(self._closing.set)
            self._thread.join()
        else:
            for listener in self._listeners:
                listener.close()
        os.close(self.wake)

    def _in_loop(self, call: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so are all connections
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._talk())
        finally:
            self._loop.close()

    async def _talk(self) -> None:
        servers = [await asyncio.start_server(self._called, sock=one) for one in self._listeners]
        called = self._connected if self._takes_place else range(self.index)
        callers = [asyncio.create_task(self._call(host)) for host in called]
        if not self._takes_place:
            for host in range(self.index + 1, len(self.all)):
                self._looks[host] = asyncio.create_task(self._await_call(host))
        heart = asyncio.create_task(self._beat())
        await self._closing.wait()
        for server in servers:
            server.close()
        for task in (heart, *callers):
            task.cancel()
        for writer in tuple(self._writers.values()):  # another may just be coming
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(writer.drain(), HEARTBEAT)
            writer.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _beat(self) -> None:
        """Say that this agent lives, and count for how many beats of its own the others have said nothing.

        In seconds an agent that was itself held up would take all others for silent: it has not listened.
        """
        beat = min(HEARTBEAT, self._silence)
        while True:
            self._write(tuple(self._writers), link.encode(agents.encode(agents.Alive())))
            await asyncio.sleep(beat)
            for host in self._writers.keys() - self._lost:
                self._beats_missed[host] += 1
                if self._beats_missed[host] * beat > self._patience:
                    self._lose(host, f"its agent has said nothing for {self._patience:g} s")
                    self._writers[host].close()

    async def _call(self, host: int) -> None:
        """Connect to a host with a lower number; it listened before it told anybody its address.

        Whether its agent is busy or not, the machine answers, or says that nobody listens there any more.
        """
        try:
            reader, writer = await self._way_in.reach((self.all[host].address, self.all[host].port))
        except LinkError as error:
            self._lose(host, _clause(str(error)))
            return
        writer.write(link.encode(agents.encode(agents.Calls(self.index))))
        await self._converse(host, reader, writer)

    async def _await_call(self, host: int) -> None:
        """Wait for the call of a host that is to call, as long as its agent is there."""
        there = self.all[host]
        while host not in self._writers and host not in self._lost:
            try:
                _, writer = await self._way_in.open((there.address, there.port))
                writer.close()
            except OSError as error:
                if host not in self._writers:  # which it may be by now
                    reason = f"{there.address} port {there.port} can't be reached: {self._way_in.said(error)}"
                    self._lose(host, _clause(reason))
                return
            await asyncio.sleep(HEARTBEAT)

    @contextlib.asynccontextmanager
    async def visit(
        self, host: int, what: str, *, for_memory: bool = False
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to a host for once, in any event loop; its `answers` look after it. Raises LinkError.

        for_memory: where it wants to be visited for its memory.
        """
        there = self.all[host]
        place = (there.address, there.port)
        if for_memory and there.memory_address:
            place = (there.memory_address, there.memory_port)
        reader, writer = await self._way_in.reach(place)
        try:
            writer.write(link.encode(agents.encode(agents.Visits(what))))
            yield reader, writer
        finally:
            writer.close()

    def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Have the kernel end the connection if what was sent is not acknowledged."""
        connection = writer.get_extra_info("socket")
        milliseconds = max(1, int(self._silence * 1000))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> agents.FirstWords:
        """Return what somebody says first who has proved to belong here.

        Raises LinkError, TimeoutError, and ProtocolError for what makes no sense. Of those that have not
        proved it, the one that has had the longest time makes room for the newest.
        """
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).transport.abort()
        self._strangers[task] = writer
        try:
            async with asyncio.timeout(self._patience):
                await link.admit(reader, writer, self._secret)
                header, _ = await link.receive(reader)
                return checked.understood(agents.FIRST_WORDS, header)
        finally:
            self._strangers.pop(task, None)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            match await self._admit(reader, writer):
                case agents.Visits(what) if what in self.answers:
                    await self.answers[what](reader, writer)
                case agents.Calls(host) if host in self._connected.keys() - self._writers.keys() - self._lost:
                    await self._converse(host, reader, writer)
        except ProtocolError as error:
            say(f"an agent that calls says what makes no sense, and is not heard: {error}")
        except (LinkError, OSError):
            pass  # a stranger, or one that has died: who belongs here and can't come is missed
        except asyncio.CancelledError:
            pass  # all is over; asyncio would write a traceback
        except Exception as error:  # asyncio would write a traceback, too, and wait where stderr is full
            say(f"what another agent asked for has failed: {error!r}")
        finally:
            writer.close()

    async def _converse(self, host: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._watch(writer)
        self._beats_missed[host] = 0
        self._writers[host] = writer
        self._connected[host].set()
        if look := self._looks.pop(host, None):
            look.cancel()  # else it would look there when the host has left for another
        for message in self._kept_for.pop(host, []):
            writer.write(message)
        self._leave.comes(host)
        try:
            while True:
                header, data = await link.receive(reader)
                self._beats_missed[host] = 0
                if not self._hear(heard(host, header, data), writer):
                    return
        except LinkError as error:
            cause = error.__cause__
            silent = isinstance(cause, OSError) and cause.errno in SILENT_ERRORS
            said = f"it has said nothing for {self._silence:g} s" if silent else _clause(str(error))
            self._lose(host, said)
        finally:
            writer.close()

    def _hear(self, said: Arrived | Unclear, writer: asyncio.StreamWriter) -> bool:
        """Act on what is for this module alone, and pass on the rest; False if nothing more comes here."""
        match said:
            case Arrived(_, agents.Alive()):
                pass
            case Arrived(_, agents.Receipt(number)):
                writer.write(link.encode(agents.encode(agents.Received(number))))
            case Arrived(host, agents.Received(number)):
                self._receipts.hear(host, number)
            case Arrived(host, agents.TakesPlace(address, port, reserve)):
                coming = replace(self.all[host], address=address, port=port, reserve=reserve)
                self._expect_another(host, coming)
                writer.write(link.encode(agents.encode(agents.LastWords())))
                self._leave.hear(host, self._lost)  # it says nothing more
                return False
            case Arrived(host, agents.GivesRanks(address, port)):
                self._add(host, address, port)
                writer.write(link.encode(agents.encode(agents.LastWords())))
            case Arrived(host, agents.LastWords()):
                if self._leave.stays:
                    self._put(said)
                self._leave.hear(host, self._lost)
            case Arrived(host, agents.WantsTurn() | agents.LeavesTurn() | agents.Turn() as message):
                self._leave.hear_of_turn(host, message)
            case _:
                self._put(said)
        return True

    def _expect_another(self, host: int, coming: Host) -> None:
        """A host's place is taken by another, which calls soon; until then what is for it waits."""
        self.is_changed = True
        self.all = tuple(coming if number == host else one for number, one in enumerate(self.all))
        self._writers.pop(host)
        self._receipts.end(host)
        self._await_one(host)

    def _add(self, host: int, address: str, port: int) -> None:
        """The ranks of a host that stays go on on one more, which calls soon."""
        before = self.all[host]
        coming = Host(address, port, before.ranks, before.restarts, ranks_of=host)
        number, without = len(self.all), replace(before, ranks=())
        self.all = (*(without if place == host else one for place, one in enumerate(self.all)), coming)
        self._connected[number] = threading.Event()
        self._await_one(number)

    def _await_one(self, host: int) -> None:
        """Keep what is for a host until it calls."""
        kept = self._kept_for[host] = []
        self._leave.awaits(host)
        self._loop.call_later(self._patience, self._give_up_waiting, host, kept)
        self._looks[host] = self._loop.create_task(self._await_call(host))

    def _give_up_waiting(self, host: int, kept: list[bytes]) -> None:
        if self._kept_for.get(host) is kept:  # else it has come, and another is awaited since
            who = "it" if self.all[host].ranks_of >= 0 else "the host in its place"
            self._lose(host, f"{who} has not come within {self._patience:g} s")

    def _lose(self, host: int, reason: str) -> None:
        if host not in self._lost:
            self._lost.add(host)
            self._connected[host].set()
            self._put(HostLost(host, reason))
            self._receipts.end(host)
            self._leave.lose(host, self._lost)

    def _tell_last(self, message: agents.TakesPlace | agents.GivesRanks) -> None:
        others = tuple(self._connected)
        self._send(message)
        if isinstance(message, agents.GivesRanks):
            self._add(self.index, message.address, message.port)
        self._leave.begin(others, self._lost)

    def _ask_for_receipt(self, host: int, received: Callable[[], None]) -> None:
        if host in self._lost:
            received()
            return
        self._send(agents.Receipt(self._receipts.number(host, received)), host)

    def _put(self, what: Arrived | Unclear | HostLost) -> None:
        self._inbox.append(what)
        os.eventfd_write(self.wake, 1)

    def _send(self, message: agents.AgentMessage, *hosts: int) -> None:
        """Send it to all where no host is named."""
        self._write(hosts or tuple(self._connected), link.encode(agents.encode(message)))

    def _write(self, hosts: Sequence[int], message: bytes) -> None:
        for host in hosts:
            if host in self._kept_for:
                self._kept_for[host].append(message)
            writer = self._writers.get(host)
            if writer is not None and not writer.is_closing():
                writer.write(message)


def _clause(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:].rstrip(".")


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address; port 0: any that is free. Raises OSError."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=1024)
