"""What agents need of a service that keeps little for many: five calls, whoever answers them.

Keys are text, values bytes. Every change has a revision, higher than all before; a key's is that of its last
change, and 0 where there is none. Who may still change a key is said by conditions on revisions: of all who
change something at once by the same revision, one succeeds.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from jitckpt.errors import JitckptError


class CoordinationError(JitckptError):
    """The service gives no answer, or refuses; the text is a clause."""


class ServiceRefuses(CoordinationError):
    """It never takes this host as it is set up: its user, its rights, a certificate that is not trusted."""


class LeaseLost(CoordinationError):
    """The lease has ended, and what was put under it is gone."""


@dataclass(frozen=True)
class Entry:
    """What lies under a key, and the revision of its last change."""

    value: bytes
    revision: int


@dataclass(frozen=True)
class Entries:
    """All entries under a prefix at one revision of the whole."""

    entries: Mapping[str, Entry]
    revision: int

    def revision_of(self, key: str) -> int:
        """Return a key's revision, 0 if there is none."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.revision


class Coordination(ABC):
    """Every call raises CoordinationError if there is no answer within the patience it was made with.

    silence: the text of that error, once the user has been told.
    """

    silence = ""

    @abstractmethod
    def get(self, prefix: str) -> Entries:
        """Return all entries whose keys begin so. What was put before by anybody is among them."""

    @abstractmethod
    def put_if(
        self, puts: Mapping[str, bytes | None], revisions: Mapping[str, int], lease: int = 0
    ) -> int | None:
        """Put all of it (None: remove the key) if each key of `revisions` still has that revision.

        Returns the new revision, or None if nothing was put. lease: what is put goes when that ends. Values
        must tell their writers apart: after a lost answer they say whether it was this call that put them.
        """

    @abstractmethod
    def lease(self, seconds: float) -> int:
        """Return a new lease, which ends if it is not kept alive for so many seconds, or a little more."""

    @abstractmethod
    def keep_alive(self, lease: int) -> None:
        """Begin the lease's time anew. Raises LeaseLost if it has ended."""

    @abstractmethod
    def watch(self, prefix: str, revision: int, seconds: float) -> None:
        """Return once something under the prefix has changed after the revision, or the time is up.

        It may return too soon: whoever waits looks again, with get.
        """
