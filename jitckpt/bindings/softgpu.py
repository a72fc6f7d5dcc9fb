"""Orders faults from another process whose device is softgpu, over the socket where that one listens."""

import os
import socket
from pathlib import Path

from jitckpt.errors import JitckptError

VARIABLE = "SOFTGPU_CONTROL"  # the folder of these sockets, each named by its process's number
_ANSWER_BYTES = 1024
_PATIENCE = 20.0  # seconds; a process that listens answers at once, but may have to be loaded from swap


class ChaosError(JitckptError):
    """The fault could not be ordered; the text is a sentence that says why and what to do."""


def order(path: Path, fault: str) -> tuple[str, str]:
    """Return the status (ok, error, elsewhere or gone) and the sentence that the process answers."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_PATIENCE)
            # By way of the open folder: the path of a socket may have 107 bytes only.
            client.connect(f"/proc/self/fd/{folder}/{path.name}")
            client.sendall(os.fsencode(fault) + b"\n")
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as stream:
                answer = stream.read().decode(errors="replace").strip()
    except ConnectionRefusedError:  # another process has the number now
        return "gone", f"process {path.name} has ended."
    except TimeoutError:
        raise ChaosError(f"Process {path.name} does not answer: it is stopped, or it ends.") from None
    except OSError as error:
        raise ChaosError(f"Process {path.name} can't be reached at {path}: {error.strerror}.") from None
    finally:
        os.close(folder)
    status, colon, sentence = answer.partition(": ")
    if not colon or status not in ("ok", "error", "elsewhere"):
        raise ChaosError(f"Process {path.name} answers {answer!r:.200}, which is no answer of softgpu's.")
    return status, sentence


def fault(text: str) -> str | None:
    """Order a fault from this process's own device; return why not, "" if it is armed, None: no softgpu."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef("int softgpu_fault(const char* text, char* answer, size_t capacity);")
    try:
        arm = ffi.dlopen(None).softgpu_fault
    except AttributeError:
        return None
    answer = ffi.new("char[]", _ANSWER_BYTES)
    if arm(text.encode(), answer, len(answer)) == 0:
        return ""
    said: bytes = ffi.string(answer)
    return said.decode(errors="replace")
