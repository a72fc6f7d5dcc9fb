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
import stat
import struct
import termios
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.side_by_side import Failure, fitting, made_again, side_by_side
from jitckpt.agent.migration.store_relay import StoreError, StoreRelay
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import Proxies
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, Options
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import show_size
from jitckpt.decisions import belongings
from jitckpt.decisions.belongings import Carried, Surroundings, shown
from jitckpt.errors import JitckptError
from jitckpt.events import EventLog
from jitckpt.ring.copies import Copier
from jitckpt.system import network_lock
from jitckpt.system.lifeline import Lifeline
from jitckpt.system.own_outputs import INPUT, is_closed_to_us
from jitckpt.wire.moves import DumpedRank, WrittenFile

LIMIT = 120.0  # seconds for a dump, and for a restore: 2 and 3 s for 1 GB on two cores
READING_SECONDS = 30.0  # in which a worker that is held reads what it was sent before
FIRST_FREE = 3  # descriptors: after the standard ones
MOST_BYTES = 1 << 20  # of a message
SO_PEEK_OFF = 42  # from asm-generic/socket.h
MOST_FILES = 16  # that come with one
WITH_JOB = "ended with its job"  # a server that stays where the image is made has no other end there
_STANDARD = ("input", "output", "error output")
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


@dataclass(frozen=True)
class Dumped:
    """A rank whose processes are images in this folder, or are about to be: then there are no pids.

    pids: the worker first. stores: by which it reaches the job's store, which rest. keeps_clock: no time
    passes for it, in a time namespace of its own. needed: bytes of memory for the images. seconds: of the
    dump.
    """

    rank: int
    folder: int
    what: Carried
    stores: dict[str, socket.socket]
    keeps_clock: bool = False
    needed: int = 0
    pids: Sequence[int] = ()
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Of the images."""
        return sum(os.stat(name, dir_fd=self.folder).st_size for name in os.listdir(self.folder))


@dataclass(frozen=True)
class _Made:
    """A rank that was made again: this process's ends of the sockets to it, and the seconds."""

    ends: dict[str, socket.socket]
    seconds: float


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
        hosts: Collection[str] = (),
    ) -> None:
        """workers: by rank. shared: memory of this process that all workers have mapped, by its name.

        relay: by which they reach the job's store. hosts: the addresses of the job's, where it
        has several: the ranks may have to go on on another one.
        """
        self._hosts, self._criu = hosts, found
        self._workers, self._log, self._say = workers, log, say
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
        where = ""
        try:
            self.look(rank)
            if self._hosts:
                where = " to another host"
                self.look(rank, elsewhere=True, with_files=True)
        except (MoveError, OSError) as error:
            self._log.write("not_movable", rank=rank, text=str(error))
            self._say(f"the worker process of rank {rank} could not be moved{where}: {error}")

    def move(self, ranks: Sequence[int]) -> None:
        """Make the ranks' workers anew. One for which that can't be done stays as it was, or it has ended."""
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._workers[ranks[0]].being_made_again())
            ready = []
            for rank in ranks:
                try:
                    folder = stack.enter_context(nameless_folder())
                    ready.append(self.prepared(rank, folder, stack))
                except (MoveError, StoreError, OSError) as error:
                    self._not_moved(rank, error)
            dumped = []
            for one, found in zip(ready, self.dump_all(ready), strict=True):
                if isinstance(found, Dumped):
                    dumped.append(found)
                    reap(found.pids)
                else:
                    self._not_moved(one.rank, found)
                    network_lock.unlock(criu.locks(one.folder))
            restored = self.restore(dumped)
            for one in dumped:
                took = restored[one.rank]
                if isinstance(took, float):
                    self._moved(one, took, time.monotonic() - begun)
                else:
                    self._not_moved(one.rank, took)
                    network_lock.unlock(criu.locks(one.folder))

    def _moved(self, one: Dumped, restored: float, seconds: float) -> None:
        self._log.write(
            "worker_moved",
            rank=one.rank,
            pids=one.pids,
            bytes=one.bytes,
            dump=one.seconds,
            restore=restored,
            seconds=seconds,
        )
        count = f"{len(one.pids)} process{'es' if len(one.pids) > 1 else ''}"
        size = show_size(one.bytes)
        self._say(f"rank {one.rank} was made anew by CRIU: {count}, {size}, in {seconds:.2f} s.")

    def _not_moved(self, rank: int, why: Exception) -> None:
        self._log.write("move_failed", rank=rank, text=str(why))
        self._say(f"the worker process of rank {rank} was not moved: {why}")

    def worker(self, rank: int) -> Worker:
        return self._workers[rank]

    def look(
        self, rank: int, *, elsewhere: bool = False, into_memory: bool = True, with_files: bool = False
    ) -> Carried:
        """Return how the belongings of the rank's processes are carried. Raises MoveError or OSError.

        elsewhere: to another host. into_memory: the images go there. with_files: that they write.
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
                self._hosts,
                looked_at.written_here(self._workers[rank].pid) if with_files else {},
            ),
        )
        if what.obstacles:
            raise MoveError(shown(what.obstacles))
        if missing := set(sockets.values()) - {end.name for end in what.sockets}:
            raise MoveError(f"It has closed its socket to the launcher ({min(missing)}).")
        self._need_lengths_of_its_own(rank)
        for _, number in what.outputs:
            if is_closed_to_us(number):
                raise MoveError(
                    f"Its {_STANDARD[number]} is a pipe of another user's, which CRIU may not open anew; "
                    f"{'with < /dev/null it has none' if number == INPUT else 'with | cat it is your own'}."
                )
        needed, free = sum(process.memory for process in processes), looked_at.available_memory()
        if into_memory and needed > free:
            raise MoveError(f"Its image needs {show_size(needed)} of memory, and {show_size(free)} are free.")
        return what

    def _need_lengths_of_its_own(self, rank: int) -> None:
        """A rank is held, but threads of it may write between the dump of another and its restore."""
        for other, worker in self._workers.items():
            if other == rank:
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that one has ended
                if found := looked_at.shared_lengths(self._workers[rank].pid, worker.pid):
                    raise MoveError(
                        f"It has {found[0]} open, which rank {other} writes, and CRIU does not make it again "
                        "once that has grown; ranks that only append to a file (open's mode a) can be moved."
                    )

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
                (names[end.fileno()], process, tuple((one, how or WITH_JOB) for one, how in ended.items()))
                for end, process, ended in self.proxies.servers.ended(rank)
            ),
            files=dict(files),
            written=tuple(map(_written_file, what.written)),
        )

    @property
    def tells_when_stopped(self) -> bool:
        """Whether `dump` calls what is to be done while the processes are stopped."""
        return self._criu.tells_when_stopped

    def dump(
        self,
        rank: int,
        folder: int,
        what: Carried,
        limit: float = LIMIT,
        *,
        leaves_running: bool = False,
        while_stopped: Callable[[], None] | None = None,
    ) -> float:
        """Return the seconds, at most `limit`. Raises CriuError; then the worker runs on as it was.

        while_stopped: see criu.Options.
        """
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
                while_stopped=while_stopped,
            ),
        )
        return time.monotonic() - begun

    def prepared(
        self,
        rank: int,
        folder: int,
        stack: contextlib.ExitStack,
        *,
        elsewhere: bool = False,
        into_memory: bool = True,
        keeps_clock: bool = False,
    ) -> Dumped:
        """Return a rank that can be dumped into a folder; it leaves the job's store until the stack ends.

        Raises MoveError, StoreError or OSError. elsewhere, into_memory: as for `look`. keeps_clock: as a
        Dumped has it; one that has a clock of its own by now keeps it anyway.
        """
        what = self.look(rank, elsewhere=elsewhere, into_memory=into_memory, with_files=elsewhere)
        keeps_clock = keeps_clock or has_own_clock(self._workers[rank].pid)
        needed = looked_at.image_bytes(self._workers[rank].pid) if into_memory else 0
        stores = stack.enter_context(self.store_at_rest(what))
        return Dumped(rank, folder, what, stores, keeps_clock, needed)

    def dump_all(self, ready: Sequence[Dumped], limit: float = LIMIT) -> list[Dumped | Failure]:
        """Dump ranks, and return each as it is now, or why it could not be dumped: it runs on as it was."""
        parts = fitting({one.rank: one.needed for one in ready}, looked_at.available_memory())
        by_rank = {one.rank: one for one in ready}
        found: list[Dumped | Failure] = []
        for part in parts:
            found += side_by_side([partial(self._dump_one, by_rank[rank], limit) for rank in part])
        return found

    def _dump_one(self, one: Dumped, limit: float) -> Dumped:
        self.wait_until_read({**self.sockets(one.rank), **one.stores})
        seconds = self.dump(one.rank, one.folder, one.what, limit)
        return replace(one, pids=self.pids(one.rank, one.folder), seconds=seconds)

    def restore(self, dumped: Sequence[Dumped], limit: float = LIMIT) -> dict[int, float | Failure]:
        """Make dumped ranks again, whose ends were waited for; return the seconds that each took.

        Or why it could not be made again; then it counts as killed. Their new sockets to the store are put
        into `stores`.
        """
        on_their_way = {}
        for one in dumped:
            if not one.keeps_clock:
                go_by_clock_here(one.folder)
            ends = {**self.sockets(one.rank), **one.stores}
            on_their_way[one.rank] = {name: drained(end) for name, end in ends.items()}
        try:
            found = made_again(
                dumped,
                lambda one: self._restored(one, on_their_way[one.rank], limit),
                lambda one: end_what_is_left(one.pids),
            )
        finally:
            for said in on_their_way.values():
                for message in itertools.chain(*said.values()):
                    for file in message.files:
                        os.close(file)
        return {one.rank: self._back(one, made) for one, made in zip(dumped, found, strict=True)}

    def _back(self, one: Dumped, made: _Made | Failure) -> float | Failure:
        """Have a rank that was made again go on with this process; or it counts as killed."""
        if isinstance(made, _Made):
            try:
                for name, old in one.stores.items():
                    self.relay.replace(old, made.ends[name])
                    old.close()
                one.stores.update((name, made.ends.pop(name)) for name in list(one.stores))
                self._adopt(one.rank, self.sockets(one.rank), made.ends)
                return made.seconds
            except OSError as error:
                made = error
        end_what_is_left(one.pids)
        self._workers[one.rank].not_made_again()
        return made

    def _restored(self, one: Dumped, on_their_way: Mapping[str, Sequence[_Message]], limit: float) -> _Made:
        """Restore once. Raises CriuError or OSError; then some of the processes may be left."""
        begun, ends = time.monotonic(), dict[str, socket.socket]()
        with contextlib.ExitStack() as stack:
            inherit = list(self._inherited(one.rank, one.what, stack))
            try:
                for end in one.what.sockets:
                    ends[end.name], theirs = socket.socketpair(socket.AF_UNIX, end.kind)
                    stack.callback(theirs.close)
                    inherit.append((theirs.fileno(), f"socket:[{end.inode}]"))
                    for message in on_their_way[end.name]:  # said again, as the last that it had said
                        socket.send_fds(theirs, [message.data], message.files)
                mark = self._workers[one.rank].mark
                criu.restore(self._criu, Options(one.folder, limit, inherit=inherit, variables=mark))
            except BaseException:
                for ours in ends.values():
                    ours.close()
                raise
        return _Made(ends, time.monotonic() - begun)

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


def go_by_clock_here(folder: int) -> None:
    """Have the processes of these images go by this process's clock, once they are made again."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(CLOCKS, dir_fd=folder)


def has_own_clock(pid: int) -> bool:
    """Return whether a process has a time namespace of its own.

    It was suspended once, while its monotonic clock has stood still; or it comes from a host with another.
    """
    try:
        return os.readlink(f"/proc/{pid}/ns/time") != os.readlink("/proc/self/ns/time")
    except FileNotFoundError:  # a kernel without time namespaces
        return False


def _written_file(path: str) -> WrittenFile:
    status = os.stat(path)
    return WrittenFile(path, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


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
