"""The tables of nftables by which CRIU keeps packets from connections whose processes are images for a while.

It takes them away when it restores the processes. Where that never happens they would stay, and packets of a
later connection between the same ports would be lost.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator

PREFIX = "CRIU-"
_NETLINK_NETFILTER = 12
_SUBSYSTEM, _GET_TABLE, _DELETE_TABLE = 10 << 8, 1, 2  # linux/netfilter/nf_tables.h
_BATCH_BEGIN, _BATCH_END = 16, 17
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACKNOWLEDGE, _DUMP = 1, 4, 0x300
_NAME = 1  # NFTA_TABLE_NAME
_INET = 1  # NFPROTO_INET
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 1 << 16


def tables() -> set[str]:
    """Return the names of CRIU's tables in this network namespace; none where the kernel has no nftables."""
    found = set()
    try:
        with _connected() as kernel:
            kernel.send(_message(_SUBSYSTEM | _GET_TABLE, _REQUEST | _DUMP, _general(_INET, 0)))
            for kind, body in _answers(kernel):
                if kind == _SUBSYSTEM:  # NFT_MSG_NEWTABLE
                    found |= {name for name in _names(body[4:]) if name.startswith(PREFIX)}
    except OSError:
        return set()
    return found


def unlock(names: Iterable[str]) -> None:
    """Take these tables away, as far as they are there. Raises OSError."""
    for name in names:
        text = name.encode() + b"\0"
        attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(text), _NAME) + text + bytes(-len(text) % 4)
        batch = _general(0, socket.htons(_SUBSYSTEM >> 8))
        with _connected() as kernel:
            kernel.send(
                _message(_BATCH_BEGIN, _REQUEST, batch)
                + _message(
                    _SUBSYSTEM | _DELETE_TABLE, _REQUEST | _ACKNOWLEDGE, _general(_INET, 0) + attribute
                )
                + _message(_BATCH_END, _REQUEST, batch)
            )
            for _ in _answers(kernel):
                pass


@contextlib.contextmanager
def _connected() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        yield kernel


def _general(family: int, resource: int) -> bytes:
    return struct.pack("=BBH", family, 0, resource)


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body


def _answers(kernel: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Yield messages of the kernel until it has said the last. Raises OSError for an error of its."""
    while True:
        data, at = kernel.recv(_MOST_BYTES), 0
        while at < len(data):
            size, kind, _, _, _ = _HEADER.unpack_from(data, at)
            body = data[at + _HEADER.size : at + size]
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number not in (0, errno.ENOENT):
                    raise OSError(number, os.strerror(number))
                return
            if kind == _NLMSG_DONE:
                return
            yield kind, body
            at += size + -size % 4


def _names(attributes: bytes) -> Iterator[str]:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        size, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == _NAME:
            yield attributes[at + _ATTRIBUTE.size : at + size].rstrip(b"\0").decode(errors="replace")
        at += max(size + -size % 4, _ATTRIBUTE.size)
