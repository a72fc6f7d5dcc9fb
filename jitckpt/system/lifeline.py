"""How the agent learns that a worker dies long before its process has ended: by a lock.

A killed process has ended, for pidfds and sockets alike, only once the kernel has taken its memory apart (for
1 GiB scripts/bench/death.py has seen 0.3 to 1 s) and the driver its devices. Before all that the kernel lets
go the robust mutexes of its threads (pthread_mutexattr_setrobust(3); futex(2), FUTEX_OWNER_DIED). So each
worker's main thread holds one, in memory that it shares with the agent, of which a thread waits for it.
"""

import mmap
import os
import threading

from jitckpt.bindings.robust_mutex import RobustMutex


class Lifeline:
    """The agent's end, of one worker.

    descriptor: a memfd for the worker. released: an eventfd, readable once whoever held the lock let it go.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: of a lock that a worker may hold already; None: one is made. Raises OSError."""
        self._watcher: threading.Thread | None = None
        if descriptor is None:
            self.descriptor = os.memfd_create("jitckpt-lifeline", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
        else:
            self.descriptor = descriptor
        self.released = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._mutex = RobustMutex(self.descriptor)
        if descriptor is None:
            self._mutex.make()

    @property
    def is_watched(self) -> bool:
        """Whether `watch` was called."""
        return self._watcher is not None

    def watch(self) -> None:
        """Make `released` readable as soon as the worker, which holds the lock by now, dies."""
        self._watcher = threading.Thread(target=self._wait, name="jitckpt-lifeline", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Free everything; the worker must have ended."""
        if self._watcher is not None:
            self._watcher.join()
        self._mutex.close()
        os.close(self.released)
        os.close(self.descriptor)

    def _wait(self) -> None:
        self._mutex.lock()
        os.eventfd_write(self.released, 1)
        self._mutex.unlock()  # this thread, too, must hold nothing at its end


_holders: dict[int, int] = {}  # of each lock, by the memory's inode: the process that holds it


def hold(descriptor: int) -> bool:
    """Hold the lock in this memory, from now until the calling thread ends.

    Returns whether this process has it: another one may have been first.
    """
    inode = os.fstat(descriptor).st_ino
    if _holders.get(inode) != os.getpid():  # a forked process has its parent's memory, and not its locks
        # Never unmapped: the kernel looks there in the end.
        if not RobustMutex(descriptor).try_lock():
            return False
        _holders[inode] = os.getpid()
    return True
