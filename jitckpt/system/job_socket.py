"""How a command reaches the launcher of a running job: by a file in the job's directory, and a socket.

The file names the socket, which is an abstract one of the launcher's: nothing that could be mistaken for it
is left once that is killed. Each end sees to it that the other is the same user's.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from jitckpt.errors import JitckptError
from jitckpt.system import datagrams, regular_file
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.commands import FROM_LAUNCHER, TO_LAUNCHER, ToLauncher, Told

FILE_NAME = "launcher.json"
OF_HOSTS = f"host-*/{FILE_NAME}"  # where a job has several hosts, each with a folder of its own
BACKLOG = 8
_PEER = struct.Struct("iii")  # struct ucred: process, user, group


class JobSocketError(JitckptError):
    """The job's launcher can't be asked; the text is a sentence."""


class JobSocket:
    """The launcher's side: `listener` is readable once somebody comes. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        name = f"jitckpt-job-{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(b"\0" + name.encode())
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self._told = json.dumps({"socket": name, "host": socket.gethostname(), "process": os.getpid()})
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / FILE_NAME
        new = directory / f".{FILE_NAME}.new"
        new.touch(0o600)
        new.write_text(self._told)
        new.replace(self._path)

    def accept(self) -> "Caller | None":
        """Return who has come; None if that was nobody, or another user."""
        try:
            connection, _ = self.listener.accept()
        except OSError:  # who came has gone, or there is no descriptor left
            return None
        if _user_of(connection) != os.getuid():
            connection.close()
            return None
        connection.setblocking(False)
        return Caller(connection)

    def close(self) -> None:
        """Nobody can come any more; the file goes unless it is another launcher's by now."""
        self.listener.close()
        with contextlib.suppress(OSError):
            if regular_file.text_of(self._path) == self._told:
                self._path.unlink()


class Caller:
    """A command that has asked for something, and waits for its end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def asks(self) -> ToLauncher | None:
        """Return what it wants; None if it has hung up. Raises ProtocolError if that makes no sense."""
        try:
            heard = datagrams.receive(self.connection, TO_LAUNCHER)
        except OSError:
            return None
        return None if heard is None else heard[0]

    def hear(self, text: str, status: int | None = None) -> None:
        """Tell it a sentence; status: with which it ends then."""
        with contextlib.suppress(OSError):  # it waits no more
            datagrams.send(self.connection, Told(text, status))

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


def ask(directory: Path, wanted: ToLauncher) -> Iterator[tuple[str, int | None]]:
    """Ask the launcher of this directory's job; yield sentences, the last with a status.

    Of a job on several hosts, each of which has a folder there, any that is on this one. Raises
    JobSocketError if there is none, or it ends before it has answered.
    """
    connection, process = _reached(directory)
    with connection:
        datagrams.send(connection, wanted)
        try:
            while (heard := datagrams.receive(connection, FROM_LAUNCHER)) is not None:
                told, _ = heard
                yield told.text, told.status
                if told.status is not None:
                    return
        except ProtocolError as error:
            raise JobSocketError(f"The job's launcher says what makes no sense: {error}") from error
    raise JobSocketError(f"The job's launcher, process {process}, has ended before it answered.")


def is_there(directory: Path) -> bool:
    """Return whether the job of this directory has a launcher that can be asked from here."""
    try:
        connection, _ = _reached(directory)
    except JobSocketError:
        return False
    connection.close()
    return True


def _reached(directory: Path) -> tuple[socket.socket, int]:
    """Return a connection to a launcher of the job, and its process. Raises JobSocketError."""
    if not directory.is_dir():
        raise JobSocketError(f"There is no directory {directory}.")
    paths = [path for path in (directory / FILE_NAME, *sorted(directory.glob(OF_HOSTS))) if path.exists()]
    if not paths:
        raise JobSocketError(
            f"No job in {directory} can be suspended: it has ended, or was started without --suspendable."
        )
    errors = []
    for path in paths:
        try:
            return _connected(path)
        except JobSocketError as error:
            errors.append(error)
    raise errors[0]


def _connected(path: Path) -> tuple[socket.socket, int]:
    try:
        found = json.loads(regular_file.content_of(path))
        name, host, process = str(found["socket"]), str(found["host"]), int(found["process"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobSocketError(f"{path} can't be read: {error}.") from error
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(b"\0" + name.encode())
    except OSError as error:
        connection.close()
        here = socket.gethostname()
        elsewhere = f" It is on {host}, and this is {here}." if host != here else ""
        raise JobSocketError(
            f"The job's launcher, process {process}, can't be reached: it was killed, starts the ranks "
            f"again just now, or is in another container ({error.strerror}).{elsewhere}"
        ) from error
    if _user_of(connection) != os.getuid():
        connection.close()
        raise JobSocketError(f"The socket that {path} names is another user's.")
    return connection, process


def _user_of(connection: socket.socket) -> int:
    user: int = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    return user
