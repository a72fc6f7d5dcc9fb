"""What the agent does when a rank fails: a pure function from what is known to the next action."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Literal

# Seconds that a rank which can't save gets between SIGTERM and SIGKILL, as under torchrun.
TERMINATION_GRACE = 30.0
# Seconds in which ranks that have not said which step they save may still say so once a step is whole.
NEWER_STEP_GRACE = 0.25
# Seconds in which a rank inside of an iteration may still save what it alone knows: it waits for 5 itself.
GOING_ON_GRACE = 7.0
# Seconds that a rank may be stopped (by SIGSTOP, say) until its save is not waited for any more, if it is
# not the last that can save its shard.
STOPPED_GRACE = 2.0
# Seconds that the writing of rank-local states gets at least.
LOCAL_STATE_SECONDS = 10.0
# So many starts that end alike at one step, and no further one is made.
SAME_ENDS = 3
# What a program ends with that reads a variable that has no value; and why that may be so after a restart.
UNSET = ("NameError", "UnboundLocalError")
UNSET_HINT = (
    "; if a loop over job.batches sets it: behind an epoch's last batch that loop has none, "
    "so set it before the loop"
)


@dataclass(frozen=True)
class Rank:
    """What the agent knows of one rank.

    exit_code: None while it lives; minus the signal's number where a signal ended it.
    raised: an exception has ended its program; its process may take a while to end. dying: the kernel ends
    its process, with a failure, which may take a while, too.
    registered: it has called jitckpt.init. reachable: it can still be given orders (its socket is open and
    its training has not finished). shard: what it holds, of `shards` in one replica. saving_step: the step
    that it has begun to save. goes_on: first it has to come to the end of an iteration. saved_step: the step
    of its save, once `save` is "ended". told: how the agent has begun to end it. own: it runs on this host;
    the others' agents see the same facts and end their ranks themselves. finished: its script is at its end.
    let_end: it was told that its process may end, too, and so saves no more. stopped_since: it has been
    stopped by a signal since then, and does nothing until somebody lets it go on; known of own ranks alone,
    whose end the others hear of.
    torch_loaded: it has imported torch. failing: the mistake of its program's that has ended it before its
    first step. refused: what jitckpt has refused, by which its program has ended.
    """

    rank: int
    exit_code: int | None = None
    raised: bool = False
    dying: bool = False
    registered: bool = False
    reachable: bool = False
    shard: int = 0
    shards: int = 1
    save: Literal["none", "ordered", "ended", "failed"] = "none"
    saving_step: int | None = None
    goes_on: bool = False
    saved_step: int | None = None
    told: Literal["nothing", "terminate", "kill"] = "nothing"
    own: bool = True
    finished: bool = False
    let_end: bool = False
    stopped_since: float | None = None
    torch_loaded: bool = False
    failing: str | None = None
    refused: str | None = None

    @property
    def mistake(self) -> str | None:
        """What its program itself has done wrong before its first step, as far as is known."""
        if self.failing is not None or self.torch_loaded or self.registered or self.told != "nothing":
            return self.failing
        # Without torch no device was used. Signals come from outside.
        status = self.exit_code or 0
        return f"exit status {status} before torch was imported" if status > 0 else None

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def can_save(self) -> bool:
        # One that ends lets a save that it was told to make end first; it begins no other.
        begins = self.save == "none" and not self.raised and not self.let_end
        return self.alive and self.registered and self.reachable and (begins or self.save == "ordered")

    @property
    def failed(self) -> bool:
        # Only what all hosts know alike, so that all of them decide alike.
        has_failed = not self.alive and (self.exit_code != 0 or self.told != "nothing")
        return self.raised or self.dying or has_failed


@dataclass(frozen=True)
class KnownJob:
    """What the agent knows of all ranks. Times in seconds, of one monotonic clock.

    alarmed: a rank has reported a hang or an error of NCCL. suspected: a hang is being looked into.
    interrupted: the agent was asked to end (preemption); impatient: asked again. save_ordered_at, whole_at,
    ending_since: when the first save was ordered, when a step was first whole, when the agent began to end
    the ranks. local_state_begun_at: when the writing of the rank-local states began; local_state_written:
    they lie in the checkpoint directory. mistakes_before: those of the start before this one. in_memory: the
    step that the memory tier has of all ranks, on hosts that are not lost. takes_in: hosts wait to be taken
    in (decisions/elastic.py). is_free: another start is none of those that are counted, as hosts have come or
    were lost in a job that goes on with as many as there are. goes_back: the ranks are made again from a
    snapshot, so that what another's failure would have their programs do has no use.
    """

    ranks: tuple[Rank, ...]
    now: float
    save_deadline: float
    restarts_left: int
    alarmed: bool = False
    suspected: bool = False
    interrupted: bool = False
    impatient: bool = False
    save_ordered_at: float | None = None
    whole_at: float | None = None
    ending_since: float | None = None
    local_state_begun_at: float | None = None
    local_state_written: bool = False
    mistakes_before: frozenset[str] = frozenset()
    in_memory: int | None = None
    takes_in: bool = False
    is_free: bool = False
    goes_back: bool = False

    def can_be_saved(self) -> bool:
        """Return whether a save can be expected to be whole: some rank of each shard still has it.

        A failure of which nobody knows yet whose it is may be that of a shard's only rank. Who is asked to
        end, or ends to take in hosts, has not failed.
        """
        replicas = Counter(rank.shard for rank in self.ranks if rank.registered)
        spread = self.interrupted or self.takes_in or all(count > 1 for count in replicas.values())
        return spread and not self.has_lost_shard()

    def has_lost_shard(self) -> bool:
        """Return whether of some shard no rank is left that could save it, or has."""
        ranks = [rank for rank in self.ranks if rank.registered]
        held = {rank.shard for rank in ranks if rank.save == "ended" or rank.can_save}
        return not held >= set(range(max((rank.shards for rank in ranks), default=1)))


class Outcome(Enum):
    """How one start of the workers ended."""

    SUCCEEDED = "succeeded"
    RESTART = "restart"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something is reported or, if `until` is given, that time has come."""

    until: float | None = None


