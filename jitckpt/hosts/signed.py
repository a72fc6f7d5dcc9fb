"""What an agent leaves where others could write, too: JSON, with a proof that it knows the job's secret.

Torch's store takes anything from everybody who reaches its port. So what lies there is never unpickled, and
counts only if it was signed (HMAC-SHA256) for the very place where it lies. Without a secret that the hosts
were given (--secret-file) everybody can sign: then it is JSON, its parts are checked, and no more.
"""

import hmac
import json
from dataclasses import dataclass
from typing import Any, Protocol

from jitckpt.errors import JitckptError

MAX_BYTES = 4 << 20  # of an entry
_DIGITS = 64  # of a signature
_NOBODYS = b"no secret"


class ForeignError(JitckptError):
    """What lies there was not written by an agent of this job; the text is a clause."""


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


@dataclass(frozen=True, repr=False)
class Signature:
    """Of one job. secret: what only its agents know; None if they were given none."""

    job: str
    secret: bytes | None = None

    def write(self, place: str, content: Any) -> str:
        """Return what is to lie at a place."""
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        return self._of(place, text.encode()) + text

    def read(self, place: str, entry: bytes) -> Any:
        """Return the content of what lies at a place. Raises ForeignError if no agent wrote it there."""
        if len(entry) > MAX_BYTES:
            raise ForeignError(f"an entry has {len(entry)} bytes; at most {MAX_BYTES} are read")
        proof, text = entry[:_DIGITS], entry[_DIGITS:]
        if not hmac.compare_digest(proof, self._of(place, text).encode()):
            raise ForeignError("an entry was not signed with this job's secret")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ForeignError(f"an entry is not JSON ({error})") from error

    def put(self, store: Store, place: str, content: Any) -> None:
        """Leave something in a store."""
        store.set(place, self.write(place, content))

    def take(self, store: Store, place: str) -> Any:
        """Wait for what an agent leaves in a store, and return it. Raises ForeignError if it was another."""
        return self.read(place, store.get(place))

    def _of(self, place: str, text: bytes) -> str:
        said = b"\0".join([b"jitckpt entry", self.job.encode(), place.encode(), text])
        return hmac.digest(self.secret or _NOBODYS, said, "sha256").hex()
