"""Asks NCCL itself what it knows of a job's communicators: the RAS service of NCCL 2.24 and newer.

Every rank's NCCL listens there for `ncclras` (NCCL's user guide, "RAS"), by default at localhost:28028; one
of a host's processes answers for the whole job.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping

ADDRESS = "NCCL_RAS_ADDR"  # NCCL's own variables
ENABLED = "NCCL_RAS_ENABLE"
DEFAULT = "localhost:28028"
PROTOCOL = 2
OTHERS_SECONDS = 3  # that NCCL waits for processes that do not answer it
LIMIT_SECONDS = 8.0
MOST_BYTES = 1 << 18


class RasError(Exception):
    """What answers is no RAS service, or says too little."""


class Question(threading.Thread):
    """Asks aside. answer: what NCCL says, or why it says nothing; empty if nobody listens there."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """environment: the workers'."""
        super().__init__(name="jitckpt-nccl-ras", daemon=True)
        self.answer = ""
        self._address = environment.get(ADDRESS, DEFAULT)
        self._wanted = environment.get(ENABLED, "1") != "0"

    def run(self) -> None:
        if not self._wanted:
            return
        try:
            self.answer = ask(self._address)
        except ConnectionRefusedError:
            return  # softgpu, an older NCCL, or no communicator yet
        except (OSError, ValueError, RasError) as error:
            self.answer = f"NCCL's RAS service at {self._address} gave no answer: {error}"


def ask(address: str, limit: float = LIMIT_SECONDS) -> str:
    """Return the job's status as NCCL tells it. Raises OSError, ValueError or RasError.

    address: HOST:PORT, an IPv6 address in brackets. limit: seconds.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + limit
    with socket.create_connection((host.strip("[]"), int(port)), timeout=limit) as connection:
        reader = _Reader(connection, until)
        connection.sendall(f"CLIENT PROTOCOL {PROTOCOL}\n".encode())
        said = reader.line()
        if not said.upper().startswith("SERVER PROTOCOL "):
            raise RasError(f"who listens there is not NCCL: {said[:80]!r}")
        connection.sendall(f"TIMEOUT {OTHERS_SECONDS}\n".encode())
        if (said := reader.line()).upper() != "OK":
            raise RasError(f"it answers {said[:80]!r} where OK was expected")
        connection.sendall(b"VERBOSE STATUS\n")
        return reader.rest()


class _Reader:
    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until, self._buffered = connection, until, b""

    def line(self) -> str:
        while b"\n" not in self._buffered:
            if not self._more():
                raise RasError("it closed the connection")
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode(errors="replace").strip()

    def rest(self) -> str:
        while self._more():
            pass
        return self._buffered.decode(errors="replace")

    def _more(self) -> bool:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not end within the time")
        if len(self._buffered) >= MOST_BYTES:
            raise RasError(f"it says more than {MOST_BYTES} bytes")
        self._connection.settimeout(left)
        read = self._connection.recv(1 << 16)
        self._buffered += read
        return bool(read)
