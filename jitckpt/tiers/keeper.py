"""A small process that holds the memory tier's memfds, so that an agent may be killed and another go on.

It is started before any worker, without site packages, and does nothing else. Arguments: the seconds that it
stays without an agent. Standard input: a socket that listens under an abstract name (of the network
namespace; nothing lies in the file system). It talks to processes of its own user alone, and to one agent at
a time: that gets all memfds as it connects. It ends when the agent says so.
"""

import os
import select
import signal
import socket
import struct
import sys
import time

from jitckpt.system import datagrams
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.keeper import TO_KEEPER, Busy, Hold, Holds, HoldsNoMore, LetAllGo, LetGo

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def uid_of(connection: socket.socket) -> int:
    """Return whose process is at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


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
                datagrams.send(connection, Busy())
                connection.close()
                return
            for rank, descriptor in self._held.items():
                datagrams.send(connection, Holds(rank), [descriptor])
            datagrams.send(connection, HoldsNoMore())
        except OSError:  # it has gone again
            connection.close()
            return
        self._agent = connection

    def _hear(self) -> bool:
        """Do what the agent says; return whether to go on."""
        assert self._agent is not None
        try:
            heard = datagrams.receive(self._agent, TO_KEEPER, 1)
        except ProtocolError:
            heard = None  # it learns at its next word that nobody listens: what it wanted held is not
        match heard:
            case None:
                self._agent.close()
                self._agent, self._alone_since = None, time.monotonic()
            case Hold(rank), [descriptor]:
                self._forget(rank)
                self._held[rank] = descriptor
            case LetGo(rank), _:
                self._forget(rank)
            case LetAllGo(), _:
                return False
        return True

    def _forget(self, rank: int) -> None:
        if rank in self._held:
            os.close(self._held.pop(rank))


def main() -> None:
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"):  # sent to all of the job; the agent decides
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    Keeper(socket.socket(fileno=0), float(sys.argv[1])).run()
