"""`jitckpt run --standby`: an agent that waits, and takes the place of one whose devices are broken for good.

It makes that one's processes again here (migration/leaving.py is the other side), and is then what that one
was: it has its index, its ranks, its place in the step barrier, and its connections to the other agents. The
agent of the first host stays, without ranks; then this one is a host more.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher import api as launcher

from jitckpt.agent import health
from jitckpt.agent.agent import launch
from jitckpt.agent.migration import packing
from jitckpt.agent.migration.image_receiver import receive_files
from jitckpt.agent.migration.move import go_by_clock_here
from jitckpt.agent.migration.rank_from_images import RankFromImages
from jitckpt.agent.migration.side_by_side import all_of, made_again
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.migration.written_files import put_written_files
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import ControlSocket, Proxies
from jitckpt.agent.proxies.servers import ENTER
from jitckpt.agent.proxies.step_barrier import StepBarrier, known_again
from jitckpt.agent.settings import Settings
from jitckpt.agent.successor import RanksLeft, Successor
from jitckpt.agent.worker_processes import WorkerProcesses
from jitckpt.bindings import softgpu
from jitckpt.bindings.criu import CriuError
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import say, show_size
from jitckpt.events import EventLog
from jitckpt.hosts import connections, link, rendezvous, visiting
from jitckpt.hosts.connections import Arrived
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.waiting_places import AtService, AtStore, WaitingPlace
from jitckpt.ring import local_state
from jitckpt.system import descriptor_limit, descriptor_reserve
from jitckpt.wire import agents, protocol
from jitckpt.wire import environment as variables
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.hosts import Host
from jitckpt.wire.moves import HandOver, ImageFile, Move, RanksRestored, Taken
from jitckpt.wire.visits import Refused

LOOK_SECONDS = 1.0  # between two looks whether the job is still there
RESTORING_SECONDS = 120.0  # for each rank
SENDING_SECONDS = 60.0  # in which the next piece of an image comes
HANDING_OVER_SECONDS = 90.0  # in which the other hosts have been told, and this one hears their last words
REFUSING_SECONDS = 5.0  # in which who is refused hears why, and hangs up
MOST_READ = 1 << 20  # bytes at once
# Seconds by which the clocks since the hosts' starts may differ for processes to go by this host's; else they
# get a time namespace, in which their own goes on.
SAME_CLOCK = 60.0
# Far from the numbers that the processes of a host have: those that come here bring theirs.
FIRST_PROCESS = 3_000_000


@dataclass
class _Taken:
    """What this host has taken over.

    last: what the other agent said last. unheard: what there was in it for this one to act on.
    """

    move: Move
    ranks: Sequence[RankFromImages]
    barrier: StepBarrier
    relay: StoreRelay
    last: HandOver
    unheard: Sequence[Arrived]


def stand_by(
    settings: Settings, log: EventLog, config: launcher.LaunchConfig, command: str, arguments: list[str]
) -> None:
    """Wait until a host's ranks come here, and see to them as that host's agent, to the job's end.

    Raises NotNeeded if the job ends without, ChildFailedError, SignalException, HostsError.
    """
    _count_from(FIRST_PROCESS)
    descriptor_limit.raise_limit()
    descriptor_reserve.fill()
    before = {number: signal.signal(number, _signalled) for number in (signal.SIGTERM, signal.SIGINT)}
    children = Children(settings.save_deadline, settings.temporary)
    try:
        if settings.health_check is not None:
            health.wait_until_well(settings.health_check, rendezvous.join_timeout(config))
        place = _place(settings, config)
        is_left = False
        try:
            taken, links = asyncio.run(_Waiting(settings, config, children, place).wait())
            successor = partial(
                Successor,
                move=taken.move,
                last=taken.last,
                links=links,
                place=place,
                children=children,
                adopted=partial(_Adopted, taken),
            )
            launch(settings, log, config, command, arguments, agent=successor)
        except RanksLeft:
            is_left = True
            raise
        finally:
            place.close(handed_over=is_left)
    finally:
        children.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _place(settings: Settings, config: launcher.LaunchConfig) -> WaitingPlace:
    signature = Signature(config.run_id, settings.secret)
    timeout, silence = rendezvous.join_timeout(config), settings.host_timeout
    if settings.coordination is None:
        return AtStore(config.rdzv_endpoint, signature, timeout=timeout, silence=silence)
    return AtService(settings.coordination, signature, timeout=timeout, silence=silence)


def _signalled(signum: int, _frame: FrameType | None) -> None:
    raise SignalException(f"Process {os.getpid()} got signal {signum}", sigval=signal.Signals(signum))


def _count_from(number: int) -> None:
    """Have the processes that this one starts get high numbers, where it is the first of its namespace."""
    if os.getpid() == 1:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number))


class _BusyError(LinkError):
    """This host can't take ranks now."""


