"""The messages between the agent and the device proxies of its workers, each one datagram.

Little-endian: kind and version (32 bits each), term and number of the recovery (64 bits each), the fields.
The other end is native/proxy/client.
"""

import struct
from dataclasses import dataclass, fields
from typing import Any

from jitckpt.errors import JitckptError
from jitckpt.wire.communicators import Count, Membership, RecoveryNumber

VERSION = 13
MAX_BYTES = 128 * 1024  # a socket's buffer holds it, whatever else is in there
MAX_TEXT = 4096
KEY_BYTES = 16


class MessageError(JitckptError):
    """What came is no message, or what should be sent would not be one; the text is a sentence."""


@dataclass(frozen=True)
class Id:
    """A new unique id of NCCL for the communicator `key`, from the process that issued its first."""

    key: str
    id: bytes


@dataclass(frozen=True)
class HostCopy:
    """Parameters and optimizer state in host memory: `bytes` from `offset` on of that file of the process.

    rank: whose process it is; or the agent's of another host, who has fetched that rank's copy. digest: of
    what is there, in which order; where it is taken to, it has to be the same.
    """

    rank: int
    process: int
    file: int
    offset: int
    bytes: int
    digest: int


@dataclass(frozen=True)
class Making:
    """One communicator to be made: `key`, split from `parent` unless that is empty.

    key is empty where this rank takes part in a split that gives it nothing.
    """

    parent: str
    split: int
    key: str


@dataclass(frozen=True)
class ProxyMessage:
    """What every message has: the newest recovery that its sender knows."""

    recovery: RecoveryNumber


@dataclass(frozen=True)
class Hello(ProxyMessage):
    """The first message of a worker's proxy. table: the hash of the calls that it knows, in hex."""

    pid: int
    rank: int
    table: str


@dataclass(frozen=True)
class Alarm(ProxyMessage):
    """A call has failed; who made it is held."""

    call: int
    error: str


# How a device is, as Report.device says it.
LOST, HEALTHY, SUSPECT, EMPTY, CHANGED = range(5)


@dataclass(frozen=True)
class Held(ProxyMessage):
    """The host is held before its next call, and what its device does from here on counts for nothing."""


@dataclass(frozen=True)
class Stopped(ProxyMessage):
    """The device is at rest where its state stays on it; else the host alone.

    kept_from, kept_to: the states of which the host has images, and the log since the first of them
    (kept_from > kept_to: none). images: bit i is set if the image of kept_from + i has parameters and
    optimizer state, too. copies: if they are in host memory where other ranks find them. device: LOST,
    HEALTHY, SUSPECT, EMPTY or CHANGED. begun, ended, ready: the newest optimizer steps that it has begun,
    ended, and that it could begin. log_end: the calls in the log. failed_call: 0 if none failed here.
    outgrown: if nothing is kept since the calls are more than the log holds: the state since which, plus 1.
    """

    kept_from: int
    kept_to: int
    images: int
    copies: int
    device: int
    begun: int
    ended: int
    ready: int
    log_end: int
    failed_call: int
    error: str
    communicators: tuple[Membership, ...]
    outgrown: int = 0


@dataclass(frozen=True)
class Ids(ProxyMessage):
    """A server is ready, with new unique ids for those that this process issued. Times in microseconds.

    ending: of bringing the old one to rest, or to its end. stays: 1 if it is the one that is ready. copy: the
    one that was ordered, or none.
    """

    ids: tuple[Id, ...]
    ending: int
    starting: int
    stays: int
    copy: tuple[HostCopy, ...] = ()


@dataclass(frozen=True)
class Done(ProxyMessage):
    """All calls are made again, and the host goes on. Times in microseconds.

    handles: of making streams, events, memory, kernels and library handles. image: of loading it. log_bytes,
    image_bytes: the most host memory that calls and images have taken at one time.
    """

    handles: int
    image: int
    communicators: int
    replay: int
    log_bytes: int
    image_bytes: int


@dataclass(frozen=True)
class Standing(ProxyMessage):
    """What a rank waits for; told when it is asked, and when it has waited for too long.

    waited: microseconds, since some thread waits for one answer of its device. limit: from when on that is
    too long; 0: it never is. communicators: with the counts until now; also those that it is about to make.
    """

    waited: int
    limit: int
    communicators: tuple[Membership, ...]

    @property
    def too_long(self) -> bool:
        """Whether its device counts as hanging."""
        return 0 < self.limit <= self.waited


# What a rank says of a validation; behind the step that all have tried after it; behind the one after which
# the agent wants all ranks to rest; and wherever it can't go on being kept.
FIRST, AGAIN, VALID, SWITCH_OFF, LEFT_OUT, TRIED, RESTS, FAILED = range(8)


