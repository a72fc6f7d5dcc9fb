"""Which step all ranks go on from, where each reads the saves of its own shard alone.

A rank looks up which steps it could load: the folders' names and the metadata of its own or a replica's save
tell that. The newest step that all ranks could load, or one just before it of which no rank's own state is
lost, is checked: each reads one save of its shard, the one
that it will load, and if that is damaged another replica's. If a rank finds none, all pass on to the next
older step. What is said goes through rank 0 and torch's store, so it is linear in the ranks; and as each step
is decided by rank 0 alone, no two ranks ever take different ones. A rank that dies meanwhile keeps the others
waiting here, until its agent ends them; the next start's words have other keys.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jitckpt.decisions.sources import Kind, Source, SourcePlan, decide
from jitckpt.errors import CheckpointError, JitckptError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import (
    EXACT_WITHIN,
    WHERE,
    Choice,
    begun_anew,
    denies_first,
    in_turn,
    misfit,
    no_whole_save,
    not_exact,
    nothing_usable,
)
from jitckpt.state.shards import SharedStore, through_first


@dataclass(frozen=True)
class Offer:
    """What one rank could load, as far as names and metadata tell.

    newest: the newest step of which it has seen a finished save, of use or not; 0 if there is none.
    in_memory: of each step in the memory tier, of which start's minibatches it is. is_first: what it has seen
    is of the job's first save, or there is nothing. not_exact: its steps without the rank's own state.
    """

    steps: tuple[int, ...]
    newest: int
    in_memory: tuple[tuple[int, str], ...] = ()
    is_first: bool = False
    not_exact: tuple[int, ...] = ()

    def sources(self, rank: int) -> Iterator[Source]:
        """Yield what this rank, which has said it, could load."""
        yield from (Source(rank, step, Kind.FILES) for step in self.steps)
        yield from (Source(rank, step, Kind.OWN_MEMORY, timeline) for step, timeline in self.in_memory)


@dataclass(frozen=True)
class Verdict:
    """What rank 0 says. `step`: to be checked by all, or, if `decided`, to be taken; None if there is none.

    lost: one sentence for each newer step that some rank could not load. newest: of all offers.
    nothing_saved: no step was ever saved whole in files.
    """

    step: int | None
    decided: bool
    lost: Sequence[str]
    newest: int
    in_memory: bool = False  # it is to be loaded from there
    reason: str = ""
    nothing_saved: bool = False


class Decision:
    """Rank 0's part: pure, it is told what the ranks have said, by rank."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = shards
        self._offers: Sequence[Offer] = ()
        self._refused: dict[int, set[int]] = {}  # by step: the shards whose saves were damaged
        self._failed: list[Source] = []
        self._plan: SourcePlan | None = None

    def hear_offers(self, offers: Sequence[Offer]) -> Verdict:
        """Return what to check first."""
        self._offers = offers
        return self._next()

    def hear_checks(self, whole: Sequence[bool]) -> Verdict:
        """Return what follows from each rank's check of the last verdict's step."""
        assert self._plan is not None
        damaged = [rank for rank, good in enumerate(whole) if not good]
        if not damaged:
            return self._verdict(decided=True)
        self._failed += [self._plan.sources[rank] for rank in damaged]
        if not self._in_memory:
            self._refused[self._plan.step] = {self._shards[rank] for rank in damaged}
        return self._next()

    def _next(self) -> Verdict:
        sources = [source for rank, offer in enumerate(self._offers) for source in offer.sources(rank)]
        self._plan = decide(range(len(self._offers)), sources, self._failed)
        if self._plan is not None and not self._in_memory and self._without(self._plan.step):
            exact = [one for one in sources if one.kind is not Kind.FILES or not self._without(one.step)]
            near = decide(range(len(self._offers)), exact, self._failed)
            if near is not None and near.step >= self._plan.step - EXACT_WITHIN:
                self._plan = near
        return self._verdict(decided=self._plan is None)

    def _without(self, step: int) -> list[int]:
        """Return the ranks whose own state of a step is lost."""
        return [rank for rank, offer in enumerate(self._offers) if step in offer.not_exact]

    @property
    def _in_memory(self) -> bool:
        """Of one timeline all come from memory, or all from files."""
        return self._plan is not None and self._plan.sources[0].kind is Kind.OWN_MEMORY

    def _verdict(self, *, decided: bool) -> Verdict:
        newest = max(offer.newest for offer in self._offers)
        step = None if self._plan is None else self._plan.step
        lost = tuple(self._lost()) if decided else ()
        reason = "" if self._plan is None or not self._in_memory else self._plan.reason
        return Verdict(step, decided, lost, newest, self._in_memory, reason, self._nothing_saved)

    @property
    def _nothing_saved(self) -> bool:
        """A step that all offer was whole once, whatever the checks say of it now."""
        common = set.intersection(*(set(offer.steps) for offer in self._offers))
        return not common and all(offer.is_first for offer in self._offers)

    def _lost(self) -> Iterator[str]:
        some = {step for offer in self._offers for step in offer.steps}
        for step in sorted(some, reverse=True):
            if self._plan is not None and step <= self._plan.step:
                return
            missing = {
                shard
                for shard, offer in zip(self._shards, self._offers, strict=True)
                if step not in offer.steps
            }
            missing |= self._refused.get(step, set())
            if missing:
                yield f"Step {step} has {no_whole_save(sorted(missing))}."
            else:
                yield not_exact(step, self._without(step))


