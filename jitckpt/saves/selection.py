"""Which step to go on from, and which folders a rank loads: a pure decision over the saves that were found.

It is for whoever sees all saves, as `jitckpt inspect` does; ranks that can talk to each other read their own
shard alone (same_step.py). What is verified, and in which order, depends on nothing but the files, so that
all come to the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jitckpt.decisions.sources import listed
from jitckpt.errors import CheckpointError
from jitckpt.saves.folders import SavedState, SaveRecord
from jitckpt.saves.layout import RESTRUCTURED, Identity

# A step without some rank's own state is passed over for one so many steps before it that has all: to do some
# minibatches again is exact, to go on with other random numbers is not.
EXACT_WITHIN = 2
SHOWN_REASONS = 8
SHOWN_SHARDS = 8
WHERE = "The checkpoint directory holds saves"


@dataclass(frozen=True)
class Choice:
    """The step to go on from. `local`: whose folder gives the rank-local state: the rank's own, else None.

    `reasons`: one sentence for each save that was passed over. newest: the newest step of which there is any
    finished save. in_memory: the state itself, where it comes from the memory tier, and `save` tells of it;
    reason: why. nothing_saved: no step was ever saved whole in files.
    """

    step: int
    save: SaveRecord
    local: SaveRecord | None
    reasons: tuple[str, ...]
    newest: int
    in_memory: SavedState | None = None
    reason: str = ""
    nothing_saved: bool = False


def choose(
    records: Sequence[SaveRecord],
    expected: Identity,
    verify: Callable[[SaveRecord], str | None],
    warn: Callable[[str], None] = lambda _: None,
) -> Choice | None:
    """Return what the rank `expected.rank` loads; None for a fresh start.

    That is where there is no finished save at all, or where the job's first save was never finished, of which
    it warns.

    The newest step is taken for which every shard has a whole save. `verify` returns why a save is not whole;
    it is asked only about saves that matter. Raises CheckpointError if there are finished saves but none that
    can be used.
    """
    selected = Selection(records, expected, verify)
    found = selected.choice(expected)
    if found is None and selected.unfinished:
        warn(selected.unfinished)
    return found


class Selection:
    """The choice of several ranks of one job; whatever they ask, each save is verified once.

    unfinished: the sentence that the first save was never finished, where that is so.
    """

    def __init__(
        self,
        records: Sequence[SaveRecord],
        expected: Identity,
        verify: Callable[[SaveRecord], str | None],
    ) -> None:
        """expected: of one of the ranks."""
        self._expected, self._verify = expected, verify
        self._verdicts: dict[SaveRecord, bool] = {}
        self._reasons: list[str] = []
        self._local: dict[tuple[int, int], SaveRecord] = {}  # by step and rank
        usable: list[SaveRecord] = []
        self._newest = 0
        is_first = True  # all that is finished
        for record in records:
            if record.kind == "local":
                self._local[record.step, record.rank] = record
                continue
            if record.finished:
                self._newest = max(self._newest, record.step)
            problem = misfit(record, expected)
            is_first = is_first and not denies_first(record, problem)
            if problem is None:
                usable.append(record)
            else:
                self._reasons.append(problem)
        # By step, shard and rank, of which the last are in order.
        self._replicas: dict[int, dict[int, dict[int, SaveRecord]]] = {}
        for record in sorted(usable, key=lambda record: (-record.step, record.rank)):
            shard = record.metadata.identity.shard if record.metadata else -1
            self._replicas.setdefault(record.step, {}).setdefault(shard, {})[record.rank] = record
        every_shard = set(range(expected.shards))
        is_first = is_first and not any(every_shard <= set(of) for of in self._replicas.values())
        self._step = self._exact_or_newest(expected.world_size)
        self.unfinished = begun_anew(self._reasons) if is_first and self._newest else ""

    def choice(self, identity: Identity) -> Choice | None:
        """Return what a rank loads, as `choose` does."""
        if self._step is None:
            if self._newest and not self.unfinished:
                raise CheckpointError(nothing_usable(self._reasons, identity))
            return None
        save = next(filter(self._whole, self._in_turn(self._step, identity.shard, identity.rank)))
        local = save if save.rank == identity.rank else self._local.get((self._step, identity.rank))
        reasons = list(self._reasons)
        if local is not None and local is not save:
            problem = misfit(local, identity) or self._verify(local)
            if problem is not None:
                reasons.append(problem)
                local = None
        return Choice(self._step, save, local, tuple(reasons), self._newest)

    def _exact_or_newest(self, ranks: int) -> int | None:
        whole = (step for step in self._replicas if self._is_whole(step))  # the newest first
        newest = next(whole, None)
        if newest is None or not (without := self._without(newest, ranks)):
            return newest
        within = takewhile(lambda step: step >= newest - EXACT_WITHIN, whole)
        exact = next((step for step in within if not self._without(step, ranks)), None)
        if exact is None:
            return newest
        self._reasons.append(not_exact(newest, without))
        return exact

    def _without(self, step: int, ranks: int) -> list[int]:
        """Return the ranks whose own state of a step is not there, as far as names tell."""
        saved = {rank for of_shard in self._replicas[step].values() for rank in of_shard}
        return [rank for rank in range(ranks) if rank not in saved and (step, rank) not in self._local]

    def _is_whole(self, step: int) -> bool:
        rank, shards = self._expected.rank, range(self._expected.shards)
        # What is not there at all needs no reading of the rest.
        missing = [shard for shard in shards if shard not in self._replicas[step]] or [
            shard for shard in shards if not any(map(self._whole, self._in_turn(step, shard, rank)))
        ]
        if missing:
            self._reasons.append(f"Step {step} has {no_whole_save(missing)}.")
        return not missing

    def _whole(self, record: SaveRecord) -> bool:
        if record not in self._verdicts:
            problem = self._verify(record)
            if problem is not None:
                self._reasons.append(problem)
            self._verdicts[record] = problem is None
        return self._verdicts[record]

    def _in_turn(self, step: int, shard: int, rank: int) -> Iterator[SaveRecord]:
        replicas = self._replicas[step][shard]
        return (replicas[one] for one in in_turn(tuple(replicas), rank))


def misfit(record: SaveRecord, expected: Identity) -> str | None:
    """Return why a save can't belong to this job, None if it does."""
    if record.metadata is None:
        return record.problem or f"{record.path} has no metadata."
    found, why = record.metadata.identity, None
    if found.job != expected.job:
        why = f"of another job ({found.job} instead of {expected.job})"
    elif found.world_size != expected.world_size:
        why = f"of a job with {found.world_size} ranks; this one has {expected.world_size}"
    elif "" not in (found.layout, expected.layout) and found.layout != expected.layout:
        why = f"of a job that is laid out as '{found.layout}'; this one is as '{expected.layout}'"
    elif found.shards != expected.shards:
        why = f"of a job with {found.shards} shards; this one has {expected.shards}"
    elif record.kind == "rank" and found.shard == expected.shard and _differs(found, expected):
        why = "of another model or optimizer (names, shapes, types or parts differ)"
    return None if why is None else f"{record.path} is {why}."


