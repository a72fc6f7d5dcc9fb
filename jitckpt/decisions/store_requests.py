"""What a client of torch's TCPStore has asked and not been answered: what another connection has to be told.

A client has one request under way at a time. The store answers all that have an answer at once, but for a
WAIT; so once it has read all that a connection has brought and has closed it, at most a WAIT is open, and
that may be asked again: nothing has been done for it. The numbers are those of torch's TCPStoreBackend.hpp.
"""

from dataclasses import dataclass, field

VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUMBER_OF_KEYS, DELETE_KEY = range(9)
APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LENGTH, LIST_KEYS = range(9, 18)
WRITES = frozenset({SET, COMPARE_SET, ADD, DELETE_KEY, APPEND, MULTI_SET, QUEUE_PUSH, QUEUE_POP})
WITHOUT_ANSWER = frozenset({VALIDATE, SET, APPEND, MULTI_SET, QUEUE_PUSH})
# How many texts make up a request, and how many bytes follow them.
_TEXTS = {SET: 2, COMPARE_SET: 3, GET: 1, ADD: 1, DELETE_KEY: 1, APPEND: 2, QUEUE_PUSH: 2, QUEUE_POP: 1}
_TEXTS |= {QUEUE_LENGTH: 1}
_BYTES = {VALIDATE: 4, ADD: 8, PING: 4}
_TEXTS_EACH = {CHECK: 1, WAIT: 1, MULTI_GET: 1, MULTI_SET: 2}  # of a list, whose length comes first
_ALONE = frozenset({NUMBER_OF_KEYS, CANCEL_WAIT, LIST_KEYS})
_NUMBER = 8  # bytes


class UnknownRequestError(Exception):
    """A client asks something of which it is not known where it ends."""


def request_end(data: bytes | bytearray) -> int | None:
    """Return how many bytes the first request in `data` has; None if it has not come whole."""
    if not data:
        return None
    kind, at = data[0], 1
    if kind not in _TEXTS.keys() | _BYTES.keys() | _TEXTS_EACH.keys() | _ALONE:
        raise UnknownRequestError(f"it asks the job's store something unknown (request {kind})")
    texts = _TEXTS.get(kind, 0)
    if kind in _TEXTS_EACH:
        if len(data) < at + _NUMBER:
            return None
        texts, at = _TEXTS_EACH[kind] * _number(data, at), at + _NUMBER
    for _ in range(texts):
        if len(data) < at + _NUMBER:
            return None
        at += _NUMBER + _number(data, at)
    at += _BYTES.get(kind, 0)
    return at if len(data) >= at else None


def _number(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + _NUMBER], "little")


def keys_written(request: bytes) -> list[bytes]:
    """Return the keys that a whole request may change, as the store has them."""
    kind, at, found = request[0], 1, list[bytes]()
    if kind not in WRITES:
        return found
    pairs = 1
    if kind == MULTI_SET:
        pairs, at = _number(request, at), at + _NUMBER
    for _ in range(pairs):
        end = at + _NUMBER + _number(request, at)
        found.append(request[at + _NUMBER : end])
        at = end + _NUMBER + _number(request, end) if kind == MULTI_SET else end
    return found


@dataclass
class Conversation:
    """A client with the store.

    greeting: its first request, by which it says that it is one. waits: the WAIT that is not answered. asks:
    whether something else is not. partial: the beginning of a request that has not come whole. unknown: why
    nobody knows any more where it stands. written: the keys that it may have changed.
    """

    greeting: bytes = b""
    waits: bytes = b""
    asks: bool = False
    partial: bytearray = field(default_factory=bytearray)
    unknown: str = ""
    written: set[bytes] = field(default_factory=set)

    def asked(self, data: bytes) -> None:
        """The client has said this."""
        if self.unknown:
            return
        self.partial += data
        try:
            while (end := request_end(self.partial)) is not None:
                self._request(bytes(self.partial[:end]))
                del self.partial[:end]
        except UnknownRequestError as error:
            self.unknown = str(error)
            self.partial.clear()

    def answered(self) -> None:
        """The store has said something: that is what the request under way was for."""
        self.waits, self.asks = b"", False

    def obstacle(self) -> str:
        """Return why another connection can't go on with it, once the store has closed this one; or ""."""
        if self.unknown:
            return self.unknown
        return "the job's store has not answered it" if self.asks else ""

    def again(self) -> bytes:
        """Return what another connection has to say before anything else."""
        return self.greeting + self.waits + self.partial

    def _request(self, whole: bytes) -> None:
        kind = whole[0]
        self.written.update(keys_written(whole))
        if kind == VALIDATE:
            self.greeting = whole
        elif kind == WAIT:
            self.waits = whole
        elif kind not in WITHOUT_ANSWER:  # that of a CANCEL_WAIT is the WAIT's, or comes behind it
            self.asks = True
