"""Which hosts keep copies of which host's state while a job runs: GEMINI's placement, by what hosts tell.

The size of a state is not known when hosts meet. So each host is given as many copies as its memory has room
for beside the others' memory, not by bytes: the largest size is taken for which there is a placement.
"""

from collections.abc import Mapping, Sequence

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.placement import BUFFERS, Machine, Placement, place

NOTE = "#"


def holders(machines: Sequence[Machine], copies: int) -> Placement:
    """Return who keeps whose state, itself first; copies: of each, no more than there are hosts.

    Raises InvalidInput where hosts name different numbers of failure domains.
    """
    copies = min(copies, len(machines))
    size = sum(machine.memory_bytes for machine in machines) / (BUFFERS * copies * len(machines))
    if size == float("inf"):
        size = 0.0
    while size >= 1:
        try:
            return place(machines, copies, size)
        except InvalidInput:
            size /= 2
    return place(machines, copies, 0.0)


def nearest(machines: Sequence[Machine], owner: int, others: Sequence[int]) -> list[int]:
    """Return the other hosts, those first that share fewest failure domains with the owner."""

    return sorted(others, key=lambda other: (shared_kinds(machines, owner, other), other))


def shared_kinds(machines: Sequence[Machine], one: int, other: int) -> int:
    """Return how many failure domains two hosts share."""
    pairs = zip(machines[one].domains, machines[other].domains, strict=True)
    return sum(mine == theirs for mine, theirs in pairs)


def shared_domains(machines: Sequence[Machine], placed: Placement) -> list[str]:
    """Return the failure domains that have two copies of one host's state, in order."""
    found = set()
    for held_by in placed.holders:
        for kind in range(len(machines[0].domains)):
            names = [machines[host].domains[kind] for host in held_by]
            found |= {name for name in names if names.count(name) > 1}
    return sorted(found)


def in_use(domains: Sequence[tuple[str, ...]], by: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the failure domains of hosts by which copies are placed.

    by: of each host, the scheduler that has named its domains; "" where an option has. A scheduler's count
    where it has named all hosts', and these are not all in one: nobody has asked for them.
    """
    count = all(by) and len(set(domains)) > 1
    return [of_host if count or not named else () for of_host, named in zip(domains, by, strict=True)]


def read_domains(text: str) -> dict[str, tuple[str, ...]]:
    """Read which failure domains hosts are in: a line for each, its name and then a domain of each kind.

    Raises InvalidInput.
    """
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition(NOTE)[0].split()
        if not words:
            continue
        name, *domains = words
        if not domains:
            raise InvalidInput(f"line {number}: {name} is in no failure domain; name at least one behind it")
        if name in found:
            raise InvalidInput(f"line {number}: {name} has a line already")
        if found and len(domains) != len(first := next(iter(found.values()))):
            raise InvalidInput(
                f"line {number}: {name} is in {len(domains)} failure domains and the first host in "
                f"{len(first)}; each needs one of every kind"
            )
        found[name] = tuple(domains)
    if not found:
        raise InvalidInput("it names no host; a line is HOST DOMAIN [DOMAIN ...]")
    return found


def domains_of(known: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> tuple[str, ...]:
    """Return the domains of the host that is called so. Raises InvalidInput."""
    for name in names:
        if name in known:
            return known[name]
    raise InvalidInput(f"it does not name this host ({', '.join(names)})")
