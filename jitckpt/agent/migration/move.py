"""Makes a worker's processes anew on the same host: dumped by CRIU while a recovery holds them, and restored.

They have the same numbers, memory, threads and files; what leads to the agent is new. Whoever calls this is
the agent's supervisor thread, which alone reads and writes those sockets.
"""

import array
import contextlib
import fcntl
import itertools
import os
import selectors
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.store_relay import StoreError, StoreRelay
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import Proxies
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError, Options
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import show_size
from jitckpt.decisions import belongings
from jitckpt.decisions.belongings import Carried, Surroundings
from jitckpt.errors import JitckptError
from jitckpt.events import EventLog
from jitckpt.ring.copies import Copier
from jitckpt.system import network_lock
from jitckpt.system.lifeline import Lifeline
from jitckpt.wire.moves import DumpedRank

LIMIT = 120.0  # seconds for a dump, and for a restore: 2 and 3 s for 1 GB on two cores
READING_SECONDS = 30.0  # in which a worker that is held reads what it was sent before
ATTEMPTS = 2  # to restore
FIRST_FREE = 3  # descriptors: after the standard ones
MOST_BYTES = 1 << 20  # of a message
SO_PEEK_OFF = 42  # from asm-generic/socket.h
MOST_FILES = 16  # that come with one
# In the images, of the clocks of the host of the dump. Without it the restored processes go by this host's,
# as their servers do: by CRIU's own way they would get a time namespace in which the pause has not been.
CLOCKS = "timens-0.img"


class MoveError(JitckptError):
    """A worker could not be moved, and goes on as it was; the text is a sentence."""


@dataclass(frozen=True)
class _Message:
    """What was on its way from a worker. files: that came with it."""

    data: bytes
    files: Sequence[int]


