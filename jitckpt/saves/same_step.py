"""Which step all ranks go on from, where each reads the saves of its own shard alone.

A rank looks up which steps it could load: the folders' names and the metadata of its own or a replica's save
tell that. The newest step that all ranks could load is checked: each reads one save of its shard, the one
that it will load, and if that is damaged another replica's. If a rank finds none, all pass on to the next
older step. What is said goes through rank 0 and torch's store, so it is linear in the ranks; and as each step
is decided by rank 0 alone, no two ranks ever take different ones. A rank that dies meanwhile keeps the others
waiting here, until its agent ends them; the next start's words have other keys.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitckpt.errors import CheckpointError, JitckptError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice, in_turn, misfit, no_whole_save, nothing_usable
from jitckpt.state.shards import Store, through_first


@dataclass(frozen=True)
class Offer:
    """What one rank could load, as far as names and metadata tell.

    newest: the newest step of which it has seen a finished save, of use or not; 0 if there is none.
    """

    steps: tuple[int, ...]
    newest: int


@dataclass(frozen=True)
class Verdict:
    """What rank 0 says. `step`: to be checked by all, or, if `decided`, to be taken; None if there is none.

    lost: one sentence for each newer step that some rank could not load. newest: of all offers.
    """

    step: int | None
    decided: bool
    lost: Sequence[str]
    newest: int


class Decision:
    """Rank 0's part: pure, it is told what the ranks have said, by rank."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = shards
        self._offers: Sequence[Offer] = ()
        self._refused: dict[int, set[int]] = {}  # by step: the shards whose saves were damaged
        self._step: int | None = None

    def hear_offers(self, offers: Sequence[Offer]) -> Verdict:
        """Return what to check first."""
        self._offers = offers
        return self._next()

    def hear_checks(self, whole: Sequence[bool]) -> Verdict:
        """Return what follows from each rank's check of the last verdict's step."""
        assert self._step is not None
        damaged = {shard for shard, good in zip(self._shards, whole, strict=True) if not good}
        if not damaged:
            return self._verdict(decided=True)
        self._refused[self._step] = damaged
        return self._next()

    def _next(self) -> Verdict:
        common = set.intersection(*(set(offer.steps) for offer in self._offers)) - self._refused.keys()
        self._step = max(common, default=None)
        return self._verdict(decided=self._step is None)

    def _verdict(self, *, decided: bool) -> Verdict:
        newest = max(offer.newest for offer in self._offers)
        return Verdict(self._step, decided, tuple(self._lost()) if decided else (), newest)

    def _lost(self) -> Iterator[str]:
        some = {step for offer in self._offers for step in offer.steps}
        for step in sorted(some, reverse=True):
            if self._step is not None and step <= self._step:
                return
            missing = {
                shard
                for shard, offer in zip(self._shards, self._offers, strict=True)
                if step not in offer.steps
            }
            yield f"Step {step} has {no_whole_save(sorted(missing | self._refused.get(step, set())))}."


class OwnSaves:
    """The saves of one rank's shard in a directory, of which no more is read than has to be."""

    def __init__(self, root: Path, identity: Identity, replicas: Collection[int]) -> None:
        """replicas: the ranks that hold the same shard."""
        self.reasons: list[str] = []  # a sentence for each save that was passed over
        self._root, self._identity = root, identity
        self._newest = 0
        self._names = folders.listed(root)
        near = frozenset(replicas)
        self._candidates: dict[int, list[SaveRecord]] = {}  # the first of each is the one to load
        self._rest: dict[int, Iterator[SaveRecord]] = {}
        self._look(near, among_replicas=True)
        if not self._candidates:
            self._look(near, among_replicas=False)  # a script may have given the shards to other ranks

    @property
    def offer(self) -> Offer:
        return Offer(tuple(self._candidates), self._newest)

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


def together(store: Store, root: Path, identity: Identity) -> Choice | None:
    """Return what this rank loads of the step that all go on from. Every rank has to call it.

    The directory may be this host's own. None if no rank has a finished save. Raises CheckpointError on all
    ranks if there are some but no step that all can load, JitckptError if a rank does not come.
    """
    try:
        return _together(store, root, identity)
    except RuntimeError as error:  # torch's DistStoreError, which names no class of ours
        raise JitckptError(
            f"Rank {identity.rank} did not hear from the others which step to go on from: {error}. Where "
            "the state is spread over ranks, each of them has to look for its save."
        ) from error


def _together(store: Store, root: Path, identity: Identity) -> Choice | None:
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
        return asdict(decision.hear_offers([Offer(tuple(one["steps"]), one["newest"]) for one in told]))

    def hear_checks(told: list[bool]) -> object:
        return asdict(decision.hear_checks(told))

    verdict = Verdict(**through_rank_0("steps to load", asdict(own.offer), hear_offers))
    while not verdict.decided:
        assert verdict.step is not None
        whole = own.check(verdict.step)
        verdict = Verdict(**through_rank_0(f"check of step {verdict.step}", whole, hear_checks))
    if rank == 0 or verdict.step is None:
        own.reasons += verdict.lost
    if verdict.step is not None:
        return own.choice(verdict.step, verdict.newest)
    if verdict.newest:
        raise CheckpointError(
            f"{nothing_usable(own.reasons, identity)} If hosts have directories of their own, give `jitckpt "
            "run` --checkpoint-dir, so that each can fetch what it lacks."
        )
    return None
