"""Which way of the memory tier fits a job, by what is measured (`--memory-tier auto`). Pure.

By memory, once the first snapshots are there: copies on other hosts, or XOR parity, where copies have no
room. By traffic, once it is known how long a copy takes: whole states, or gradients with which the other
hosts make the optimizer's steps again, where only with these there is a snapshot of each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jitckpt.decisions.memory_wanted import GROUP
from jitckpt.decisions.pace import steps_between
from jitckpt.decisions.redundancy import LEAST_GROUP, cell, groups
from jitckpt.decisions.sizes import show_bytes

MARGIN = 1.05  # of the bytes that are needed: tables and pages
# A host makes steps on one core; Adam's slowest way takes 2.6 ms for a million numbers in float32 (4 MB).
STEP_SECONDS_PER_BYTE = 1e-9
MOST_WAIT = 4.0  # seconds, once: of the first copy, whose next step is not to wait for it in vain
NOTICED = 0.02  # of a step: a training that waits longer for gradients in each step does without


@dataclass(frozen=True)
class HostStates:
    """What a host's ranks have.

    states: bytes of a snapshot of each. memory: bytes that the host may take. sent: bytes of each that
    another host needs to make an optimizer step again; none where it is not known that it can. chunks: of
    each state, which parity does not cut smaller. went: with `sent`, bytes of each that go where that is not.
    """

    states: Sequence[int]
    memory: float
    sent: Sequence[int] = ()
    chunks: Sequence[int] = ()
    went: Sequence[int] = ()


@dataclass(frozen=True)
class ByMemory:
    """parity: in the place of copies. text: what is chosen, and why; "" if nothing speaks against copies."""

    parity: bool
    text: str


@dataclass(frozen=True)
class ByTraffic:
    """every: steps from one snapshot to the next. gradients: in the place of states. text: why, a clause."""

    every: int
    gradients: bool
    text: str


def by_memory(hosts: Sequence[HostStates], placed: Sequence[Sequence[int]]) -> ByMemory:
    """Choose what has room. placed: of each host, those that are to have its states, itself first."""
    lacking = _lacking(hosts, for_copies(hosts, placed))
    if not lacking:
        return ByMemory(False, "")
    if len(hosts) < LEAST_GROUP:
        return ByMemory(False, f"copies, since parity needs {LEAST_GROUP} hosts, although {lacking}")
    if problem := _lacking(hosts, for_parity(hosts)):
        return ByMemory(False, f"copies, although {lacking}, since parity has no room either: {problem}")
    return ByMemory(True, f"XOR parity in the place of copies, which have no room: {lacking}")


def for_copies(hosts: Sequence[HostStates], placed: Sequence[Sequence[int]]) -> list[float]:
    """Return the bytes that each host needs for two steps of its own states, and of those that it keeps."""
    needed = [0.0] * len(hosts)
    for one, keepers in zip(hosts, placed, strict=True):
        for host in keepers:
            needed[host] += 2 * MARGIN * sum(one.states)
    return needed


def for_parity(hosts: Sequence[HostStates]) -> list[float]:
    """Return the same with parity: a host's cells of each rank's place in its group lie upon each other."""
    needed = [2 * MARGIN * sum(one.states) for one in hosts]
    for group in groups(len(hosts), GROUP):
        for place, host in enumerate(group):
            for rank in range(max(len(hosts[member].states) for member in group)):
                cells = (
                    _cell_bytes(hosts[member], rank, len(group), shard, place)
                    for shard, member in enumerate(group)
                    if shard != place and rank < len(hosts[member].states)
                )
                needed[host] += 2 * MARGIN * max(cells, default=0.0)
    return needed


def _cell_bytes(of: HostStates, rank: int, members: int, shard: int, place: int) -> float:
    chunks = of.chunks[rank]
    return of.states[rank] * len(cell(members, shard, place, chunks)) / chunks


def _lacking(hosts: Sequence[HostStates], needed: Sequence[float]) -> str:
    """Return a clause on the host that lacks most; "" if all have room."""
    number = max(range(len(hosts)), key=lambda host: needed[host] - hosts[host].memory)
    if needed[number] <= hosts[number].memory:
        return ""
    return (
        f"host {number} would need {show_bytes(needed[number])} of memory, and may take "
        f"{show_bytes(hosts[number].memory)}"
    )


def by_traffic(
    snapshot_seconds: float,
    step_seconds: float,
    hosts: Sequence[HostStates],
    placed: Sequence[Sequence[int]],
    *,
    may_be_gradients: bool = True,
) -> ByTraffic:
    """Choose what is made most often; of ways that are as often, whole states, for which no host works.

    snapshot_seconds: that the slowest takes beside the training until it is whole everywhere.
    """
    every = steps_between(snapshot_seconds, step_seconds)
    often = "each step" if every == 1 else f"every {every} steps"
    whole = (
        f"a snapshot after {often}, since one takes {snapshot_seconds:.3g} s beside the training until it is "
        f"whole everywhere, and a step {step_seconds:.3g} s"
    )
    if every == 1 or not may_be_gradients:
        return ByTraffic(every, False, whole)
    if problem := _why_no_gradients(snapshot_seconds, step_seconds, hosts, placed):
        return ByTraffic(every, False, f"{whole}; no gradients, since {problem}")
    return ByTraffic(
        1,
        True,
        f"gradients, with which other hosts make the optimizer's steps again, after each step: they have "
        f"{_share(hosts):.0%} of the bytes of whole states, which take {snapshot_seconds:.3g} s beside the "
        f"training until they are whole everywhere, {every} steps of {step_seconds:.3g} s",
    )


def _why_no_gradients(
    snapshot_seconds: float,
    step_seconds: float,
    hosts: Sequence[HostStates],
    placed: Sequence[Sequence[int]],
) -> str:
    if not all(len(one.sent) == len(one.states) > 0 for one in hosts):
        return "not all ranks' optimizer steps can be made again on another host"
    if any(len(set(keepers)) < 2 for keepers in placed):
        return "not all hosts have another one that keeps their states"
    seconds = gradient_seconds(snapshot_seconds, hosts, placed)
    if steps_between(seconds, step_seconds) > 1:
        return f"they would take about {seconds:.3g} s, too long for each step"
    if problem := _no_room_for_both(hosts, placed):
        return f"they take room: {problem}"
    if (wait := snapshot_seconds - step_seconds) > MOST_WAIT:
        return f"the training would wait {wait:.3g} s once, for the first copy"
    return ""


def _no_room_for_both(hosts: Sequence[HostStates], placed: Sequence[Sequence[int]]) -> str:
    """Return which host has no room for states and gradients, a clause; "" if all have."""
    both = [HostStates([*map(sum, zip(one.states, one.sent, strict=True))], one.memory) for one in hosts]
    for number, one in enumerate(both):
        if 2 * MARGIN * max(one.states) > (memory := one.memory / len(one.states)):
            return f"a rank of host {number} may take {show_bytes(memory)}"
    return _lacking(both, for_copies(both, placed))


def gradient_seconds(
    snapshot_seconds: float, hosts: Sequence[HostStates], placed: Sequence[Sequence[int]]
) -> float:
    """Return about how long it takes until a step is whole everywhere of which gradients are sent."""
    made = [0] * len(hosts)  # bytes of gradients with which a host makes steps, one after the other
    for owner, (one, keepers) in enumerate(zip(hosts, placed, strict=True)):
        for host in keepers:
            made[host] += sum(one.sent) if host != owner else 0
    return snapshot_seconds * _share(hosts) + STEP_SECONDS_PER_BYTE * max(made)


def _share(hosts: Sequence[HostStates]) -> float:
    """Return the bytes that gradients have of those that go with whole states, where that is most."""
    return max(sum(one.sent) / max(1, sum(one.went)) for one in hosts)


def waits_too_long(waited: Sequence[tuple[int, float]], step_seconds: float) -> bool:
    """Return whether the training waits too long for gradients, by how long it had waited at which steps."""
    (first, before), (last, after) = waited[0], waited[-1]
    return after - before > NOTICED * step_seconds * (last - first)
