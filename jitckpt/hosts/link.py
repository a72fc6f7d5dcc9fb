"""One connection between two agents: who may speak on it, and where a message ends.

Each side proves by HMAC-SHA256 over two fresh random numbers that it knows the job's secret, which is never
sent. A message is a JSON object, with raw bytes behind it; nothing is unpickled. What follows the proof is
neither encrypted nor signed, as with NCCL: the network between the hosts has to be a trusted one.
"""

import asyncio
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any

from jitckpt.errors import JitckptError

GREETING = b"jitckpt1"
MAX_HEADER = 4 << 20
MAX_DATA = 256 << 20
_LENGTHS = struct.Struct(">II")
LENGTHS = _LENGTHS.size  # bytes with which a message begins
_NONCE = 32
_PROOF = 32

Header = Mapping[str, Any]


class LinkError(JitckptError):
    """The other side is no agent of this job, or the connection has ended; the text is a sentence."""


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove oneself to who has connected, once it has done so. Raises LinkError for strangers."""
    ours = secrets.token_bytes(_NONCE)
    writer.write(GREETING + ours)
    theirs, proof = await _read(reader, _NONCE), await _read(reader, _PROOF)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", ours, theirs)):
        raise LinkError("Who called did not prove that it knows this job's secret.")
    writer.write(_proof(secret, b"called", ours, theirs))
    await _drain(writer)


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove oneself to who was called, and have it do the same. Raises LinkError if it can't."""
    if await _read(reader, len(GREETING)) != GREETING:
        raise LinkError("What answers there is no agent of jitckpt.")
    theirs, ours = await _read(reader, _NONCE), secrets.token_bytes(_NONCE)
    writer.write(ours + _proof(secret, b"caller", theirs, ours))
    await _drain(writer)
    try:
        proof = await _read(reader, _PROOF)
    except LinkError as error:
        raise LinkError("The other agent hung up: the two may not have the same secret.") from error
    if not hmac.compare_digest(proof, _proof(secret, b"called", theirs, ours)):
        raise LinkError("Who was called did not prove that it knows this job's secret.")


def encode(header: Header, data: bytes = b"") -> bytes:
    """Return a message as it is sent. Raises LinkError if it is too long."""
    return head(header, len(data)) + data


def head(header: Header, size: int) -> bytes:
    """Return what goes before so many bytes of a message. Raises LinkError if it is too long."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER or size > MAX_DATA:
        raise LinkError(
            f"A message between agents has {len(text)} + {size} bytes; {MAX_HEADER} + {MAX_DATA} may be sent."
        )
    return _LENGTHS.pack(len(text), size) + text


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises LinkError at the connection's end and for what is no message."""
    header_length, data_length = lengths_in(await _read(reader, LENGTHS))
    header = header_in(await _read(reader, header_length))
    return header, await _read(reader, data_length)


def lengths_in(data: bytes | bytearray) -> tuple[int, int]:
    """Return how long the header of such a message is, and the bytes behind it. Raises LinkError."""
    header_length, data_length = _LENGTHS.unpack(data)
    if header_length > MAX_HEADER or data_length > MAX_DATA:
        raise LinkError("The other side sends what is no message of an agent.")
    return header_length, data_length


def header_in(data: bytes | bytearray) -> dict[str, Any]:
    """Return a header as it came. Raises LinkError."""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"The other side sends what is not JSON: {error}.") from error
    if not isinstance(header, dict):
        raise LinkError("The other side sends what is no JSON object.")
    return header


def _proof(secret: bytes, role: bytes, of_called: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(secret, GREETING + role + of_called + of_caller, "sha256")


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise LinkError("The connection has ended.") from error
    except OSError as error:
        raise LinkError(f"The connection has ended ({error.strerror or error}).") from error


async def _drain(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.drain()
    except OSError as error:
        raise LinkError(f"The connection has ended ({error.strerror or error}).") from error
