"""A mutex in shared memory that the kernel lets go where its holder ends (pthread_mutexattr_setrobust(3))."""

import ctypes
import errno
import mmap

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_ATTRIBUTES_BYTES = 64  # larger than pthread_mutexattr_t

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.pthread_mutex_init.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
for _of_mutex in (_libc.pthread_mutex_lock, _libc.pthread_mutex_trylock, _libc.pthread_mutex_unlock):
    _of_mutex.argtypes = (ctypes.c_void_p,)


class RobustMutex:
    """At the beginning of a memfd of one page, mapped until `close`."""

    def __init__(self, descriptor: int) -> None:
        """Map it. Raises OSError."""
        address: int = _libc.mmap(
            None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
        )
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the memory of a worker's lifeline can't be mapped")
        self._address = address

    def make(self) -> None:
        """Make the mutex, which nobody holds."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)
        _libc.pthread_mutex_init(self._address, attributes)

    def lock(self) -> None:
        """Wait until it is let go; other threads of Python run meanwhile."""
        _libc.pthread_mutex_lock(self._address)

    def try_lock(self) -> bool:
        """Return whether this thread holds it now, and none else does."""
        return bool(_libc.pthread_mutex_trylock(self._address) != errno.EBUSY)

    def unlock(self) -> None:
        """Let it go."""
        _libc.pthread_mutex_unlock(self._address)

    def close(self) -> None:
        """Map it no more."""
        _libc.munmap(self._address, mmap.PAGESIZE)
