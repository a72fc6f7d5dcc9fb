"""Checked messages between processes of one host, with descriptors: datagrams of Unix sockets."""

import array
import os
import socket
from collections.abc import Iterable, Mapping

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked, Kind, ProtocolError

MOST_BYTES = 128 * 1024


def send(to: socket.socket, message: Checked, descriptors: Iterable[int] = ()) -> None:
    """Send a message, with copies of descriptors. Raises OSError, and ProtocolError if it is too long."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights.tobytes())] if rights else []
    to.sendmsg([checked.encoded(message, MOST_BYTES)], ancillary)


def receive(
    connection: socket.socket, kinds: Mapping[str, type[Kind]], most_descriptors: int = 0
) -> tuple[Kind, list[int]] | None:
    """Return the next message and the descriptors that came with it; None at the end of the connection.

    Raises OSError, and ProtocolError for what is no message of these kinds; what came with it is closed.
    """
    given = array.array("i")
    room = socket.CMSG_SPACE(most_descriptors * given.itemsize)
    try:
        data, ancillary, _, _ = connection.recvmsg(MOST_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:  # the other end was killed with something of ours unread
        return None
    for _, _, content in ancillary:
        given.frombytes(content[: len(content) - len(content) % given.itemsize])
    try:
        return (checked.decoded(kinds, data, MOST_BYTES), list(given)) if data else None
    except ProtocolError:
        for descriptor in given:
            os.close(descriptor)
        raise
