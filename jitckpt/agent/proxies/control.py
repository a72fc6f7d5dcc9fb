"""The agent's end of the sockets to its workers' device proxies, over which recoveries are agreed on.

With several hosts the first agent alone does the agreeing; the others pass on what their workers say.
"""

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from jitckpt.agent.proxies.agreement import Agreement
from jitckpt.agent.proxies.exchange import Exchange, ExchangeSettings
from jitckpt.agent.proxies.sentences import Sentences
from jitckpt.agent.proxies.servers import Servers, peer_of, session_of
from jitckpt.agent.proxies.state_transfer import Transfers
from jitckpt.agent.proxies.step_barrier import Messenger
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.system.door import Door
from jitckpt.wire import agents, proxy_messages
from jitckpt.wire.communicators import FOREVER
from jitckpt.wire.environment import PROXY_CONTROL, PROXY_SERVERS
from jitckpt.wire.proxy_messages import FromProxy, MessageError, ToProxy

LONGEST_PATH = 107  # bytes, of a socket
MOST_STRANGERS = 64  # that have connected and not said who they are
# Events by which the trainings are under way: what a worker has to its first step it has by then.
LEADER = 0  # the host whose agent does the agreeing


class ControlSocket:
    """Where the workers' proxies connect: sockets in a folder of its own, all for this user alone.

    servers: the one over which they ask for their servers.
    """

    def __init__(self) -> None:
        self._folder = _private_folder()
        self.path, self.servers_path = self._folder / "proxy", self._folder / "servers"
        self.socket, self.servers = _listening(self.path), _listening(self.servers_path)

    def close(self) -> None:
        """Take sockets and folder away. May be called twice."""
        self.socket.close()
        self.servers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def variables(self) -> dict[str, str]:
        """What the workers' environment needs."""
        return PROXY_CONTROL.to(str(self.path)) | PROXY_SERVERS.to(str(self.servers_path))


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(128)
    return listener


def _private_folder() -> Path:
    """Return a new folder in which a socket's path is short enough."""
    folder = Path(tempfile.mkdtemp(prefix="jitckpt-proxy-"))
    if len(os.fsencode(folder / "servers")) <= LONGEST_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="jitckpt-proxy-", dir="/tmp"))


@dataclass
class _Connection:
    """rank: None until it has said who it is."""

    socket: socket.socket
    rank: int | None = None


class WaitsBehindStep(Protocol):
    """Has all ranks of the job wait behind a step, and does with them there what it was asked for."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""

    def look(self) -> None:
        """Listen again, if that could not be done before."""

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing happens before."""

    servers_stay: bool  # while all ranks rest, if it can be

    def carry_out(self, go_on: Callable[[], None]) -> None:
        """All ranks rest. This host's servers have ended, unless they stay: `Proxies.servers_stay`.

        `go_on` is called once they are to go on.
        """

    def hear_host(self, arrived: Arrived) -> None:
        """Take in what another agent says of it. Raises KeyError if that makes no sense."""

    def lose_host(self, host: int) -> bool:
        """Return whether the lost host is not missed, as the job is suspended."""

    @property
    def suspended(self) -> bool:
        """Whether the processes of all hosts are in files, and this launcher is to end."""

    def note(self, event: str, details: Mapping[str, object]) -> None:
        """Take note of an event of the job."""

    def close(self) -> None:
        """Nobody is listened to any more."""


