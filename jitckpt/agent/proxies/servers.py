"""The servers of the device proxies, which the agent starts, waits for, and ends with their workers.

A worker asks for one over a socket of its own (native/proxy/client/agent_starter.cpp), and gets a file that
stands for the process. So a server is no child of the training's, which may wait for all that it has.
"""

import array
import contextlib
import fcntl
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jitckpt.agent.processes import children
from jitckpt.events import EventLog
from jitckpt.system import descriptor_limit
from jitckpt.system.door import Door

MAX_BYTES = 8192  # of a question
MAX_ANSWER = 4096
MOST_ASKERS = 32  # of one rank
ENDING_SECONDS = 5.0  # what a killed server takes at most, unless it is stuck in its driver
ENTER = shutil.which("nsenter") or "/usr/bin/nsenter"  # of util-linux
_FILES = 6  # that come with "start": those that the server finds as 1 to 5, and its environment
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
_PEER = struct.Struct("iii")  # struct ucred: process, user, group


@dataclass(eq=False)
class _Server:
    """file: its pidfd, while it runs. end: how it has ended, as the end of a sentence; "" while it runs."""

    process: int
    file: int
    end: str = ""


@dataclass(eq=False)
class _Asker:
    """A worker's library. process: its number, which the kernel tells."""

    socket: socket.socket
    rank: int
    process: int
    servers: dict[int, _Server] = field(default_factory=dict)  # by process number


