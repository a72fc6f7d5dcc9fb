"""The store of one start's agents, kept by a coordination service: what they and torch's agent use of one.

A put counts only while the start is the newest: an agent that was cut off, and whose job has gone on
without it, is told so and changes nothing. Whoever waits for another hears if that one is lost.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from jitckpt.hosts.coordination import Coordination, CoordinationError
from jitckpt.hosts.signed import ForeignError, Signature

LOOK_SECONDS = 1.0
DEFAULT_TIMEOUT = 300.0


class JobStore:
    """Keys are read as often as wanted; they are the start's own."""

    def __init__(
        self,
        service: Coordination,
        prefix: str,
        *,
        fence: tuple[str, int],
        signature: Signature,
        look: Callable[[], None],
        lease: Callable[[], int],
    ) -> None:
        """fence: the key whose revision says that the start is the newest. look: raises if it is not.

        lease: under which what this agent puts is to lie.
        """
        self._service, self._prefix, self._fence = service, prefix, fence
        self._signature, self._look, self._lease = signature, look, lease
        self.timeout = timedelta(seconds=DEFAULT_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for a key."""
        self.timeout = timeout

    def set(self, key: str, value: str | bytes, /) -> None:
        """Put a value. Raises what `look` raises if the start is no longer the newest."""
        if not self._put(key, value):
            self._look()
            raise CoordinationError("the job has gone on without this agent")

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            found = self._service.get(self._prefix)
            places = [self._prefix + key for key in keys]
            if all(place in found.entries for place in places):
                return [self._read(place, found.entries[place].value) for place in places]
            self._look()
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [key for key in keys if self._prefix + key not in found.entries]
                raise DistStoreError(f"nobody has said {', '.join(missing)} in {self.timeout}")
            self._service.watch(self._prefix, found.revision, min(LOOK_SECONDS, left))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values."""
        before = self.timeout
        self.timeout = timeout or before
        try:
            self.multi_get(keys)
        finally:
            self.timeout = before

    def add(self, key: str, amount: int) -> int:
        """Add to a number that all agents count in; return what it is then."""
        place = self._prefix + key
        while True:
            found = self._service.get(place)
            entry = found.entries.get(place)
            # Who has counted last is a part of the value: two who add at once write the same number.
            count = amount + (0 if entry is None else int(self._read(place, entry.value).split()[0]))
            if self._put(key, f"{count} {id(self)} {time.monotonic_ns()}", found.revision_of(place)):
                return count
            self._look()

    def _put(self, key: str, value: str | bytes, revision: int | None = None) -> bool:
        """Return whether it was put: not if the start is over, or the key was changed since `revision`."""
        place = self._prefix + key
        text = value.decode() if isinstance(value, bytes) else value
        conditions = dict([self._fence]) | ({} if revision is None else {place: revision})
        entry = self._signature.write(place, text).encode()
        return self._service.put_if({place: entry}, conditions, self._lease()) is not None

    def _read(self, place: str, entry: bytes) -> bytes:
        text = self._signature.read(place, entry)
        if not isinstance(text, str):
            raise ForeignError("an entry is no text")
        return text.encode()