class InMemory(Protocol):
    """What the memory tier has of a rank. newest: the newest step that a start must not pass over.

    reasons: see OwnSaves.
    """

    newest: int
    reasons: list[str]

    def offer(self) -> tuple[tuple[int, str], ...]:
        """Return the steps that are of use, each with its timeline."""

    def check(self, step: int) -> bool:
        """Read the state of that step; return whether it is whole."""

    def choice(self, step: int) -> Choice:
        """Return what to load of a step that was checked."""


class OwnSaves:
    """The saves of one rank's shard in a directory, of which no more is read than has to be."""

    def __init__(self, root: Path, identity: Identity, replicas: Collection[int]) -> None:
        """replicas: the ranks that hold the same shard."""
        self.reasons: list[str] = []  # a sentence for each save that was passed over
        self._root, self._identity = root, identity
        self._newest = 0
        self._is_first = True
        self._names = folders.listed(root)
        near = frozenset(replicas)
        self._candidates: dict[int, list[SaveRecord]] = {}  # the first of each is the one to load
        self._rest: dict[int, Iterator[SaveRecord]] = {}
        self._look(near, among_replicas=True)
        if not self._candidates:
            self._look(near, among_replicas=False)  # a script may have given the shards to other ranks

    @property
    def offer(self) -> Offer:
        not_exact = tuple(step for step, found in self._candidates.items() if not self._is_exact(step, found))
        return Offer(tuple(self._candidates), self._newest, is_first=self._is_first, not_exact=not_exact)

    def check(self, step: int) -> bool:
        """Read a save of that step, and if it is damaged the next; return whether one is whole."""
        found = self._candidates[step]
        while found:
            problem = folders.verify(found[0])
            if problem is None:
                return True
            self.reasons.append(problem)
            found[:] = [record for record in [next(self._rest[step], None)] if record is not None]
        return False

    def choice(self, step: int, newest: int) -> Choice:
        """Return what to load of a step that was checked."""
        save = self._candidates[step][0]
        local: SaveRecord | None = save
        if save.rank != self._identity.rank:
            local = self._local(step)
        return Choice(step, save, local, tuple(self.reasons), newest)

    def _is_exact(self, step: int, found: Sequence[SaveRecord]) -> bool:
        """Return whether the rank's own state is there, as far as names tell."""
        return found[0].rank == self._identity.rank or ("local", self._identity.rank) in self._names[step]

    def _local(self, step: int) -> SaveRecord | None:
        if ("local", self._identity.rank) not in self._names[step]:
            return None
        record = folders.look_at(self._root, step, "local", self._identity.rank)
        problem = misfit(record, self._identity) or folders.verify(record)
        if problem is None:
            return record
        self.reasons.append(problem)
        return None

    def _look(self, replicas: frozenset[int], *, among_replicas: bool) -> None:
        for step, names in self._names.items():
            ranks = sorted(
                rank for kind, rank in names if kind == "rank" and (rank in replicas) == among_replicas
            )
            rest = self._fitting(step, ranks)
            first = next(rest, None)
            if first is not None:
                self._candidates[step], self._rest[step] = [first], rest

    def _fitting(self, step: int, ranks: Sequence[int]) -> Iterator[SaveRecord]:
        for rank in in_turn(ranks, self._identity.rank):
            record = folders.look_at(self._root, step, "rank", rank)
            if record.finished:
                self._newest = max(self._newest, step)
            problem = misfit(record, self._identity)
            self._is_first = self._is_first and not denies_first(record, problem)
            if problem is not None:
                self.reasons.append(problem)
            elif record.metadata and record.metadata.identity.shard == self._identity.shard:
                yield record