@dataclass(frozen=True)
class LetEnd:
    """Tell these ranks, whose scripts are at their ends, that their processes may end, too."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class OrderSave:
    """Order these ranks to save."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EndRanks:
    """End these ranks: `kill` at once, `terminate` by asking them to."""

    kill: tuple[int, ...]
    terminate: tuple[int, ...]


@dataclass(frozen=True)
class WriteLocalState:
    """Every rank has ended: write their rank-local states, for the step that a restart will take."""


@dataclass(frozen=True)
class Close:
    """All is done."""

    outcome: Outcome


Action = Wait | LetEnd | OrderSave | EndRanks | WriteLocalState | Close


def decide(job: KnownJob) -> Action:
    """Return the next thing to do.

    Ranks are ended only when one whole replica of every shard is saved, and no newer step is just being made
    whole, or no rank can still save (one that stays stopped can't, and is waited for only if the state would
    be lost without it), or `save_deadline` is over, or the user is impatient. A rank that ends successfully
    is no failure; it stays until all scripts are at their ends, so that it can save if another fails. Each
    agent decides for itself and acts on the ranks of its host; those of a host that is lost count as killed.
    What fails once the whole training has ended is a failure, but nothing is done again for it; nor for what
    another start would end with again.
    """
    live = [rank for rank in job.ranks if rank.alive and (rank.own or not job.impatient)]
    failed = job.interrupted or any(rank.failed for rank in job.ranks)
    if not live and not failed:
        return Close(Outcome.SUCCEEDED)
    if job.ending_since is None:
        if not failed and not job.alarmed:
            return _let_end(job) or Wait()
        saving = _save(job)
        if saving is not None:
            return saving
    if live:
        return _end(job, live)
    writing = _write_local_state(job)
    if writing is not None:
        return writing
    end = Outcome.RESTART if starts_again(job) else Outcome.FAILED
    return Close(Outcome.INTERRUPTED if job.interrupted else end)