def place_of(step: int, says: int) -> int:
    """Return the number of the place where a rank waits: before or behind the step, as it counts steps."""
    return 3 * step + {TRIED: 1, RESTS: 2}.get(says, 0)


@dataclass(frozen=True)
class Validates(ProxyMessage):
    """A rank waits at its place before an optimizer step for all others to validate their minibatches.

    place: where that is, see `place_of`. says: FIRST, or after its calls have been made again what follows
    from that; FAILED waits for nobody, but that nobody recovers any more. text: for VALID what has to be
    put back, for SWITCH_OFF, FAILED and LEFT_OUT why, a clause. digest: for VALID that of the parameters
    and the optimizer state; "" if they can't stay on the device, and then `unfit` says why, a clause; for
    TRIED, too, which says that the rank waits behind the step. RESTS: it does so because the agent has
    asked for it; unfit: why it can't rest there, a clause.
    """

    place: int
    says: int
    text: str
    digest: str = ""
    unfit: str = ""


@dataclass(frozen=True)
class Settled(ProxyMessage):
    """The host is held, all that it has called is over on its device, and its state is in host memory.

    settled: 1; 0 if that can't be, and text says why, a clause; then it is only held.
    """

    settled: int
    text: str


@dataclass(frozen=True)
class Stop(ProxyMessage):
    """Order: hold the host before its next call, whatever is under way; answer Held."""


@dataclass(frozen=True)
class Rest(ProxyMessage):
    """Order: all hosts are held, so come to rest; answer Stopped."""


@dataclass(frozen=True)
class Settle(ProxyMessage):
    """Order: nothing has failed, but hold the host, so that it can be written to files; answer Settled.

    The server stays. In the files the process is as one whose server has died.
    """


@dataclass(frozen=True)
class GoOn(ProxyMessage):
    """Order: that was done, so hold the host no more; if something has failed meanwhile, say so."""


@dataclass(frozen=True)
class Restart(ProxyMessage):
    """Order: have the server drop all that it has made, or end it and start a new one; answer Ids.

    may_stay: 0 if a new one is wanted in any case. finish: the optimizer step that it makes before, for which
    it is ready; copy: the state whose parameters and optimizer state it copies to host memory then (0: none).
    """

    may_stay: int
    finish: int = 0
    copy: int = 0


@dataclass(frozen=True)
class Replay(ProxyMessage):
    """Order: load the image of `state`, make the communicators, make the log's calls again; answer Done.

    deliver_error: not the call that has failed, whose error the program gets. overwrite: 1 for a validation,
    in which what the rank does not know to be needed is overwritten before. in_place: 1 if the parameters and
    the optimizer state are on the device as they have to be; else source has where they are taken from, or
    they are in the image.
    """

    state: int
    deliver_error: int
    overwrite: int
    in_place: int
    source: tuple[HostCopy, ...]
    ids: tuple[Id, ...]
    making: tuple[Making, ...]


@dataclass(frozen=True)
class GiveUp(ProxyMessage):
    """Order: the held calls get their errors; there will be no recovery any more."""

    reason: str


@dataclass(frozen=True)
class Ask(ProxyMessage):
    """Question: what do you wait for? Answered by Standing."""


@dataclass(frozen=True)
class Validated(ProxyMessage):
    """Order: go on; the minibatches of all ranks are valid, or (0) this is not the time to see that.

    place: where the rank waits; if it has gone on from there, that is no answer for it. valid: 2 if the
    parameters and the optimizer state may stay on the devices, so that all try that in this step; and behind
    it (TRIED) if they do from the next step on.
    """

    place: int
    valid: int


FromProxy = Hello | Alarm | Held | Stopped | Ids | Done | Standing | Validates | Settled
ToProxy = Stop | Rest | Restart | Replay | GiveUp | Ask | Validated | Settle | GoOn

