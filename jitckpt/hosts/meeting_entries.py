"""What a job's agents have at a coordination service to meet by: each entry's key, and what lies there."""

from contextlib import suppress
from typing import Any

from jitckpt.decisions.meeting import AgreedStart, Member
from jitckpt.errors import HostsError
from jitckpt.hosts.coordination import Entries
from jitckpt.hosts.rendezvous import SAME
from jitckpt.hosts.signed import ForeignError, Signature


def meeting_of(job: str) -> str:
    """Return how the keys begin by which a job's agents meet."""
    return f"jitckpt/{job}/meeting/"


class MeetingEntries:
    """Of one job, signed. Those that were written by others are an error, or do not count."""

    def __init__(self, signature: Signature) -> None:
        self._signature, self.prefix = signature, meeting_of(signature.job)

    def key(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def write(self, name: str, content: Any) -> dict[str, bytes | None]:
        """Return what is to be put."""
        key = self.key(name)
        return {key: self._signature.write(key, content).encode()}

    def read(self, found: Entries, name: str) -> Any:
        """Return what lies there, None for nothing. Raises HostsError if no agent of the job wrote it."""
        key = self.key(name)
        if key not in found.entries:
            return None
        try:
            return self._signature.read(key, found.entries[key].value)
        except ForeignError as error:
            raise HostsError(f"What lies at {key} can't be read: {error}. {SAME}") from error

    def last(self, found: Entries) -> AgreedStart | None:
        """Return the newest start. Raises HostsError if what lies there is none."""
        match self.read(found, "start"):
            case None:
                return None
            case [int(number), [*agents], int(step), str()] if all(isinstance(a, str) for a in agents):
                return AgreedStart(number, tuple(agents), step)
        raise HostsError(f"What lies at {self.key('start')} is no start. {SAME}")

    def member(self, agent: str, member: Member) -> dict[str, bytes | None]:
        """Return what is to be put, so that an agent is a member."""
        told = [member.after, member.place, member.since, member.step, member.address, member.start]
        return self.write(f"members/{agent}", [*told, member.had])

    def members(self, found: Entries) -> dict[str, Member]:
        """Return all members; what is none was left by others, and does not count."""
        prefix, members = self.key("members/"), {}
        for key, entry in found.entries.items():
            if not key.startswith(prefix):
                continue
            with suppress(ForeignError):
                match self._signature.read(key, entry.value):
                    case [
                        int(after),
                        None | int() as place,
                        int(since),
                        int(step),
                        str(address),
                        int(start),
                        None | int() as had,
                    ]:
                        members[key.removeprefix(prefix)] = Member(
                            after, place, since or entry.revision, step, address, start, had
                        )
        return members

    def who_is_not_well(self, found: Entries) -> str:
        """Return a sentence on hosts that are there, but not taken; "" if there is none."""
        prefix, unwell = self.key("unwell/"), []
        for key, entry in sorted(found.entries.items()):
            if key.startswith(prefix):
                with suppress(ForeignError):
                    match self._signature.read(key, entry.value):
                        case [str(address), str(why)]:
                            unwell.append(f"{address or 'a host'} is not taken ({why})")
        return f"{'; '.join(unwell)}." if unwell else ""
