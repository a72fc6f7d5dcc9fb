"""What comes on a connection is read by a thread of its own, past asyncio's buffers: all is copied once.

For many bytes at a time, into memory that is there. A message has a time limit as a whole, so that who sends
a byte now and then is not waited for either.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jitckpt.hosts import link
from jitckpt.hosts.link import LinkError

Value = TypeVar("Value")
_MOST_LEFT = 1 << 20  # bytes, of those that asyncio has read by now, at a time


class Direct:
    """Of one connection, for one thread. patience: seconds in which a message comes."""

    def __init__(self, connection: socket.socket, left: bytes, patience: float) -> None:
        """left: what has come on it before."""
        self._connection, self._left, self._patience = connection, left, patience
        self._until = 0.0
        self._is_stopped = False

    def head(self) -> tuple[dict[str, Any], int]:
        """Return the next message's header, and how many bytes stand behind it. Raises LinkError."""
        self._until = time.monotonic() + self._patience
        self.fill(memoryview(lengths := bytearray(link.LENGTHS)))
        size, behind = link.lengths_in(lengths)
        self.fill(memoryview(header := bytearray(size)))
        return link.header_in(header), behind

    def fill(self, view: memoryview) -> None:
        """Read what comes next. Raises LinkError if it does not come, or too slowly."""
        if self._left:
            taken = self._left[: len(view)]
            view[: len(taken)], self._left = taken, self._left[len(taken) :]
            view = view[len(taken) :]
        while view:
            try:
                size = self._connection.recv_into(view)
            except BlockingIOError:
                self._wait()
                continue
            except OSError as error:
                raise LinkError(f"The connection has ended ({error.strerror or error}).") from error
            if not size or self._is_stopped:
                raise LinkError("The connection has ended.")
            view = view[size:]
            if view and time.monotonic() > self._until:
                self._give_up()

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left of what had come before."""
        return not self._left

    def stop(self) -> None:
        """Have the thread end; from another one."""
        self._is_stopped = True
        self._connection.shutdown(socket.SHUT_RD)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(max(0.0, self._until - time.monotonic()) * 1000):
            self._give_up()

    def _give_up(self) -> None:
        raise LinkError(f"The other side sends nothing any more, for {self._patience:g} s.")


async def directly(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    patience: float,
    call: Callable[[Direct], Value],
) -> Value:
    """Return what the call returns on another thread, to which all belongs that comes meanwhile.

    It reads no more than is meant for it. Who cancels this waits for that.
    """
    transport = writer.transport
    assert isinstance(transport, asyncio.Transport)
    left = await _come(reader, transport)
    file = os.dup(writer.get_extra_info("socket").fileno())
    with socket.socket(fileno=file) as connection, ThreadPoolExecutor(1) as thread:
        connection.setblocking(False)
        direct = Direct(connection, left, patience)
        ended = asyncio.get_running_loop().run_in_executor(thread, call, direct)
        try:
            found = await asyncio.shield(ended)
        except asyncio.CancelledError:
            direct.stop()
            await asyncio.wait([ended])
            ended.exception()  # why it has ended is known, or asyncio would say it
            raise
        finally:
            transport.resume_reading()
        if not direct.is_at_end:
            raise LinkError("The other side goes on where it should wait for an answer.")
        return found


async def _come(reader: asyncio.StreamReader, transport: asyncio.Transport) -> bytes:
    """Return what has come by now; nothing more is read."""
    found = b""
    try:
        while True:
            transport.pause_reading()  # reading on may have resumed it
            async with asyncio.timeout(0):
                if not (piece := await reader.read(_MOST_LEFT)):
                    return found  # its end
            found += piece
    except TimeoutError:
        return found