class Proxies:
    """The device proxies of one start of the workers. Used by the supervisor's thread alone.

    selector: once `watch` was called, that of whoever waits for what comes from the workers.
    """

    selector: selectors.BaseSelector

    def __init__(
        self,
        control: ControlSocket,
        sessions: Mapping[int, int],
        log: EventLog,
        *,
        say: Callable[[str], None],
        deadline: float,
        hosts: Hosts | None = None,
        messenger: Messenger | None = None,
        transfers: Transfers | None = None,
        exchange: ExchangeSettings | None = None,
        server_variables: Callable[[int], Mapping[str, str]] = lambda rank: {},
        suspension: WaitsBehindStep | None = None,
    ) -> None:
        """sessions: of each rank here the session that its worker leads. say: tells the user a sentence.

        deadline: seconds for each order of a recovery. messenger, transfers: of several hosts whose
        ranks' states stay. exchange: how, if ranks get other devices in the place of broken ones.
        suspension: of a job that can be suspended, or of which snapshots are made.
        """
        self._control, self._sessions, self._log, self._say = control, dict(sessions), log, say
        self._exchange = None if exchange is None else Exchange(exchange, list(sessions), log, say)
        self._more = server_variables
        self._suspension = suspension
        self.servers = Servers(control.servers, sessions, log, self._variables)
        self._hosts, self._messenger, self._transfers = hosts, messenger, transfers
        self._connections: dict[int, _Connection] = {}  # by rank
        self._open: list[_Connection] = []  # those of strangers too
        self._awaited = set(sessions)
        self._kept_orders: dict[int, bytes] = {}
        self.moved = False  # this host's ranks go on on another one
        self._sentences = Sentences()
        ranks = sorted(sessions if hosts is None else {rank for host in hosts.all for rank in host.ranks})
        self.leads = hosts is None or hosts.index == LEADER
        stay = suspension is not None and suspension.servers_stay
        self._agreement = (
            Agreement(ranks, deadline, self._tell, self._note, servers_stay=stay) if self.leads else None
        )
        self.recovers = True  # until that is given up
        self.switched_off = ""  # before a failure; what was said then
        self._is_resting = False  # something is done with the ranks that rest
        self._rest: Mapping[str, Any] | None = None  # where the ranks are that were made again
        self._checked = False  # whether this host's workers could be moved
        self.stragglers: set[int] = set()  # ranks that have let others wait for long

    @property
    def next_look(self) -> float | None:
        """The monotonic time at which `look` should be called, if nothing happens before."""
        agreed = self._agreement.next_look if self._agreement is not None else None
        looks = [agreed, self._door.opens_at, self.servers.next_look, 0.0 if self._can_leave else None]
        looks += [] if self._suspension is None else [self._suspension.next_look]
        return min((one for one in looks if one is not None), default=None)

    def _variables(self, rank: int, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Return what is another in the environment of a rank's server than in its worker's."""
        exchanged = {} if self._exchange is None else self._exchange.variables(rank, environment)
        return {**exchanged, **self._more(rank)}

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""
        self.selector = selector
        self._door = Door(self._control.socket, selector, self._accept)
        self.servers.watch(selector)
        if self._suspension is not None:
            self._suspension.watch(selector)
        for connection in self._open:
            self._listen_to(connection)
        if self._rest is not None:
            assert self._agreement is not None
            self._agreement.go_on_from(self._rest, time.monotonic())
        if not self._awaited:
            self._listen_no_more()
        if self._transfers is not None:
            selector.register(self._transfers.wake, selectors.EVENT_READ, self._go_on)

    def close(self) -> None:
        """Hang up; the selector may be closed by then."""
        for connection in self._open:
            connection.socket.close()
        self._control.close()
        self.servers.close()
        if self._suspension is not None:
            self._suspension.close()
        if self._transfers is not None:
            self._transfers.close()

    def look(self) -> None:
        """See what has not been done in time, and have this host's ranks leave it once they can."""
        if self._can_leave:
            self._leave()  # and hear first what has come meanwhile
            return
        self._door.look()
        self.servers.look()
        if self._suspension is not None:
            self._suspension.look()
        if self._agreement is not None:
            self._agreement.look(time.monotonic())

    def break_device(self, rank: int) -> None:
        """A rank's device is lost for good, in a rehearsal: every server from now on finds it so."""
        if self._exchange is not None:
            self._exchange.rehearse(rank)
            self.servers.end_spare(rank)  # which does not know it

    def sockets(self, rank: int) -> dict[str, socket.socket]:
        """Return the agent's ends of the sockets to a rank's device proxy, with what each is for."""
        asked = self.servers.sockets(rank)
        found = {f"servers {number}": one for number, one in enumerate(asked)}
        if rank in self._connections:
            found["control"] = self._connections[rank].socket
        return found

    def server_processes(self, rank: int) -> set[int]:
        """Return the servers of a rank."""
        return self.servers.processes(rank)

    def replace(self, rank: int, before: socket.socket, now: socket.socket) -> None:
        """A rank's worker was made again, with another socket in the place of one of `sockets`."""
        connection = self._connections.get(rank)
        if connection is not None and connection.socket is before:
            connection.socket = now
        else:
            self.servers.replace(before, now)

    @property
    def all_connected(self) -> bool:
        """Whether all workers here use their devices."""
        return self._connections.keys() == self._sessions.keys()

    @property
    def broken_devices(self) -> frozenset[str]:
        """This host's devices that no new server cures."""
        return frozenset() if self._exchange is None else self._exchange.broken

    def can_restart(self) -> None:
        """Take note that all ranks have registered how to save and restore."""
        if self._agreement is not None:
            self._agreement.can_restart()

    def ended(self, rank: int, failed: bool, how: str) -> None:
        """A worker of any host has ended; how: a clause."""
        self.servers.end(rank)
        if self._agreement is None:
            return
        if failed:
            self._agreement.lose(rank, how, time.monotonic())
        else:
            self._agreement.leave(rank, how, time.monotonic())

    def hear_host(self, arrived: Arrived) -> None:
        """Take in what another agent passes on. Raises KeyError or MessageError if it makes no sense."""
        match arrived.message:
            case agents.StepsCome() as said if self._messenger is not None:
                self._messenger.hear(arrived.host, said)
            case agents.ProxyGone(rank, why) if self._agreement is not None:
                self._agreement.leave(rank, why, time.monotonic())
            case agents.RanksMoved(ranks, size) as moved if self._agreement is not None:
                assert self._hosts is not None
                stays = self._hosts.all[arrived.host].ranks_of
                took = {"dump": moved.dump, "transfer": moved.transfer, "restore": moved.restore}
                more = {} if stays < 0 else {"ranks_of": stays}
                self._log.write("ranks_moved", host=arrived.host, ranks=ranks, bytes=size, **took, **more)
            case agents.ProxySays(rank, new_device) if self._agreement is not None:
                if new_device:
                    self._agreement.forget_failure(rank)
                self._hear(rank, arrived.data)
            case agents.ProxyOrder(rank) if self._agreement is None:
                self._give(rank, arrived.data)
            case agents.RanksMadeAgain():
                pass  # this host has not waited for it
            case message if isinstance(message, agents.OF_SNAPSHOTS) and self._suspension is not None:
                if isinstance(message, agents.DumpRanks) and not message.servers_stay:
                    self.servers.end_all(self._sessions)
                self._suspension.hear_host(arrived)

    @property
    def suspended(self) -> bool:
        """Whether all ranks of the job are in files, and no launcher of it is needed any more."""
        return self._suspension is not None and self._suspension.suspended

    def ends_without(self, host: int) -> bool:
        """Return whether a host that is lost is not missed."""
        return self._suspension is not None and self._suspension.lose_host(host)

    def lose_host(self, host: int) -> None:
        """A host is lost. Its ranks count as ended; if it was the one that agrees, nobody does any more."""
        if host == LEADER and self._agreement is None:
            reason = "A transparent recovery is impossible: the host that would lead it is lost."
            for rank in self._connections:
                self._send(rank, proxy_messages.encode(proxy_messages.GiveUp((FOREVER, 0), reason)))

    def _accept(self) -> None:
        accepted = self._door.accept()
        if accepted is None:
            return
        strangers = [one for one in self._open if one.rank is None]
        if len(strangers) >= MOST_STRANGERS:
            self._hang_up(strangers[0])  # who has had the longest time to say who it is
        connection = _Connection(accepted)
        self._open.append(connection)
        self._listen_to(connection)

    def _listen_to(self, connection: _Connection) -> None:
        self.selector.register(connection.socket, selectors.EVENT_READ, lambda: self._receive(connection))

    def _listen_no_more(self) -> None:
        self._door.close()
        self.servers.listen_no_more()
        self._control.close()

    def _receive(self, connection: _Connection) -> None:
        while True:
            try:
                data = connection.socket.recv(proxy_messages.MAX_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                if not data:
                    self._hang_up(connection)
                    return
                if connection.rank is None:
                    connection.rank = self._greet(connection, data)
                self._pass_on(connection.rank, data)
            except Exception as error:  # whatever comes of a message: it must not end the control thread
                what = error if isinstance(error, MessageError) else f"{error!r:.300}"
                self._log.write("warning", text=f"a device proxy is not listened to any more: {what}")
                self._hang_up(connection)
                return

    def _greet(self, connection: _Connection, data: bytes) -> int:
        """Return the rank of who has connected. Raises MessageError unless it is a worker of ours."""
        hello = proxy_messages.decode(data)
        if not isinstance(hello, proxy_messages.Hello):
            raise MessageError(f"A device proxy begins with {type(hello).__name__} in place of Hello.")
        process, user = peer_of(connection.socket)
        if user != os.getuid() or session_of(process) != self._sessions.get(hello.rank):
            raise MessageError(f"Process {process} of user {user} says that it is rank {hello.rank}.")
        if hello.rank in self._connections:
            raise MessageError(f"Process {process} is the second of rank {hello.rank} that uses the device.")
        self._connections[hello.rank] = connection
        self._log.write("proxy_connected", rank=hello.rank, pid=process, calls=hello.table)
        self._awaited.discard(hello.rank)
        if not self._awaited:  # nobody else is listened to, and nothing is left should this agent be killed
            self._listen_no_more()
        return hello.rank

    def _close(self, connection: _Connection) -> None:
        self.selector.unregister(connection.socket)
        self._open.remove(connection)
        connection.socket.close()
        if connection.rank is not None:
            del self._connections[connection.rank]

    def _hang_up(self, connection: _Connection) -> None:
        self._close(connection)
        if connection.rank is not None:
            why = "its device proxy has hung up"
            if self._agreement is not None:
                self._agreement.leave(connection.rank, why, time.monotonic())
            else:
                self._to_leader(agents.ProxyGone(connection.rank, why))

    def _pass_on(self, rank: int, data: bytes) -> None:
        new_device = False
        match proxy_messages.decode(data):
            case proxy_messages.Ids(recovery, copy=(copy,)) if self._transfers is not None:
                self._transfers.offer(recovery, copy)
            case proxy_messages.Done() if self._transfers is not None:
                self._transfers.end(rank)
            case proxy_messages.Stopped() as stopped if self._exchange is not None:
                new_device = self._exchange.hear(rank, stopped)
        if self._agreement is None:
            self._to_leader(agents.ProxySays(rank, new_device), data)
            return
        if new_device:
            self._agreement.forget_failure(rank)
        self._hear(rank, data)

    def _hear(self, rank: int, data: bytes) -> None:
        assert self._agreement is not None
        message = proxy_messages.decode(data)
        if not isinstance(message, FromProxy):
            raise MessageError(f"A device proxy says {type(message).__name__}, which is an agent's to say.")
        self._agreement.hear(rank, message, time.monotonic())
        if self._agreement.at_rest and self._suspension is not None and not self._is_resting:
            self._is_resting = True
            if not self.servers_stay:
                self.servers.end_all(self._sessions)
            self._suspension.carry_out(self._rest_is_over)

    @property
    def servers_stay(self) -> bool:
        """Whether they do, at this rest; told to the first host alone."""
        return self._agreement is not None and self._agreement.servers_stay

    def _rest_is_over(self) -> None:
        assert self._agreement is not None
        self._is_resting = False
        self._agreement.go_on(time.monotonic())

    def _to_leader(self, message: agents.AgentMessage, data: bytes = b"") -> None:
        assert self._hosts is not None
        self._hosts.send(LEADER, message, data)

    def _tell(self, rank: int, order: ToProxy) -> None:
        try:
            data = proxy_messages.encode(order)
        except MessageError as error:  # the order's deadline will find that it was not carried out
            self._log.write("warning", rank=rank, text=str(error))
            return
        if rank in self._sessions:
            self._give(rank, data)
        else:
            assert self._hosts is not None
            self._hosts.send(self._hosts.host_of(rank), agents.ProxyOrder(rank), data)

    def _give(self, rank: int, data: bytes) -> None:
        """Tell a rank here an order, once what it takes from another host is there."""
        if self._transfers is not None:
            match proxy_messages.decode(data):
                case proxy_messages.Replay(source=(copy,)) as order if copy.rank not in self._sessions:
                    self._transfers.begin(rank, order)
                    return
                case proxy_messages.Stop() | proxy_messages.GiveUp():
                    self._transfers.break_off(rank)
        self._kept_orders.pop(rank, None)  # of a recovery that is over
        exchange, told = self._exchange, proxy_messages.decode(data)
        if exchange is not None and isinstance(told, proxy_messages.Validated) and not self._checked:
            self._checked = True  # its training is under way
            exchange.check()
        if exchange is not None and isinstance(told, proxy_messages.Restart):
            together = self._sessions.keys() if exchange.leaving else exchange.due
            if rank in together:
                self._keep(rank, data, together, exchange)
                return
        self._send(rank, data)

    def _keep(self, rank: int, data: bytes, together: Collection[int], exchange: Exchange) -> None:
        """Keep an order to restart until all these ranks have one, and are at rest; then carry out all."""
        self._kept_orders[rank] = data
        if not set(together) <= self._kept_orders.keys() or exchange.leaving:
            return  # `look` has them leave: the ranks of other hosts get their orders first
        orders, self._kept_orders = self._kept_orders, {}
        for one in orders:
            self.servers.end_now(one)
        exchange.carry_out(list(orders))
        for one, order in orders.items():
            self._send(one, order)

    @property
    def _can_leave(self) -> bool:
        """Whether all ranks of this host are to leave it, and wait for that."""
        leaving = self._exchange is not None and self._exchange.leaving
        return leaving and bool(self._sessions) and self._sessions.keys() <= self._kept_orders.keys()

    def _leave(self) -> None:
        assert self._exchange is not None
        orders, self._kept_orders = self._kept_orders, {}
        self.servers.end_all(self._sessions)
        self.moved = self._exchange.leave(orders)
        for rank, order in orders.items():
            if not self.moved:
                self._send(rank, order)
            elif self.leads:  # what the rank is told from here on goes to who sees to it there
                self._close(self._connections[rank])
                self.servers.leave(rank)
                if self._transfers is not None:
                    self._transfers.end(rank)
                del self._sessions[rank]

    def adopt(self, rank: int, control: socket.socket) -> None:
        """A worker that has come from another host has this socket in the place of the one that it had."""
        control.setblocking(False)
        connection = _Connection(control, rank)
        self._open.append(connection)
        self._connections[rank] = connection
        self._awaited.discard(rank)

    @property
    def at_this_rest(self) -> Mapping[str, Any]:
        """What `go_on_from` needs, while all ranks rest."""
        assert self._agreement is not None
        return self._agreement.at_this_rest

    def go_on_from(self, rest: Mapping[str, Any]) -> None:
        """All workers were adopted as they were there; to be called before `watch`."""
        self._rest = rest

    def _go_on(self) -> None:
        assert self._transfers is not None
        for ready in self._transfers.take():
            if ready.failed:  # told in the rank's place: the failure is not its own
                alarm = proxy_messages.Alarm(ready.order.recovery, 0, ready.failed)
                self._pass_on(ready.rank, proxy_messages.encode(alarm))
            else:
                self._send(ready.rank, proxy_messages.encode(ready.order))

    def _send(self, rank: int, data: bytes) -> None:
        if rank in self._connections:
            # One that has just ended, or does not read: the agreement finds that out by its deadline.
            with contextlib.suppress(OSError):
                self._connections[rank].socket.send(data)

    def _note(self, event: str, **details: object) -> None:
        self._log.write(event, **details)
        if self._suspension is not None:
            self._suspension.note(event, details)
        match event:
            case "recovery_given_up" | "switched_off":
                self.recovers = False
                self.switched_off = str(details["text"]) if event == "switched_off" else ""
            case "straggler":
                self.stragglers |= set(cast(list[int], details["ranks"]))
        if sentence := self._sentences.of(event, details):
            self._say(sentence)