_KINDS: dict[int, type[Any]] = {
    1: Hello,
    2: Alarm,
    3: Stopped,
    4: Ids,
    5: Done,
    6: Standing,
    7: Validates,
    8: Held,
    9: Settled,
    16: Stop,
    17: Restart,
    18: Replay,
    19: GiveUp,
    20: Ask,
    21: Validated,
    22: Rest,
    23: Settle,
    24: GoOn,
}
_TEXT, _KEY = "text", "key"  # a key is written in hex here; an empty one is all zeros there
# Of each field what `struct` calls it, or _TEXT or _KEY, or the class of which it is a list.
_FORMS: dict[type[Any], tuple[Any, ...]] = {
    Id: (_KEY, "128s"),
    Count: ("Q", "i", "Q", "Q"),
    Membership: (_KEY, _KEY, "I", "i", "I", "Q", "Q", Count),
    Making: (_KEY, "I", _KEY),
    Hello: ("i", "i", _TEXT),
    Alarm: ("Q", _TEXT),
    HostCopy: ("i", "i", "i", "Q", "Q", "Q"),
    Stopped: ("Q", "Q", "Q", "Q", "Q", "Q", "Q", "Q", "Q", "Q", _TEXT, Membership, "Q"),
    Ids: (Id, "Q", "Q", "Q", HostCopy),
    Done: ("Q", "Q", "Q", "Q", "Q", "Q"),
    Standing: ("Q", "Q", Membership),
    Held: (),
    Settled: ("Q", _TEXT),
    Stop: (),
    Rest: (),
    Settle: (),
    GoOn: (),
    Restart: ("Q", "Q", "Q"),
    Replay: ("Q", "Q", "Q", "Q", HostCopy, Id, Making),
    GiveUp: (_TEXT,),
    Ask: (),
    Validates: ("Q", "Q", _TEXT, _TEXT, _TEXT),
    Validated: ("Q", "Q"),
}
_HEADER = struct.Struct("<IIQQ")


def encode(message: FromProxy | ToProxy) -> bytes:
    """Return the datagram. Raises MessageError if a value does not fit, or all is longer than MAX_BYTES."""
    kind = next(number for number, known in _KINDS.items() if type(message) is known)
    try:
        data = _HEADER.pack(kind, VERSION, *message.recovery) + _pack(message, first=1)
    except struct.error as error:
        raise MessageError(f"A message {type(message).__name__} can't be sent: {error}.") from error
    if len(data) > MAX_BYTES:
        raise MessageError(
            f"A message {type(message).__name__} has {len(data)} bytes; at most {MAX_BYTES} can be sent."
        )
    return data


def decode(data: bytes) -> FromProxy | ToProxy:
    """Return the message of a datagram. Raises MessageError for anything that is not one whole message."""
    reader = _Reader(data)
    kind, version, term, number = reader.take(_HEADER)
    if version != VERSION:
        raise MessageError(
            f"A device proxy speaks version {version} of its messages, this agent {VERSION}: install jitckpt "
            "again."
        )
    if kind not in _KINDS:
        raise MessageError(f"A message has the unknown kind {kind}.")
    message: FromProxy | ToProxy = _KINDS[kind]((term, number), *reader.fields(_KINDS[kind]))
    if reader.rest:
        raise MessageError(f"A message {type(message).__name__} has {reader.rest} bytes too many.")
    return message


def _pack(value: Any, first: int = 0) -> bytes:
    parts = []
    for form, field in zip(_FORMS[type(value)], fields(value)[first:], strict=True):
        content = getattr(value, field.name)
        if form is _TEXT:
            text = content.encode(errors="replace")[:MAX_TEXT]
            parts.append(struct.pack("<I", len(text)) + text)
        elif form is _KEY:
            parts.append(_key_bytes(content))
        elif isinstance(form, str):
            if isinstance(content, bytes) and len(content) != struct.calcsize(form):
                size = struct.calcsize(form)
                raise struct.error(f"{field.name} has {len(content)} bytes in place of {size}")
            parts.append(struct.pack(f"<{form}", content))
        else:
            parts.append(struct.pack("<I", len(content)) + b"".join(map(_pack, content)))
    return b"".join(parts)


def _key_bytes(key: str) -> bytes:
    if len(key) not in (0, 2 * KEY_BYTES):
        raise struct.error(f"{key!r} is no key")
    return bytes.fromhex(key).ljust(KEY_BYTES, b"\0")


class _Reader:
    """What is left of a datagram."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def rest(self) -> int:
        return len(self._data) - self._at

    def bytes(self, size: int) -> bytes:
        if size > self.rest:
            raise MessageError(f"A message of {len(self._data)} bytes ends too early.")
        self._at += size
        return self._data[self._at - size : self._at]

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.bytes(form.size))

    def number(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def fields(self, kind: type[Any]) -> list[Any]:
        return [self.field(form) for form in _FORMS[kind]]

    def field(self, form: Any) -> Any:
        if form is _TEXT:
            size = self.number()
            if size > MAX_TEXT:
                raise MessageError(f"A message has a text of {size} bytes; at most {MAX_TEXT} are allowed.")
            return self.bytes(size).decode(errors="replace")
        if form is _KEY:
            key = self.bytes(KEY_BYTES)
            return key.hex() if any(key) else ""
        if isinstance(form, str):
            return self.take(struct.Struct(f"<{form}"))[0]
        # Not by the number alone: a damaged one must not fill the memory.
        found = []
        for _ in range(self.number()):
            found.append(form(*self.fields(form)))
        return tuple(found)