def alone(root: Path, identity: Identity) -> Choice | None:
    """Return what a rank loads of a job with one shard: all ranks come to the same step by themselves.

    None if there is no finished save at all. Raises CheckpointError if there are some but none can be used.
    """
    own = OwnSaves(root, identity, range(identity.world_size))
    offer = own.offer
    for step in offer.steps:
        if own.check(step):
            return own.choice(step, offer.newest)
        own.reasons.append(f"Step {step} has {no_whole_save([identity.shard])}.")
    if offer.newest:
        raise CheckpointError(nothing_usable(own.reasons, identity))
    return None


def together(
    store: SharedStore,
    root: Path,
    identity: Identity,
    memory: InMemory | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Choice | None:
    """Return what this rank loads of the step that all go on from. Every rank has to call it.

    memory: what the memory tier has of this rank. The directory may be this host's own. None if no rank has
    anything to go on from, or the job's first save was never finished, of which rank 0 warns. Raises
    CheckpointError on all ranks if there are other finished saves, or steps in memory, but none that all can
    load; JitckptError if a rank does not come.
    """
    try:
        return _together(store, root, identity, memory, warn)
    except RuntimeError as error:  # torch's DistStoreError, which names no class of ours
        raise JitckptError(
            f"Rank {identity.rank} did not hear from the others which step to go on from: {error}. Where "
            "the state is spread over ranks, each of them has to look for its save."
        ) from error


def _together(
    store: SharedStore, root: Path, identity: Identity, memory: InMemory | None, warn: Callable[[str], None]
) -> Choice | None:
    rank, world_size = identity.rank, identity.world_size

    def through_rank_0(what: str, value: object, decide: Callable[[list[Any]], object]) -> Any:
        text = through_first(
            store,
            what,
            rank,
            world_size,
            value=json.dumps(value),
            decide=lambda told: json.dumps(decide([json.loads(one) for one in told])),
        )
        return json.loads(text)

    shards: list[int] = through_rank_0("shard to load", identity.shard, lambda told: told)
    own = OwnSaves(root, identity, [other for other, shard in enumerate(shards) if shard == identity.shard])
    decision = Decision(shards)

    def hear_offers(told: list[dict[str, Any]]) -> object:
        return asdict(decision.hear_offers([_offer(one) for one in told]))

    def hear_checks(told: list[bool]) -> object:
        return asdict(decision.hear_checks(told))

    offer = own.offer
    offered = asdict(_with_memory(offer, memory))
    verdict = Verdict(**through_rank_0("steps to load", offered, hear_offers))
    while not verdict.decided:
        assert verdict.step is not None
        from_memory = memory if verdict.in_memory else None
        whole = (from_memory or own).check(verdict.step)
        verdict = Verdict(**through_rank_0(f"check of step {verdict.step}", whole, hear_checks))
    if rank == 0 or verdict.step is None:
        own.reasons += verdict.lost
    own.reasons += [] if memory is None else memory.reasons
    if verdict.step is not None:
        if verdict.in_memory and memory is not None:
            return replace(
                memory.choice(verdict.step),
                reasons=tuple(own.reasons),
                newest=verdict.newest,
                reason=verdict.reason,
                nothing_saved=verdict.nothing_saved,
            )
        return own.choice(verdict.step, verdict.newest)
    if verdict.newest and verdict.nothing_saved:
        if rank == 0:
            warn(begun_anew(own.reasons))
    elif verdict.newest:
        refused = nothing_usable(own.reasons, identity, _where(offer, memory))
        raise CheckpointError(
            f"{refused} If hosts have directories of their own, give `jitckpt "
            "run` --checkpoint-dir, so that each can fetch what it lacks."
        )
    return None


def _with_memory(offer: Offer, memory: InMemory | None) -> Offer:
    if memory is None:
        return offer
    newest = max([offer.newest, memory.newest])
    is_first = offer.is_first and memory.newest == 0
    return replace(offer, in_memory=memory.offer(), newest=newest, is_first=is_first)


def _where(in_files: Offer, memory: InMemory | None) -> str:
    """Return a clause on where a rank has found steps."""
    if in_files.newest:
        return WHERE
    if memory is not None and memory.newest:
        return "This host's memory has steps of this job"
    return "Other ranks have found steps of this job, in files or in memory"


def _offer(told: dict[str, Any]) -> Offer:
    in_memory = tuple((step, timeline) for step, timeline in told["in_memory"])
    not_exact = tuple(told["not_exact"])
    return Offer(tuple(told["steps"]), told["newest"], in_memory, told["is_first"], not_exact)
