"""The agent's children: who is its own, who was left to it by others, and who sees that nobody is left."""

import contextlib
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitckpt.bindings import libc
from jitckpt.console import say
from jitckpt.system import datagrams, process_tree
from jitckpt.system.empty_folder import remove_if_empty
from jitckpt.wire.guardian import Forget, GuardWorker, Images, Locks, SavesItself, ToGuardian

LOOK_SECONDS = 1.0  # between two looks for orphans that have ended
MAX_GUARDIANS = 100  # somebody who kills more of them means it
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from jitckpt.agent.processes.guardian import main; main()"
)


def adopt_orphans() -> None:
    """Have processes whose parents end become this process's children (prctl(2)). Raises OSError."""
    if error := libc.adopt_orphans():
        raise OSError(error, "the agent can't adopt what its workers leave behind")


_of_spares: set[int] = set()  # sessions
_own: set[int] = set()  # children of this process that lead sessions and that it waits for itself
_lock = threading.RLock()


@contextlib.contextmanager
def starting() -> Iterator[Callable[[int], None]]:
    """Start a child with a session of its own in here, and tell its number by what this gives.

    The child is nobody's orphan then, not even if it has ended by now.
    """
    with _lock:
        yield _own.add


def note_own(pid: int) -> None:
    """A spare is about to become a worker, which leads a session and is waited for."""
    with _lock:
        _own.add(pid)


def note_template(pid: int) -> None:
    """Spares live in the session of the process that forks them, until they become workers."""
    with _lock:
        _of_spares.add(pid)


def waited_for(pid: int) -> None:
    """The number may become another's: its process was waited for."""
    with _lock:
        _own.discard(pid)


@dataclass
class _Known:
    """A worker: its process and a descriptor of that."""

    pidfd: int
    registered: bool = False


def _left_behind() -> set[int]:
    """Return who lives below this process and is not its own: it is a subreaper, so nobody gets away."""
    own = os.getsid(0)
    with _lock:
        processes = process_tree.everybody()
        below = process_tree.below(processes, [os.getpid()])
        return {
            one.pid
            for one in processes
            if one.pid in below
            and not one.dead
            and one.session not in (own, *_of_spares)
            and one.pid not in _own
        }