def starts_again(job: KnownJob) -> bool:
    """Return whether a rank has failed, and another start is to follow."""
    failed = any(rank.failed for rank in job.ranks)
    may_restart = job.restarts_left > 0 or job.is_free
    is_over = job.interrupted or training_is_over(job.ranks)
    return failed and may_restart and not is_over and not incurable(job)


def can_take_in(job: KnownJob) -> bool:
    """Return whether all ranks can be saved now, to start again with the hosts that wait.

    Not where one has failed, is looked into, or is at its end: a healthy training is not risked.
    """
    healthy = not (job.alarmed or job.suspected or job.interrupted) and job.ending_since is None
    return (
        job.takes_in
        and healthy
        and all(rank.can_save and not (rank.failed or rank.finished) for rank in job.ranks)
    )


def incurable(job: KnownJob) -> str | None:
    """Return why another start would end as this one has; None if it may not.

    It goes by what all hosts know alike once all ranks have ended.
    """
    for rank in job.ranks:
        if rank.refused is not None:
            return f"jitckpt would refuse rank {rank.rank} the same again"
        if rank.mistake is not None and _alike(rank.mistake) in job.mistakes_before:
            hint = UNSET_HINT if rank.mistake.startswith(UNSET) else ""
            what = f"rank {rank.rank} has ended as in the start before, and before any step"
            return f"{what} ({rank.mistake}){hint}"
    return None


def brings_no_progress(ends: Sequence[tuple[int, str]]) -> bool:
    """Return whether the newest starts have all come to the same step and failed alike there.

    ends: of each start, the newest step that was begun, and the first failure.
    """
    newest = [(step, _kind(failure)) for step, failure in ends[-SAME_ENDS:]]
    return len(newest) == SAME_ENDS and len(set(newest)) == 1 and newest[0][0] > 0


def _kind(failure: str) -> str:
    """Return what of a failure is the same wherever it is noticed: which rank waits first is by chance."""
    return "a hang" if re.match(r"rank \d+ has waited ", failure) else failure


def mistakes(ranks: Iterable[Rank]) -> frozenset[str]:
    """Return what the ranks' programs have done wrong before their first step, to be compared."""
    return frozenset(_alike(rank.mistake) for rank in ranks if rank.mistake is not None)


def _alike(mistake: str) -> str:
    """Return the mistake without what differs from start to start: addresses, process ids, times, files."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}|/tmp/\S+", "...", mistake)


def training_is_over(ranks: Iterable[Rank]) -> bool:
    """Return whether the scripts of all registered ranks are at their end, none with a status of its own."""
    registered = [rank for rank in ranks if rank.registered]
    return bool(registered) and all(rank.finished and (rank.exit_code or 0) <= 0 for rank in registered)


def whole_steps(ranks: Iterable[Rank]) -> set[int]:
    """Return the steps for which every shard has been saved."""
    ranks = [rank for rank in ranks if rank.registered]
    shards = max((rank.shards for rank in ranks), default=1)
    saved = {(rank.saved_step, rank.shard) for rank in ranks if rank.save == "ended"}
    return {step for step, _ in saved if step is not None and all((step, s) in saved for s in range(shards))}


def _let_end(job: KnownJob) -> Action | None:
    """Let ranks end at the end of their scripts: all at once, or those that a hang may be about.

    What ends a script may be a failure that only the exit status tells (`raise SystemExit(1)`). Then others
    may wait for the rank in a collective, and have to see it end.
    """
    if not job.suspected and not all(rank.finished for rank in job.ranks if rank.alive):
        return None
    staying = [rank for rank in job.ranks if rank.own and rank.alive and rank.finished and not rank.let_end]
    return LetEnd(tuple(rank.rank for rank in staying)) if staying else None


def _save(job: KnownJob) -> Action | None:
    """What is still to do for the save; None if there is no more to wait for."""
    if job.impatient or (job.in_memory is not None and not job.can_be_saved()):
        return None  # what can be saved would be of no use, and the memory tier has the state
    able = [rank for rank in job.ranks if rank.can_save and job.now < _patience_with(job, rank)]
    if whole := whole_steps(job.ranks):
        return _save_of_newer_step(job, able, max(whole))
    deadline = None if job.save_ordered_at is None else job.save_ordered_at + job.save_deadline
    if not able or (deadline is not None and job.now >= deadline):
        return None
    unordered = tuple(rank.rank for rank in able if rank.save == "none")
    if unordered:
        return OrderSave(unordered)
    until = min([_patience_with(job, rank) for rank in able] + [inf if deadline is None else deadline])
    return Wait(None if until == inf else until)


def _patience_with(job: KnownJob, rank: Rank) -> float:
    """Return until when a rank's save is waited for, as far as that depends on the rank being stopped."""
    if rank.stopped_since is None or is_last_of_its_shard(job, rank):
        return inf  # but for the deadline
    return rank.stopped_since + STOPPED_GRACE