class Servers:
    """Those of one start of this host's workers. Used by the supervisor's thread alone."""

    def __init__(
        self,
        listener: socket.socket,
        sessions: Mapping[int, int],
        log: EventLog,
        variables: Callable[[int, Mapping[str, str]], Mapping[str, str]] = lambda rank, environment: {},
    ) -> None:
        """listener: where the workers connect. sessions: of each rank here the one that its worker leads.

        variables: what the environment of a rank's server has beside, or in the place of, its worker's.
        """
        self._listener, self._log, self._variables = listener, log, variables
        self._ranks = {session: rank for rank, session in sessions.items()}
        self._askers: list[_Asker] = []

    def ended(self, rank: int) -> list[tuple[socket.socket, int, dict[int, str]]]:
        """Return a rank's askers: socket, process, and how each of its servers has ended."""
        return [
            (one.socket, one.process, {server.process: server.end for server in one.servers.values()})
            for one in self._asking(rank)
        ]

    def _asking(self, rank: int) -> list[_Asker]:
        """Return a rank's askers that may ask still."""
        return [one for one in self._askers if one.rank == rank and one.socket.fileno() >= 0]

    def adopt(self, rank: int, connection: socket.socket, process: int, ended: Mapping[int, str]) -> None:
        """A worker that has come from another host asks over this socket; its servers there have ended."""
        connection.setblocking(False)
        servers = {number: _Server(number, -1, how) for number, how in ended.items()}
        self._askers.append(_Asker(connection, rank, process, servers))

    def _watch_asker(self, asker: _Asker) -> None:
        self._selector.register(asker.socket, selectors.EVENT_READ, lambda: self._receive(asker))

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""
        self._selector = selector
        for asker in self._askers:
            self._watch_asker(asker)
        self._door = Door(self._listener, selector, self._accept)

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing happens before."""
        return self._door.opens_at

    def look(self) -> None:
        """Listen again, if there were no descriptors for those that come."""
        self._door.look()

    def listen_no_more(self) -> None:
        """Nobody else will ask: all workers have come."""
        self._door.close()

    def end(self, rank: int) -> None:
        """End those of a rank whose worker has ended."""
        for asker in self._askers:
            if asker.rank == rank:
                _kill(asker)

    def end_all(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.end_now(rank)

    def end_now(self, rank: int) -> None:
        """End those of a rank, and wait for that."""
        self.end(rank)
        for asker in self._askers:
            for server in asker.servers.values():
                if asker.rank == rank and not server.end and _wait(server, ENDING_SECONDS):
                    self._note_end(asker, server)

    def leave(self, rank: int) -> None:
        """A rank goes on on another host; its servers here have ended."""
        for asker in self._asking(rank):
            self._hang_up(asker)

    def sockets(self, rank: int) -> list[socket.socket]:
        """Return the agent's ends of the sockets over which a rank's worker asks for servers."""
        return [one.socket for one in self._asking(rank)]

    def processes(self, rank: int) -> set[int]:
        """Return a rank's servers that live."""
        mine = (server for one in self._askers if one.rank == rank for server in one.servers.values())
        return {server.process for server in mine if not server.end}

    def replace(self, before: socket.socket, now: socket.socket) -> None:
        """A worker was made again: it asks over another socket, whose end is `now`."""
        asker = next(one for one in self._askers if one.socket is before)
        asker.socket = now

    def end_spare(self, rank: int) -> None:
        """End the one that waits to take the place of the rank's server: the newest, where there are two."""
        for asker in self._askers:
            living = [server for server in asker.servers.values() if not server.end]
            if asker.rank == rank and len(living) > 1:
                signal.pidfd_send_signal(living[-1].file, signal.SIGKILL)

    def close(self) -> None:
        """End all that there are, and wait for that; the selector may be closed by then."""
        for asker in self._askers:
            _kill(asker)
        until = time.monotonic() + ENDING_SECONDS
        for asker in self._askers:
            asker.socket.close()
            for server in asker.servers.values():
                if server.end:
                    continue
                if not _wait(server, max(0.0, until - time.monotonic())):
                    text = f"the device proxy's server (process {server.process}) is killed, but does not end"
                    self._log.write("warning", rank=asker.rank, text=text)
                os.close(server.file)
        self._askers.clear()

    def _accept(self) -> None:
        connection = self._door.accept()
        if connection is not None:
            process, user = peer_of(connection)
            rank = self._ranks.get(session_of(process) or 0)
            known = sum(one.rank == rank and one.socket.fileno() >= 0 for one in self._askers)
            if user != os.getuid() or rank is None or known == MOST_ASKERS or not _lives_here(process):
                connection.close()
                return
            asker = _Asker(connection, rank, process)
            self._askers.append(asker)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(asker))

    def _receive(self, asker: _Asker) -> None:
        try:
            with _received(asker.socket) as (question, files):
                if not question:
                    self._hang_up(asker)  # it has ended its servers, or will have ended
                    return
                answer, given = self._answer(asker, question, files)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given).tobytes())]
                asker.socket.sendmsg([answer.encode()[:MAX_ANSWER]], rights if given else [])
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(asker)

    def _hang_up(self, asker: _Asker) -> None:
        self._selector.unregister(asker.socket)
        asker.socket.close()
        if all(server.end for server in asker.servers.values()):
            self._askers.remove(asker)

    def _answer(self, asker: _Asker, question: bytes, files: list[int]) -> tuple[str, list[int]]:
        """Return what a worker is told, with the file that it gets."""
        match question.split(b" ", 1):
            case [b"start", path] if len(files) == _FILES:
                try:
                    server = _start(
                        os.fsdecode(path), asker.process, files, partial(self._variables, asker.rank)
                    )
                except (OSError, ValueError) as error:
                    return getattr(error, "strerror", None) or str(error), []
                asker.servers[server.process] = server
                self._selector.register(
                    server.file, selectors.EVENT_READ, lambda: self._has_ended(asker, server)
                )
                self._log.write("server_started", rank=asker.rank, pid=server.process)
                return f"started {server.process}", [server.file]
            case [b"end", number] if number.isdigit() and (found := asker.servers.get(int(number))):
                if not found.end:
                    self._has_ended(asker, found)
                return found.end or "has not ended", []
        return "the agent does not understand what it is asked", []

    def _has_ended(self, asker: _Asker, server: _Server) -> None:
        if not server.end and _wait(server, 0):
            self._note_end(asker, server)

    def _note_end(self, asker: _Asker, server: _Server) -> None:
        self._selector.unregister(server.file)
        os.close(server.file)
        self._log.write("server_ended", rank=asker.rank, pid=server.process, how=server.end)