class Children:
    """The processes below the agent, from its beginning to its end. For any thread.

    mark: for their environment. A guardian (guardian.py) ends them should the agent be killed; one that dies
    itself is replaced.
    """

    def __init__(self, seconds_to_save: float, temporary: Path | None, mark: str = "") -> None:
        """temporary: the agent's folder, which goes if nothing is in it. mark: that they have already, if so.

        Raises OSError.
        """
        self.mark = mark or f"{os.getpid()}-{secrets.token_hex(8)}"
        self._temporary = temporary
        self._arguments = [str(seconds_to_save), "" if temporary is None else str(temporary), self.mark]
        self._known: dict[int, _Known] = {}
        self._images: Path | None = None
        self._guardians, self._is_closed = 0, False
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        adopt_orphans()
        self._start_guardian()
        self._reaper = threading.Thread(target=self._reap_orphans, name="jitckpt-children", daemon=True)
        self._reaper.start()

    def guard(self, pid: int, pidfd: int) -> None:
        """Have a worker ended with the agent. pidfd: open until `forget`."""
        with _lock:
            self._known[pid] = _Known(pidfd)
            self._tell(GuardWorker(pid), pidfd)

    def note_registered(self, pid: int) -> None:
        """From now on the worker saves by itself should the agent be killed, and gets the time for it."""
        with _lock:
            if (worker := self._known.get(pid)) is not None:
                worker.registered = True
                self._tell(SavesItself(pid))

    def forget(self, pid: int) -> None:
        """The worker has ended and was waited for."""
        with _lock:
            if self._known.pop(pid, None) is not None:
                self._tell(Forget(pid))

    def note_locks(self, known: Sequence[str] | None) -> None:
        """CRIU is about to lock connections of a worker; these locks are there already. None: it has ended.

        Should the agent be killed meanwhile, its guardian takes them away.
        """
        with _lock:
            self._tell(Locks(None if known is None else [*known]))

    def note_images(self, folder: Path | None) -> None:
        """Workers are images in there, which are of no use without the agent. None: none are."""
        with _lock:
            self._images = folder
            self._tell(Images("" if folder is None else str(folder)))

    def kill_guardian(self) -> None:
        """For rehearsed failures: it is replaced within a second."""
        self._guardian.kill()

    def end_all(self) -> None:
        """End what the workers have started and left, once they have ended; spares are none of that."""
        left = process_tree.end(_left_behind, looks=1)
        if left:
            numbers = ", ".join(map(str, sorted(left)))
            say(f"processes {numbers}, which workers have started, were killed, but do not end.")
        with contextlib.suppress(OSError):  # no descriptor left to look: they are orphans again at our end
            self._reap_ended()

    def close(self) -> None:
        """End everything that is left, and the guardian. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._closing, 1)
        self._reaper.join()
        os.close(self._closing)
        _of_spares.clear()
        self.end_all()
        # From now on nobody would do it if the agent were killed, which may have to wait for a disk.
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                remove_if_empty(self._temporary)
        # In this order: whoever guards takes the end of the socket for the agent's, and cleans up behind it.
        self._end_guardian()
        self._socket.close()

    # The guardian.

    def _start_guardian(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(Path(__file__).parents[3])
        try:
            with starting() as note:
                self._guardian = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, root, *self._arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
                note(self._guardian.pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self._guardians += 1

    def _replace_guardian(self) -> None:
        """Put another in the place of one that has ended, or does not listen."""
        self._end_guardian()
        if self._guardians >= MAX_GUARDIANS:
            return
        self._socket.close()
        try:
            self._start_guardian()
        except OSError as error:
            say(f"no guardian starts, so nothing would end the workers with a killed launcher: {error}")
            self._guardians = MAX_GUARDIANS
            return
        if self._guardians == MAX_GUARDIANS:
            say(f"the guardian has ended {MAX_GUARDIANS - 1} times; the next one is not replaced.")
        for pid, worker in self._known.items():
            self._tell(GuardWorker(pid, worker.registered), worker.pidfd)
        if self._images is not None:
            self._tell(Images(str(self._images)))

    def _end_guardian(self) -> None:
        self._guardian.kill()
        self._guardian.wait()
        waited_for(self._guardian.pid)

    def _tell(self, message: ToGuardian, *descriptors: int) -> None:
        try:
            datagrams.send(self._socket, message, descriptors)
        except OSError:
            if self._guardians < MAX_GUARDIANS:
                self._replace_guardian()  # which is told of all

    # Orphans.

    def _is_closing(self, within: float) -> bool:
        """Wait until the agent closes, a guardian's end, or so many seconds; return whether it closes."""
        looked_at = select.poll()
        looked_at.register(self._closing, select.POLLIN)
        with _lock:
            if self._guardians < MAX_GUARDIANS:
                looked_at.register(self._socket, 0)  # that its other end is closed is told unasked
        return self._closing in dict(looked_at.poll(within * 1000))

    def _reap_orphans(self) -> None:
        while not self._is_closing(LOOK_SECONDS):
            with _lock:
                if self._guardian.poll() is not None and self._guardians < MAX_GUARDIANS:
                    self._replace_guardian()
            with contextlib.suppress(OSError):  # no child, or no descriptor left to look: it is looked again
                # So nothing is looked through as long as all children live.
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self._reap_ended()

    def _reap_ended(self) -> None:
        """Take note of the end of adopted processes: nobody else waits for them.

        The agent's own children live in its session, but for those that are known here.
        """
        own = os.getsid(0)
        with _lock:
            for process in process_tree.everybody():
                if (
                    process.dead
                    and process.parent == os.getpid()
                    and process.session != own
                    and process.session not in _of_spares
                    and process.pid not in _own
                ):
                    with contextlib.suppress(ChildProcessError):
                        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)