class Mover:
    """Of one start of this host's workers."""

    def __init__(
        self,
        found: Criu,
        workers: Mapping[int, Worker],
        log: EventLog,
        say: Callable[[str], None],
        *,
        shared: Mapping[str, int],
        relay: StoreRelay,
    ) -> None:
        """workers: by rank. shared: memory of this process that all workers have mapped, by its name.

        relay: by which they reach the job's store.
        """
        self._criu, self._workers, self._log, self._say = found, workers, log, say
        self._shared, self.relay = dict(shared), relay
        self._told: set[int] = set()

    def begin(self, proxies: Proxies, copier: Copier | None = None) -> None:
        """Take note of who else speaks to the workers. copier: with several hosts."""
        self.proxies, self._copier = proxies, copier

    def check(self, rank: int) -> None:
        """Say once what keeps a rank's worker from being moved, if there is something."""
        if rank in self._told:
            return
        self._told.add(rank)
        try:
            self.look(rank)
        except (MoveError, OSError) as error:
            self._log.write("not_movable", rank=rank, text=str(error))
            self._say(f"the worker process of rank {rank} could not be moved: {error}")

    def move(self, rank: int) -> None:
        """Make the rank's worker anew. If that can't be done it stays as it was, or it has ended."""
        begun = time.monotonic()
        try:
            what, own_clock = self.look(rank), has_own_clock(self._workers[rank].pid)
            with (
                self._workers[rank].being_made_again(),
                nameless_folder() as folder,
                self.store_at_rest(what) as stores,
            ):
                self.wait_until_read({**self.sockets(rank), **stores})
                try:
                    dumped = self.dump(rank, folder, what)
                    size = sum(os.stat(name, dir_fd=folder).st_size for name in os.listdir(folder))
                    pids = self.pids(rank, folder)
                    reap(pids)
                    restored = self.restore(rank, folder, pids, what, stores, keeps_clock=own_clock)
                except (CriuError, OSError):
                    network_lock.unlock(criu.locks(folder))
                    raise
        except (MoveError, CriuError, StoreError, OSError) as error:
            self._log.write("move_failed", rank=rank, text=str(error))
            self._say(f"the worker process of rank {rank} was not moved: {error}")
            return
        seconds = time.monotonic() - begun
        self._log.write(
            "worker_moved",
            rank=rank,
            pids=pids,
            bytes=size,
            dump=dumped,
            restore=restored,
            seconds=seconds,
        )
        count = f"{len(pids)} process{'es' if len(pids) > 1 else ''}"
        self._say(f"rank {rank} was made anew by CRIU: {count}, {show_size(size)}, in {seconds:.2f} s.")

    def worker(self, rank: int) -> Worker:
        return self._workers[rank]

    def look(self, rank: int, *, elsewhere: bool = False, into_memory: bool = True) -> Carried:
        """Return how the belongings of the rank's processes are carried. Raises MoveError or OSError.

        elsewhere: to another host. into_memory: the images go there.
        """
        processes = looked_at.tree(self._workers[rank].pid)
        servers = self.proxies.server_processes(rank)
        sockets = {os.fstat(one.fileno()).st_ino: name for name, one in self.sockets(rank).items()}
        what = belongings.carried(
            processes,
            looked_at.sockets(),
            Surroundings(
                sockets | {inode: _store(inode) for inode in self.relay.sockets},
                dict(reversed([(_identity(number), number) for number in range(FIRST_FREE)])),
                servers,
                set().union(*map(looked_at.sockets_of, servers)),
                elsewhere,
            ),
        )
        if what.obstacles:
            raise MoveError(what.obstacles[0])
        if missing := set(sockets.values()) - {end.name for end in what.sockets}:
            raise MoveError(f"It has closed its socket to the launcher ({min(missing)}).")
        needed, free = sum(process.memory for process in processes), looked_at.available_memory()
        if into_memory and needed > free:
            raise MoveError(f"Its image needs {show_size(needed)} of memory, and {show_size(free)} are free.")
        return what

    def pids(self, rank: int, folder: int) -> list[int]:
        """Return who has been dumped, the worker first: others may have come since they were looked at."""
        worker = self._workers[rank].pid
        return [worker, *(pid for pid in criu.processes(folder) if pid != worker)]

    def sockets(self, rank: int) -> dict[str, socket.socket]:
        worker = self._workers[rank]
        copies = {} if worker.copies is None else {"copies": worker.copies}
        return {"agent": worker.socket, **copies, **self.proxies.sockets(rank)}

    @contextlib.contextmanager
    def store_at_rest(self, what: Carried) -> Iterator[dict[str, socket.socket]]:
        """Give the sockets by which the processes reach the job's store; meanwhile they don't.

        What is put there in their places is served afterwards. Raises StoreError.
        """
        names = {end.name for end in what.sockets}
        stores = {_store(inode): one for inode, one in self.relay.sockets.items() if _store(inode) in names}
        try:
            self.relay.rest(list(stores.values()))
            yield stores
        finally:
            self.relay.go_on(list(stores.values()))

    def wait_until_read(self, sockets: Mapping[str, socket.socket]) -> None:
        """Wait until the worker has read what it was sent: CRIU does not keep it. Raises MoveError."""
        until = time.monotonic() + READING_SECONDS
        while any(map(_unread, sockets.values())):
            if time.monotonic() > until:
                raise MoveError(f"It has not read what it was sent within {READING_SECONDS:g} s.")
            time.sleep(0.001)

    def told_of(
        self,
        rank: int,
        pids: Sequence[int],
        what: Carried,
        *,
        stores: Mapping[str, socket.socket],
        said: Mapping[str, Sequence[bytes]],
        files: Mapping[str, int],
    ) -> DumpedRank:
        """Return what is to be known of a dumped rank; `said` and `files` as a DumpedRank has them.

        stores: by which it reaches the job's store.
        """
        names = {end.fileno(): name for name, end in {**self.sockets(rank), **stores}.items()}
        return DumpedRank(
            rank=rank,
            pids=tuple(pids),
            sockets=tuple((end.inode, end.kind, end.name) for end in what.sockets),
            outputs=what.outputs,
            memory=what.memory,
            folders=what.folders,
            said={name: [data.hex() for data in messages] for name, messages in said.items()},
            conversations={name: self.relay.conversations([end])[0].hex() for name, end in stores.items()},
            askers=tuple(
                (names[end.fileno()], process, tuple(ended.items()))
                for end, process, ended in self.proxies.servers.ended(rank)
            ),
            files=dict(files),
        )

    def dump(
        self, rank: int, folder: int, what: Carried, limit: float = LIMIT, *, leaves_running: bool = False
    ) -> float:
        """Return the seconds, at most `limit`. Raises CriuError; then the worker runs on as it was."""
        external = [*(f"unix[{end.inode}]" for end in what.sockets), *what.external]
        ghosts = max(what.ghosts, criu.SOONEST_GHOST)
        worker, begun = self._workers[rank], time.monotonic()
        criu.dump(
            self._criu,
            worker.pid,
            Options(
                folder,
                limit,
                external,
                ghosts=ghosts,
                variables=worker.mark,
                leaves_running=leaves_running,
            ),
        )
        return time.monotonic() - begun

    def restore(
        self,
        rank: int,
        folder: int,
        pids: Sequence[int],
        what: Carried,
        stores: dict[str, socket.socket],
        *,
        keeps_clock: bool = False,
        limit: float = LIMIT,
    ) -> float:
        """Make the dumped processes again, whose ends were waited for; return the seconds.

        stores: the new sockets are put there. keeps_clock: for them no time has passed, in a time namespace
        of their own. Raises CriuError or OSError; then the worker counts as killed.
        """
        begun = time.monotonic()
        if not keeps_clock:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(CLOCKS, dir_fd=folder)
        before = {**self.sockets(rank), **stores}
        on_their_way = {name: drained(one) for name, one in before.items()}
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    ends = self._restored(rank, folder, what, on_their_way, limit)
                    break
                except CriuError:
                    end_what_is_left(pids)
                    if attempt == ATTEMPTS:
                        raise
            for name, old in stores.items():
                self.relay.replace(old, ends[name])
                old.close()
            stores.update((name, ends.pop(name)) for name in list(stores))
            self._adopt(rank, self.sockets(rank), ends)
        except (CriuError, OSError):
            end_what_is_left(pids)
            self._workers[rank].not_made_again()
            raise
        finally:
            for message in itertools.chain(*on_their_way.values()):
                for file in message.files:
                    os.close(file)
        return time.monotonic() - begun

    def _restored(
        self,
        rank: int,
        folder: int,
        what: Carried,
        on_their_way: Mapping[str, Sequence[_Message]],
        limit: float,
    ) -> dict[str, socket.socket]:
        """Restore once; return the agent's ends of the new sockets. Raises CriuError or OSError."""
        ends: dict[str, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            inherit = list(self._inherited(rank, what, stack))
            try:
                for end in what.sockets:
                    ends[end.name], theirs = socket.socketpair(socket.AF_UNIX, end.kind)
                    stack.callback(theirs.close)
                    inherit.append((theirs.fileno(), f"socket:[{end.inode}]"))
                    for message in on_their_way[end.name]:  # said again, as the last that it had said
                        socket.send_fds(theirs, [message.data], message.files)
                options = Options(folder, limit, inherit=inherit, variables=self._workers[rank].mark)
                criu.restore(self._criu, options)
            except BaseException:
                for ours in ends.values():
                    ours.close()
                raise
        return ends

    def _inherited(self, rank: int, what: Carried, stack: contextlib.ExitStack) -> Iterator[tuple[int, str]]:
        """Yield files of this process that the restored ones get, with what CRIU calls them."""
        memory = {**self._shared, "jitckpt-local-state": self._workers[rank].ring_fd}
        for name in what.memory:
            if name in memory:
                yield memory[name], f"/memfd:{name}"
        yield from inherited_outputs(what.outputs, stack)

    def _adopt(self, rank: int, before: Mapping[str, socket.socket], ends: dict[str, socket.socket]) -> None:
        """Put what leads to the restored worker in the place of what led to the dumped one."""
        worker, selector = self._workers[rank], self.proxies.selector
        lifeline = lifeline_of(worker.pid)
        if worker.lifeline.is_watched:
            lifeline.watch()
        files = {name: one.fileno() for name, one in before.items()}
        files |= {"process": worker.pidfd, "lifeline": worker.lifeline.released}
        callbacks = {}
        for name, file in files.items():
            if file in selector.get_map():
                callbacks[name] = selector.unregister(file).data
        worker.made_again(ends["agent"], lifeline)
        for name, old in before.items():
            ends[name].setblocking(False)
            if name == "copies":
                worker.copies = ends[name]
                if self._copier is not None:
                    self._copier.replace(old, ends[name])
            elif name != "agent":
                self.proxies.replace(rank, old, ends[name])
                old.close()
        now = {name: one.fileno() for name, one in ends.items()}
        now |= {"process": worker.pidfd, "lifeline": lifeline.released}
        for name, callback in callbacks.items():
            selector.register(now[name], selectors.EVENT_READ, callback)


def has_own_clock(pid: int) -> bool:
    """Return whether a process was suspended once: its monotonic clock has stood still then."""
    try:
        return os.readlink(f"/proc/{pid}/ns/time") != os.readlink("/proc/self/ns/time")
    except FileNotFoundError:  # a kernel without time namespaces
        return False


def _store(inode: int) -> str:
    """Return what a socket to the relay of the job's store is called."""
    return f"store {inode}"


def inherited_outputs(
    outputs: Sequence[tuple[str, int]], stack: contextlib.ExitStack
) -> Iterator[tuple[int, str]]:
    """Yield this process's first files, as far as restored ones get them, with what CRIU calls them."""
    for key, number in outputs:
        copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
        stack.callback(os.close, copy)
        yield copy, key


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


def _unread(connection: socket.socket) -> bool:
    """Return whether the other end has still to read something."""
    left: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return left > 0


def drained(connection: socket.socket) -> list[_Message]:
    """Return what a worker had said last, and nobody has read."""
    found = []
    room = socket.CMSG_LEN(MOST_FILES * array.array("i").itemsize)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while True:
            data, ancillary, _, _ = connection.recvmsg(MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            files = array.array("i")
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    files.frombytes(content[: len(content) // files.itemsize * files.itemsize])
            found.append(_Message(data, list(files)))
    return found


def peeked(connection: socket.socket) -> list[bytes]:
    """Return what a worker has said that nobody has read, and leave it there. Raises MoveError or OSError."""
    found = []
    room = socket.CMSG_LEN(MOST_FILES * array.array("i").itemsize)
    connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
    try:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                data, ancillary, _, _ = connection.recvmsg(MOST_BYTES, room, flags)
                files = array.array("i")
                for _, _, content in ancillary:
                    files.frombytes(content[: len(content) // files.itemsize * files.itemsize])
                for file in files:
                    os.close(file)
                if files:
                    raise MoveError("It was just asking for a server.")
                if not data:
                    break
                found.append(data)
    finally:
        connection.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)
    return found


def reap(pids: Sequence[int]) -> None:
    """Take note of the ends of dumped processes, or their numbers would not be free.

    The root first: the others are this process's children once it has ended. Another thread may be quicker.
    """
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def end_what_is_left(pids: Sequence[int]) -> None:
    """End what a restore that has failed may have made, with the names that it may have left."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for name in os.listdir("/dev/shm"):
        if name.endswith(".ghost") and ".cr." in name:
            with contextlib.suppress(OSError):  # of another restore, which has ended meanwhile
                os.unlink(f"/dev/shm/{name}")


def lifeline_of(pid: int) -> Lifeline:
    """Return the agent's end of the lock that a restored worker has: in memory of its own by now."""
    for file in next(iter(looked_at.tree(pid))).files:
        if file.to.startswith("/memfd:jitckpt-lifeline"):
            return Lifeline(os.open(f"/proc/{pid}/fd/{file.number}", os.O_RDWR | os.O_CLOEXEC))
    return Lifeline()
