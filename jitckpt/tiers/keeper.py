"""A small process that holds the memory tier's memfds, so that an agent may be killed and another go on.

It is started before any worker, without site packages, and does nothing else. Arguments: the seconds that it
stays without an agent. Standard input: a socket that listens under an abstract name (of the network
namespace; nothing lies in the file system). It talks to processes of its own user alone, and to one agent at
a time: that gets all memfds as it connects. It ends when the agent says so.
"""

import array
import json
import os
import select
import signal
import socket
import struct
import sys
import time

MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def uid_of(connection: socket.socket) -> int:
    """Return whose process is at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def send(connection: socket.socket, message: dict[str, object], descriptor: int | None = None) -> None:
    """Send a message, with a descriptor if one is given. Raises OSError."""
    rights = [] if descriptor is None else [array.array("i", [descriptor]).tobytes()]
    connection.sendmsg(
        [json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, one) for one in rights]
    )


def receive(connection: socket.socket) -> tuple[dict[str, object], int | None] | None:
    """Return the next message and the descriptor that came with it; None at the end of the connection."""
    given = array.array("i")
    try:
        room = socket.CMSG_SPACE(given.itemsize)
        data, ancillary, _, _ = connection.recvmsg(MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    for _, _, content in ancillary:
        given.frombytes(content[: len(content) - len(content) % given.itemsize])
    return (json.loads(data), given[0] if given else None) if data else None


class Keeper:
    """What is held, by rank, and for whom."""

    def __init__(self, listener: socket.socket, keep_seconds: float) -> None:
        self._listener, self._keep_seconds = listener, keep_seconds
        self._held: dict[int, int] = {}
        self._agent: socket.socket | None = None
        self._alone_since = time.monotonic()

    def run(self) -> None:
        """Hold what is given, until the agent says that it is needed no more, or stays away for too long."""
        while True:
            watched = [self._listener, *([self._agent] if self._agent else [])]
            wait = None if self._agent else self._alone_since + self._keep_seconds - time.monotonic()
            if wait is not None and wait <= 0:
                return
            ready, _, _ = select.select(watched, [], [], wait)
            if self._agent in ready:
                if not self._hear():
                    return
            elif self._listener in ready:  # only once all is heard, the end of an agent before, too
                self._let_in()

    def _let_in(self) -> None:
        connection, _ = self._listener.accept()
        try:
            if uid_of(connection) != os.getuid() or self._agent is not None:
                send(connection, {"busy": True})
                connection.close()
                return
            for rank, descriptor in self._held.items():
                send(connection, {"rank": rank}, descriptor)
            send(connection, {"held": len(self._held)})
        except OSError:  # it has gone again
            connection.close()
            return
        self._agent = connection

    def _hear(self) -> bool:
        """Do what the agent says; return whether to go on."""
        assert self._agent is not None
        heard = receive(self._agent)
        if heard is None:
            self._agent.close()
            self._agent, self._alone_since = None, time.monotonic()
            return True
        match heard:
            case ({"hold": int(rank)}, int(descriptor)):
                self._forget(rank)
                self._held[rank] = descriptor
            case ({"drop": int(rank)}, _):
                self._forget(rank)
            case ({"end": True}, _):
                return False
        return True

    def _forget(self, rank: int) -> None:
        if rank in self._held:
            os.close(self._held.pop(rank))


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of the job; the agent decides
    Keeper(socket.socket(fileno=0), float(sys.argv[1])).run()
