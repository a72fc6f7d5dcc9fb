"""What the memory tiers of this user's jobs have on this host, as their keepers hold it."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jitckpt.decisions import sources
from jitckpt.decisions.sources import Kind, Source
from jitckpt.errors import SaveError
from jitckpt.tiers import chunks, host_memory, parity, part_store, parts
from jitckpt.tiers.shard import Index, Seal

HERE = -1  # this host among all, whose numbers are not known
DELETED = " (deleted)"  # behind the name of what has none
KEEPER = b"jitckpt.tiers.keeper"


@dataclass(frozen=True)
class KeptShard:
    """A rank's whole state after a step, or the parity of several. keeper: the process that holds it.

    safe: every rank of the job has that step, on all hosts that it is meant for. own: the rank ran on this
    host; else it is kept for another one. problem: why it can't be used; "" as far as is known. timeline: of
    which start it is. parity_of: the ranks whose shards it is the parity of; then `rank` is -1. cut_among:
    the ranks that have the rest of what they hold alike. part: chunks of the shard alone, the first and the
    last, and how many it has; in_file: they are in a file without a name. copied, minibatch: of the rank's
    snapshots of this start, as host_memory has it.
    """

    keeper: int
    job: str
    world_size: int
    rank: int
    step: int
    bytes: int
    time: float
    safe: bool
    own: bool
    problem: str = ""
    timeline: str = ""
    parity_of: tuple[int, ...] = ()
    cut_among: tuple[int, ...] = ()
    part: tuple[int, int, int] | None = None
    in_file: bool = False
    copied: dict[str, int] = field(default_factory=dict)
    minibatch: dict[str, float] = field(default_factory=dict)


def inspect(*, verify: bool = False) -> list[KeptShard]:
    """Return what is kept, by keeper, rank and step. verify: read every byte."""
    found = [one for keeper in _keepers() for one in _kept_by(keeper, verify)]
    return sorted(found, key=lambda one: (one.keeper, one.rank, -one.step))


def _keepers() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid() and KEEPER in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except OSError:  # it has just ended
            continue


def _kept_by(keeper: int, verify: bool) -> Iterator[KeptShard]:
    folder = Path(f"/proc/{keeper}/fd")
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            if "jitckpt-memory-tier" not in (name := os.readlink(path)) and not name.endswith(DELETED):
                continue
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            if host_memory.is_one(descriptor):
                yield from _in(keeper, descriptor, verify)
        finally:
            os.close(descriptor)


def _in(keeper: int, descriptor: int, verify: bool) -> Iterator[KeptShard]:
    for slot, seal in host_memory.found(descriptor):
        if (found := _parity(keeper, descriptor, slot, verify)) is not None:
            yield found
            continue
        try:
            index = host_memory.index_in(descriptor, slot, seal)
        except SaveError as error:
            yield KeptShard(keeper, "", 0, -1, seal.step, seal.size, 0.0, False, False, str(error))
            continue
        problem = ""
        in_file = not host_memory.is_memory(descriptor)
        if verify:
            try:
                _check(descriptor, slot, seal, index)
            except SaveError as error:
                problem = str(error)
        identity = index.identity
        own = bool(host_memory.word(descriptor, host_memory.READY))
        safe = own and host_memory.word(descriptor, host_memory.SAFE) == seal.step
        yield KeptShard(
            keeper,
            identity.job,
            identity.world_size,
            identity.rank,
            seal.step,
            seal.size,
            index.time,
            safe,
            own,
            problem,
            index.timeline,
            cut_among=() if index.cut is None else tuple(index.cut.members),
            part=_chunks(index, seal),
            in_file=in_file,
            copied=host_memory.copied(descriptor) if own else {},
            minibatch=host_memory.minibatch_seconds(descriptor) if own else {},
        )


def _chunks(index: Index, seal: Seal) -> tuple[int, int, int] | None:
    """Return which chunks of a shard are here, if it is a part of one."""
    try:
        one = parts.told(index, seal)
    except SaveError:  # it is a whole one
        return None
    return one.first, one.first + one.count - 1, one.chunks


def _check(descriptor: int, slot: int, seal: Seal, index: Index) -> None:
    """Read every byte. Raises SaveError if it is not whole."""
    if index.part is None:
        host_memory.check(descriptor, seal.step)
        return
    for first, count in part_store.few(len(index.checksums)):
        window = part_store.window_of(descriptor, slot, (first, count), seal.data_bytes)
        with chunks.of(index):
            chunks.verify(window, index.digests[first : first + count])


def _parity(keeper: int, descriptor: int, slot: int, verify: bool) -> KeptShard | None:
    """Return the parity that is whole in a slot; None if it is a shard, or damaged."""
    seal = host_memory.seal_in(descriptor, slot)
    if seal is None:
        return None
    try:
        index = parity.parse_index(host_memory.index_bytes(descriptor, slot, seal), seal)
    except SaveError:
        return None
    problem = ""
    if verify:
        try:
            with chunks.of_parity(seal.step):
                window = chunks.window(descriptor, host_memory.data_place(slot), seal.data_bytes)
                chunks.verify(window, index.digests)
        except SaveError as error:
            problem = str(error)
    of = tuple(sorted(index.stripe.others()))
    return KeptShard(
        keeper,
        index.job,
        index.world_size,
        -1,
        seal.step,
        seal.size,
        0.0,
        False,
        False,
        problem,
        index.timeline,
        of,
    )


def in_words(found: Sequence[KeptShard]) -> list[str]:
    """Return for each job what a start would go on from, and why, by what this host knows.

    It decides as a start does (decisions/sources.py); with other hosts' memory that may be a newer step.
    """
    sentences = []
    for job in sorted({one.job for one in found if one.job}):
        kept = [one for one in found if one.job == job and not one.parity_of and one.part is None]
        if not kept:
            continue  # only parity of what other hosts had
        ranks = range(max(one.world_size for one in kept))
        elsewhere = set(ranks) - {one.rank for one in kept}
        here = [rank for rank in ranks if rank not in elsewhere]
        plan = sources.decide(
            here, [_source(one) for one in kept], [_source(one) for one in kept if one.problem]
        )
        what = "no step is whole here for all of its ranks"
        if plan is not None:
            what = plan.reason.replace(f"the memory of host {HERE}", "what this host keeps for others")
        more = f", as far as this host knows, which has nothing of {sources.listed(sorted(elsewhere))}"
        sentences.append(f"Job {job[:8]}: {what}{more if elsewhere else ''}.")
    return sentences


def copies_in_words(found: Sequence[KeptShard]) -> list[str]:
    """Return where in its minibatches each job's own ranks here have copied their snapshots."""
    sentences = []
    for job in sorted({one.job for one in found if one.own}):
        ranks = {one.rank: one for one in found if one.job == job and one.own}
        copied: Counter[str] = Counter()
        minibatch: dict[str, float] = {}
        for one in ranks.values():
            copied.update(one.copied)
            minibatch |= {
                carried: max(seconds, minibatch.get(carried, 0.0))
                for carried, seconds in one.minibatch.items()
            }
        if not copied.total():
            continue
        shares = ", ".join(f"{size / copied.total():.0%} {where}" for where, size in copied.items() if size)
        times = ", ".join(f"{carried} {seconds:.3g} s" for carried, seconds in minibatch.items())
        sentences.append(
            f"Job {job[:8]}: its snapshots left the device so: {shares}."
            + (f" A minibatch takes, by what it carries: {times}." if times else "")
        )
    return sentences


def _source(one: KeptShard) -> Source:
    kind = Kind.OWN_MEMORY if one.own else Kind.PEER_MEMORY
    return Source(one.rank, one.step, kind, one.timeline, HERE, one.bytes)
