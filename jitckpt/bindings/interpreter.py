"""What Python's own C API does and its modules don't."""

import ctypes
from collections.abc import Callable
from typing import Any

_MUTEX_BYTES = 64  # larger than pthread_mutex_t


def pending_call(call: Callable[[], None]) -> Any:
    """Return what `add_pending_call` takes; whoever makes it keeps it, as it may be run much later."""

    def run(_: object) -> int:
        call()
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)


def add_pending_call(call: Any) -> bool:
    """Have Python run it on the main thread before that goes on; False if it takes no more calls."""
    return bool(ctypes.pythonapi.Py_AddPendingCall(call, None) == 0)


def hold_gil() -> None:
    """Keep Python's lock for ever in a call that does not come back, as a hanging extension does."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