class _Waiting:
    def __init__(
        self,
        settings: Settings,
        config: launcher.LaunchConfig,
        children: Children,
        place: WaitingPlace,
    ) -> None:
        self._settings, self._children, self._place = settings, children, place
        assert config.local_addr is not None
        self._address = config.local_addr
        assert settings.secret is not None
        self._secret = settings.secret
        self._links = connections.listen(self._address)  # for the other agents
        self._takes = asyncio.Lock()  # the ranks of one host

    async def wait(self) -> tuple[_Taken, socket.socket]:
        """Return what was taken over, and where the other agents call."""
        self._taken: asyncio.Future[_Taken] = asyncio.Future()
        listener = connections.listen(self._address)
        server = await asyncio.start_server(self._called, sock=listener)
        self._place.announce(Standby(self._address, listener.getsockname()[1], packing.can_pack()))
        say("this host stands by: it takes the place of one whose devices are broken for good.")
        try:
            while not self._taken.done():
                await asyncio.wait([self._taken], timeout=LOOK_SECONDS)
                if not self._taken.done():
                    await asyncio.to_thread(self._place.look)
            taken = self._taken.result()
            self._place.take_place(taken.last.hosts[taken.move.index].agent)
            return taken, self._links
        finally:
            server.close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_admitted = False
        try:
            await link.admit(reader, writer, self._secret)
            is_admitted = True
            move, _ = await visiting.hear(reader, Move)
            clocks_differ = abs(time.monotonic() - move.clock) > SAME_CLOCK
            if clocks_differ and not os.path.exists(ENTER):
                raise LinkError(
                    "The two hosts have not been started at the same time, so processes keep the clock of "
                    "the one that they leave. That needs nsenter here, of the package util-linux."
                )
            if clocks_differ and os.geteuid() != 0:  # CRIU would have their clocks jump, and waits end early
                raise LinkError(
                    "The two hosts have not been started at the same time, so processes keep the clock of "
                    "the one that they leave. That needs root here."
                )
            if self._takes.locked() or self._taken.done():
                raise _BusyError("Another host's ranks are just coming here.")
            async with self._takes:
                await self._take(move, reader, writer, clocks_differ=clocks_differ)
        except (LinkError, ProtocolError, OSError) as error:  # or it is of another version
            say(f"a host's ranks did not come here: {error}")
            if is_admitted:
                with contextlib.suppress(OSError):
                    writer.write(visiting.encode(Refused(str(error), isinstance(error, _BusyError))))
                    await _heard_out(reader, writer)
        except asyncio.CancelledError:
            pass  # the job is over; asyncio would write a traceback
        finally:
            writer.close()

    async def _take(
        self,
        move: Move,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        clocks_differ: bool,
    ) -> None:
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
            ranks = []
            for one in move.ranks:
                folder = stack.enter_context(nameless_folder())
                ranks.append(RankFromImages(one, folder, local_state.create()))
                undo.callback(os.close, ranks[-1].ring)
            await _receive_files(reader, writer, {one.rank: one for one in ranks}, SENDING_SECONDS)
            for rank in ranks:
                if not (clocks_differ or rank.dumped.own_clock):
                    go_by_clock_here(rank.images)
            begun = time.monotonic()
            try:
                for rank in ranks:
                    put_written_files(rank.dumped.written, rank.images, undo)
                barrier, relay = self._made_again(move, ranks, undo)
            except CriuError as error:
                raise LinkError(str(error)) from error
            reserve = self._place.reserve() if move.hosts[move.index].ranks_of < 0 else None
            port = 0 if reserve is None else reserve.port
            restored = RanksRestored(self._links.getsockname()[1], time.monotonic() - begun, port)
            writer.write(visiting.encode(restored))
            last, _ = await visiting.answer(reader, "The host that is left", HANDING_OVER_SECONDS, HandOver)
            _check_hosts(move, last.hosts)
            unheard = [
                *_known(last.hosts, last),
                *(
                    Arrived(one.host, agents.decode(one.message), bytes.fromhex(one.data))
                    for one in last.unheard
                ),
            ]
            writer.write(visiting.encode(Taken()))
            await writer.drain()
            undo.pop_all()
        self._taken.set_result(_Taken(move, ranks, barrier, relay, last, unheard))

    def _made_again(
        self, move: Move, ranks: Sequence[RankFromImages], undo: contextlib.ExitStack
    ) -> tuple[StepBarrier, StoreRelay]:
        """Make the processes again. Raises CriuError or OSError; `undo` ends what there is."""
        barrier = StepBarrier(len(ranks), len(move.hosts))
        undo.callback(barrier.close)
        relay = StoreRelay(*move.facts.workers_store, move.relay)
        undo.callback(relay.close)
        for one in ranks:
            undo.callback(one.end)
        found, memory = self._settings.criu, {"jitckpt-steps": barrier.file}
        assert found is not None
        all_of(
            made_again(
                ranks,
                lambda one: one.restore(found, RESTORING_SECONDS, memory, self._children.mark),
                lambda one: one.end(),
            )
        )
        return barrier, relay