def is_last_of_its_shard(job: KnownJob, rank: Rank) -> bool:
    """Return whether the state is lost without this rank, which is stopped, and may be continued.

    Not where ranks hang and none has failed: then it is probably what the others wait for, and stays so.
    """
    hangs = job.alarmed and not any(one.failed for one in job.ranks)
    if rank.stopped_since is None or hangs or job.in_memory is not None or job.has_lost_shard():
        return False
    others = [one for one in job.ranks if one.rank != rank.rank and one.shard == rank.shard]
    return not any(one.save == "ended" or (one.can_save and one.stopped_since is None) for one in others)


def _save_of_newer_step(job: KnownJob, able: list[Rank], whole: int) -> Action | None:
    """Wait for the save of a step after `whole`, if it can become whole as well, or for ranks' own states.

    A rank whose host was held before the optimizer step saves one step less than a replica whose host was
    held after it. Ended as soon as the first has saved, the job would lose a minibatch more than it has to.
    Ranks save side by side, so the newer step is waited for as long as the first took; and a rank that does
    not come to its save, such as one whose device hangs, is not waited for. One that is still inside of the
    iteration that made the step is: of what it alone knows nobody else has a copy.
    """
    if job.whole_at is None:
        return None
    took = 0.0 if job.save_ordered_at is None else job.whole_at - job.save_ordered_at
    saving = [rank for rank in able if rank.save == "ordered"]
    if any(rank.goes_on for rank in saving) and job.now < job.whole_at + took + GOING_ON_GRACE:
        return Wait(job.whole_at + took + GOING_ON_GRACE)
    if any(rank.saving_step is None for rank in saving) and job.now < job.whole_at + NEWER_STEP_GRACE:
        return Wait(job.whole_at + NEWER_STEP_GRACE)
    newer = {rank.saving_step for rank in saving if (rank.saving_step or 0) > whole}
    done = tuple(
        replace(rank, save="ended", saved_step=rank.saving_step) if rank in saving else rank
        for rank in job.ranks
    )
    until = job.whole_at + took + NEWER_STEP_GRACE
    return Wait(until) if newer & whole_steps(done) and job.now < until else None


def _write_local_state(job: KnownJob) -> Action | None:
    """What is still to do for the rank-local states; None if there is no more to wait for.

    The file system may not answer, and then the next start does not wait for it either.
    """
    if job.local_state_written or not any(rank.registered for rank in job.ranks):
        return None
    if job.local_state_begun_at is None:
        return WriteLocalState()
    until = job.local_state_begun_at + max(job.save_deadline, LOCAL_STATE_SECONDS)
    return None if job.impatient or job.now >= until else Wait(until)


def _end(job: KnownJob, live: list[Rank]) -> Action:
    grace_ends = None if job.ending_since is None else job.ending_since + TERMINATION_GRACE
    no_grace = job.impatient or job.goes_back or (grace_ends is not None and job.now >= grace_ends)
    # A registered rank has saved, or can't: its device hangs, and it would not hear SIGTERM.
    doomed = [rank for rank in live if rank.registered or no_grace]
    kill = tuple(rank.rank for rank in doomed if rank.told != "kill")
    terminate = tuple(rank.rank for rank in live if rank not in doomed and rank.told == "nothing")
    if kill or terminate:
        return EndRanks(kill, terminate)
    return Wait(None if no_grace or len(doomed) == len(live) else grace_ends)
