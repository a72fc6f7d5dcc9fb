"""How agents speak in visits: messages of wire/visits.py, and whether who was asked answers at all."""

import asyncio

from jitckpt.hosts import link
from jitckpt.hosts.link import LinkError
from jitckpt.wire import checked
from jitckpt.wire.checked import Checked, Kind, ProtocolError
from jitckpt.wire.visits import Refused


class RefusedError(LinkError):
    """The other side says why it does not do what it was asked for. busy: as in Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.busy = refused.busy


def encode(message: Checked, data: bytes = b"") -> bytes:
    """Return a message as it is sent. Raises LinkError if it is too long."""
    return link.encode(checked.content_of(message), data)


def head(message: Checked, size: int) -> bytes:
    """Return what goes before so many bytes of a message. Raises LinkError if it is too long."""
    return link.head(checked.content_of(message), size)


async def hear(reader: asyncio.StreamReader, *kinds: type[Kind]) -> tuple[Kind, bytes]:
    """Return the next message. Raises LinkError at the connection's end, ProtocolError if it is another."""
    header, data = await link.receive(reader)
    return checked.understood(checked.by_type(kinds), header), data


async def answer(
    reader: asyncio.StreamReader, who: str, patience: float | None, *kinds: type[Kind]
) -> tuple[Kind, bytes]:
    """Return what somebody answers. Raises LinkError if that makes no sense, or does not come in time.

    Raises RefusedError if it is why there is none.
    """
    expected: tuple[type[Checked], ...] = (*kinds, Refused)
    try:
        async with asyncio.timeout(patience):
            said, data = await hear(reader, *expected)
    except TimeoutError as error:
        raise LinkError(f"{who} does not answer within {patience:g} s.") from error
    except ProtocolError as error:
        raise LinkError(f"{who} says what makes no sense: {error}") from error
    if isinstance(said, Refused):
        raise RefusedError(said)
    assert isinstance(said, kinds)
    return said, data