def _kill(asker: _Asker) -> None:
    for server in asker.servers.values():
        if not server.end:  # it may have ended, but nobody else has its number before it is waited for
            signal.pidfd_send_signal(server.file, signal.SIGKILL)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket, as the kernel knows them."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def session_of(process: int) -> int | None:
    """Return the session of a process; None if it has ended."""
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return None


def _lives_here(process: int) -> bool:
    """Return whether a process sees the same files, processes and network as this one.

    In a container a server has to be started from within.
    """
    try:
        return os.path.samefile(f"/proc/{process}/root", "/") and all(
            os.readlink(f"/proc/{process}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
            for name in _NAMESPACES
        )
    except OSError:  # it has ended, or is another user's by now
        return False


@contextlib.contextmanager
def _received(connection: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Give a message, and for a while the files that came with it. Raises BlockingIOError without one."""
    files = array.array("i")
    # socket.recv_fds would leave them to every process that this one starts: it passes no flags on.
    room = socket.CMSG_LEN(_FILES * files.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) // files.itemsize * files.itemsize])
    try:
        yield b"?" if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else data, list(files)
    finally:
        for file in files:
            os.close(file)


def _start(
    path: str, client: int, files: list[int], more: Callable[[Mapping[str, str]], Mapping[str, str]]
) -> _Server:
    """Start a server for that process with its files, and `more` variables. Raises OSError or ValueError."""
    *theirs, variables = files
    lines = os.fsdecode(os.pread(variables, os.fstat(variables).st_size, 0)).split("\0")
    environment = {name: value for name, _, value in (line.partition("=") for line in lines) if name}
    environment |= more(environment)
    with contextlib.ExitStack() as copies:
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
        for place, file in enumerate(theirs, 1):
            # One whose own number is no place's: none is overwritten before its turn.
            copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FILES)
            copies.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, place))
        actions += [(os.POSIX_SPAWN_CLOSE, file) for file in _inheritable() if file >= _FILES]
        # Client and server compare their clocks, and one that was suspended has a clock of its own.
        clock = _other_clock(client)
        command = [ENTER, ENTER, f"--time={clock}", "--"] if clock else [path]
        with children.starting() as note:
            process = os.posix_spawn(
                command[0],
                [*command[1:], path, str(client)],
                environment,
                file_actions=actions,
                setsid=True,  # what the terminal sends is not for it
                setsigmask=(),
                setsigdef=signal.valid_signals(),
            )
            note(process)
    descriptor_limit.give_back(process)
    try:
        return _Server(process, os.pidfd_open(process))
    except OSError:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        children.waited_for(process)
        raise


def _other_clock(process: int) -> str:
    """Return the time namespace of a process that is not in this one's; else ""."""
    path = f"/proc/{process}/ns/time"
    try:
        return "" if os.readlink(path) == os.readlink("/proc/self/ns/time") else path
    except FileNotFoundError:  # a kernel without them
        return ""


def _inheritable() -> Iterator[int]:
    """Yield the files that this process was given itself and would pass on."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, which is closed
            if os.get_inheritable(int(name)):
                yield int(name)


def _wait(server: _Server, seconds: float) -> bool:
    """Return whether the server ends within so many seconds, and note how."""
    poll = select.poll()
    poll.register(server.file, select.POLLIN)
    if not poll.poll(1000 * seconds):
        return False
    ended = os.waitid(os.P_PIDFD, server.file, os.WEXITED)
    children.waited_for(server.process)
    assert ended is not None
    if ended.si_code == os.CLD_EXITED:
        server.end = f"ended with status {ended.si_status}"
    else:
        server.end = f"was ended by {signal.strsignal(ended.si_status)}"
    return True