def _differs(found: Identity, expected: Identity) -> bool:
    """Whether the script has built other objects; where that may be so, it is seen as the save is loaded."""
    return bool(expected.fingerprint) and found.fingerprint not in (RESTRUCTURED, expected.fingerprint)


def denies_first(record: SaveRecord, problem: str | None) -> bool:
    """Return whether a save, as it was found, is a sign that some step may have been saved whole once."""
    nothing_before = record.metadata is not None and record.metadata.nothing_before
    return record.finished and (problem is not None or not nothing_before or record.was_whole)


def in_turn(ranks: Sequence[int], rank: int) -> Iterator[int]:
    """Yield in which order `rank` tries the saves of these ranks, given in order: its own first.

    Then come the others, from a place that differs by rank, to share the reading.
    """
    own = next((place for place, other in enumerate(ranks) if other == rank), None)
    if own is not None:
        yield rank
    others = len(ranks) - (own is not None)
    for turn in range(others):
        place = (rank + turn) % others
        yield ranks[place + (own is not None and place >= own)]


def no_whole_save(shards: Sequence[int]) -> str:
    """Return what a step lacks."""
    more = f" and {len(shards) - SHOWN_SHARDS} more" if len(shards) > SHOWN_SHARDS else ""
    return f"no whole save of shard {', '.join(map(str, shards[:SHOWN_SHARDS]))}{more}"


def not_exact(step: int, without: Sequence[int]) -> str:
    """Return why a step is passed over that has a whole save of all shards."""
    return (
        f"Of step {step} the own state (random numbers, buffers ...) of {listed(without)} is lost; a step "
        "just before it has all, so its minibatches are done again, exactly."
    )


def begun_anew(reasons: Sequence[str]) -> str:
    """Return the sentences for a job of which no save was ever whole."""
    return (
        f"The job's first save was never finished: {_shown(reasons)} Nothing older was ever saved, so the "
        "job begins anew; what there is of that save is not used."
    )


def nothing_usable(reasons: Sequence[str], expected: Identity, where: str = WHERE) -> str:
    """Return the sentences for a rank that must not begin anew beside what is saved; where: a clause."""
    why = f": {_shown(reasons)}" if reasons else "."
    return (
        f"{where}, but none that rank {expected.rank} of {expected.world_size} can use{why} Start the job as "
        "it was, or begin anew in another directory; with another number of ranks or layout give `jitckpt "
        "run --reshard`."
    )


def _shown(reasons: Sequence[str]) -> str:
    more = f" (and {len(reasons) - SHOWN_REASONS} more)" if len(reasons) > SHOWN_REASONS else ""
    return " ".join(reasons[:SHOWN_REASONS]) + more