async def _heard_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the last word get there: to close with something unread would take it back. Raises OSError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REFUSING_SECONDS):
            await writer.drain()
            while await reader.read(MOST_READ):
                pass


async def _receive_files(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    ranks: Mapping[int, RankFromImages],
    patience: float,
) -> None:
    """Take the images, and what is in the memory of ranks. Raises LinkError if they don't come whole."""

    def opened(said: ImageFile) -> int | None:
        if (one := ranks.get(said.rank)) is None:
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(said.image, flags, 0o600, dir_fd=one.images) if said.image else os.dup(one.ring)

    begun = time.monotonic()
    size = await receive_files(reader, writer, opened, patience)
    say(f"{show_size(size)} of processes have come in {time.monotonic() - begun:.2f} s.")


def _check_hosts(move: Move, hosts: Sequence[Host]) -> None:
    """Raise ProtocolError where there is no place for the ranks that have come."""
    if len(hosts) <= move.index or hosts[move.index].ranks != move.hosts[move.index].ranks:
        raise ProtocolError(f"The hosts {hosts!r:.80} lack the one in whose place ranks have come.")


def _known(hosts: Sequence[Host], last: HandOver) -> list[Arrived]:
    """Return what the agent that is left knew of the ranks, as if it was said here: nobody says it again."""
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}
    if unknown := {*last.at_end, *(rank for rank, *_ in last.ended)} - host_of.keys():
        raise ProtocolError(f"It tells of ranks {unknown!r:.80}, which the job has not.")
    said: list[tuple[int, agents.AgentMessage]] = [
        (rank, agents.Said(rank, protocol.encode(protocol.AtEnd(rank)).decode())) for rank in last.at_end
    ]
    said += [(rank, agents.Ended(rank, status, told)) for rank, status, told in last.ended]
    return [Arrived(host_of[rank], message) for rank, message in said]


class _Adopted(WorkerProcesses):
    """One start of ranks that have begun on another host."""

    def __init__(self, taken: _Taken, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._taken = taken
        last = taken.last
        self._said_before = taken.unheard
        if last.steps is not None:
            self._known_place = known_again(taken.move.index, last.hosts, last.steps)
        self._server_variables = self._of_server

    def _of_server(self, rank: int) -> Mapping[str, str]:
        local_rank = next(number for number, one in enumerate(self._taken.ranks) if one.rank == rank)
        return {
            **variables.PROXY_TOGETHER.to(self._taken.barrier.of(local_rank)),
            **variables.AGENT_PID.to(os.getpid()),
            softgpu.VARIABLE: self._settings.device_environment.get(softgpu.VARIABLE, ""),
        }

    def _open_for_workers(self) -> None:
        self._control, self._relay = ControlSocket(), self._taken.relay
        if self._taken.last.barrier:
            self._barrier = self._taken.barrier
            self._barrier.fill(bytes.fromhex(self._taken.last.barrier))

    def _prepare_worker(self, local_rank: int) -> None:
        pass  # it was

    def _start_worker(self, local_rank: int) -> Worker:
        return self._taken.ranks[local_rank].worker(self._children)

    def _proxies(self) -> Proxies | None:
        proxies = super()._proxies()
        assert proxies is not None
        for one in self._taken.ranks:
            one.adopt(proxies, self._taken.relay)
        return proxies
