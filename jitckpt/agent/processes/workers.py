"""The worker processes, one a rank: how they are started, spoken to and ended."""

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from jitckpt.agent.processes.children import Children, starting, waited_for
from jitckpt.agent.processes.spare_template import ForkedProcess, Spare
from jitckpt.system import descriptor_limit, descriptors, network_lock, process_tree
from jitckpt.system.lifeline import Lifeline
from jitckpt.wire import protocol
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.protocol import WorkerMessage

PF_EXITING = 4  # of a task's flags in /proc/PID/stat, see proc(5)


class Worker:
    """A worker in a session and process group of its own, with a socket to the agent and a shared ring.

    ring_fd: the memory that outlives it. pidfd: readable when the worker has ended; the worker stays a
    zombie until `reap`, so that its process id means nobody else. lifeline: tells before that. copies: None,
    or a socket by which the worker asks, with the number of a step, to be answered once another host has a
    copy of that state.
    """

    def __init__(
        self,
        *,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        ring_fd: int,
        stdout: str | None,
        stderr: str | None,
        warm: Spare | None = None,
        is_copied: bool = False,
        memory_fd: int | None = None,
        whole_fd: int | None = None,
        children: Children | None = None,
    ) -> None:
        """Start `command`; stdout and stderr are files to write to, empty or None for the agent's own.

        ring_fd: a memfd, which this object closes in the end. warm: a spare that runs the command instead of
        a new process. is_copied: another host keeps a copy of the ring. memory_fd, whole_fd: the memory
        tier's, which stay the caller's. children: among which it is guarded from its first moment on. Raises
        OSError if there is no such program, or the spare has died.
        """
        self.rank = rank
        self.ring_fd = ring_fd
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.copies: socket.socket | None = None
        given = [theirs]
        self.lifeline = Lifeline()
        numbers = {
            descriptors.AGENT: theirs.fileno(),
            descriptors.STATE: self.ring_fd,
            descriptors.LIFELINE: self.lifeline.descriptor,
        }
        if is_copied:
            self.copies, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.copies.setblocking(False)
            given.append(asked)
            numbers[descriptors.COPIES] = asked.fileno()
        if memory_fd is not None:
            numbers[descriptors.MEMORY] = memory_fd
        if whole_fd is not None:
            numbers[descriptors.WHOLE] = whole_fd
        environment = {**environment, descriptors.PROOF: descriptors.proof(rank, numbers)}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        try:
            self._process = _start(command, environment, numbers, (stdout, stderr), warm)
        except OSError:
            self._close_sockets()
            self.lifeline.close()
            os.close(self.ring_fd)
            raise
        finally:
            for end in given:
                end.close()
        self.pid = self._process.pid
        self._is_lost = False
        self._hold()
        self._children = children
        if children is not None:
            children.guard(self.pid, self.pidfd)

    @classmethod
    def adopted(
        cls,
        rank: int,
        pid: int,
        *,
        own: socket.socket,
        copies: socket.socket | None,
        ring_fd: int,
        lifeline: Lifeline,
        children: Children,
    ) -> "Worker":
        """Return one that was made again here and had run on another host. Raises OSError."""
        self = cls.__new__(cls)
        self.rank, self.pid, self.ring_fd, self.lifeline = rank, pid, ring_fd, lifeline
        self.socket, self.copies = own, copies
        for one in (own, copies):
            if one is not None:
                one.setblocking(False)
        self._process = ForkedProcess(pid)
        self._is_lost = False
        self._open()
        self._children = children
        children.guard(pid, self.pidfd)
        return self

    def _hold(self) -> None:
        """Have what tells of the process, and reaches it, whoever gets its number later. Raises OSError."""
        descriptor_limit.give_back(self.pid)
        try:
            self._open()
        except OSError:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            waited_for(self.pid)
            self._close_sockets()
            self.lifeline.close()
            os.close(self.ring_fd)
            raise

    def _open(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)
        # Kept open: when it is read the agent may have no descriptor left.
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def made_again(self, own: socket.socket, lifeline: Lifeline) -> None:
        """The process was ended and waited for, and made again with its number as a child of this one.

        own: the agent's end of the new socket to it. Raises OSError.
        """
        before = self.socket, self.lifeline, self.pidfd, self._stat
        self._open()
        self.socket, self.lifeline = own, lifeline
        own.setblocking(False)
        if self._children is not None:
            self._children.forget(self.pid)
            self._children.guard(self.pid, self.pidfd)
            if lifeline.is_watched:
                self._children.note_registered(self.pid)
        before[0].close()
        before[1].close()
        os.close(before[2])
        os.close(before[3])

    @property
    def mark(self) -> Mapping[str, str]:
        """The variable by which whatever is started for this worker is found when all is to end."""
        return {} if self._children is None else {process_tree.MARK: self._children.mark}

    @contextlib.contextmanager
    def being_made_again(self) -> Iterator[None]:
        """See to it that no lock of CRIU's stays, should this process be killed in here."""
        if self._children is not None:
            self._children.note_locks(sorted(network_lock.tables()))
        try:
            yield
        finally:
            if self._children is not None:
                self._children.note_locks(None)

    def not_made_again(self) -> None:
        """The process was ended and waited for, and could not be made again: it counts as killed."""
        self._is_lost = True

    def send(self, message: WorkerMessage) -> str | None:
        """Send an order; return why it could not be sent, or None. Never blocks."""
        try:
            self.socket.send(protocol.encode(message))
        except OSError as error:
            return error.strerror
        return None

    def receive(self) -> Iterator[WorkerMessage | ProtocolError | None]:
        """Yield what has come: messages, errors for those that make no sense, None when no more will come."""
        while True:
            try:
                data = self.socket.recv(protocol.MAX_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                yield None
                return
            try:
                yield protocol.decode(data)
            except ProtocolError as error:
                yield error

    def has_ended(self, within: float) -> bool:
        """Return whether the worker's process ends within so many seconds (it may be a zombie still)."""
        return bool(select.select([self.pidfd], [], [], within)[0])

    def is_stopped(self) -> bool:
        """Return whether the worker is stopped by a signal, such as SIGSTOP."""
        return self._status()[0] in "Tt"

    def dies_with(self) -> int | None:
        """Return the exit code (minus the number of a signal) of a worker whose end has begun, else None."""
        fields = self._status()
        return os.waitstatus_to_exitcode(int(fields[49])) if int(fields[6]) & PF_EXITING else None

    def _status(self) -> list[str]:
        """Return what follows the name in /proc/PID/stat. Raises OSError after `reap`."""
        return os.pread(self._stat, 4096, 0).decode(errors="replace").rpartition(")")[2].split()

    def signal(self, signum: int) -> None:
        """Send a signal to the worker and its process group. Must not be called after `reap`.

        SIGKILL is for the worker alone: what cleans up behind the others must outlive them.
        """
        if self._is_lost:
            return
        try:
            if signum != signal.SIGKILL:
                os.killpg(self.pid, signum)
                return
        except ProcessLookupError:  # a spare that does not lead a group yet
            pass
        os.kill(self.pid, signum)

    def reap(self) -> int:
        """Wait for its end, kill what it left in its session; return its exit code (minus a signal's number).

        What has gone to other sessions is ended with the job's start (children.Children).
        """
        if not self._is_lost:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(OSError):  # no descriptor left to look: they end with the job's start
            for process in process_tree.everybody():
                left = process.session == self.pid and process.pid != self.pid and not process.dead
                if left and not process_tree.is_tidier(process.pid):
                    process_tree.kill(process.pid)
        status = -signal.SIGKILL if self._is_lost else self._process.wait()
        waited_for(self.pid)
        if self._children is not None:
            self._children.forget(self.pid)
        return status

    def close(self) -> None:
        """Close the agent's ends of the socket and the ring."""
        with contextlib.suppress(ChildProcessError):  # what it had started and the agent has adopted
            while os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG):
                pass
        self._close_sockets()
        self.lifeline.close()
        os.close(self.ring_fd)
        os.close(self.pidfd)
        os.close(self._stat)

    def _close_sockets(self) -> None:
        self.socket.close()
        if self.copies is not None:
            self.copies.close()


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    numbers: Mapping[str, int],
    outputs: Sequence[str | None],
    warm: Spare | None,
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Start a worker's command, or have a spare run it.

    numbers: of the descriptors that it gets, by the names under which it finds them. outputs: for stdout and
    stderr. Raises OSError.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "w")) if path else None for path in outputs]
        if warm is not None:
            named = {str(number): file.fileno() for number, file in enumerate(files, 1) if file}
            return warm.become(command, environment, {**numbers, **named})
        with starting() as note:
            process = subprocess.Popen(
                command,
                env={**environment, **{name: str(number) for name, number in numbers.items()}},
                pass_fds=tuple(numbers.values()),
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
            )
            note(process.pid)
        return process
