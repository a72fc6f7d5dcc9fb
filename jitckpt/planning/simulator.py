"""Plays a job through failures, event by event: between two failures everything is computed at once.

A failure begins an outage. Further failures during it add to what is lost and begin the recovery anew, as
does a recovery that fails at its end; the first tier of the policy that still has the state ends it. Lost
machines are replaced by spares, or, when none is left, by the next machine that comes back from repair.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from jitckpt.decisions.check import positive, whole
from jitckpt.planning.cluster import Description
from jitckpt.planning.failures import Failure
from jitckpt.planning.policies import OutageLoss, PlannedTier, Policy, lost_by

TRAINING, SAVING, REDONE, OVERHEAD, RECOVERING, WAITING = (
    "useful training", "saving", "redone work", "overhead", "recovering", "waiting for machines",
)  # fmt: skip
CAUSES = (TRAINING, SAVING, REDONE, OVERHEAD, RECOVERING, WAITING)


@dataclass(frozen=True)
class Outage:
    """One pause of the job, for its time line."""

    start_seconds: float
    end_seconds: float
    failures: int
    tier: str
    lost_minibatches: int


@dataclass(frozen=True)
class Result:
    wall_seconds: float
    seconds: dict[str, float]  # by cause; they add up to wall_seconds
    minibatches: int
    failures: dict[str, int]  # by mode
    recoveries: dict[str, int]  # outages by the tier that ended them; "start over" when none could
    outages: tuple[Outage, ...]
    progress: tuple[tuple[float, int], ...]  # (wall seconds, minibatches done) at every change

    @property
    def wasted_share(self) -> float:
        return 1 - self.seconds[TRAINING] / self.wall_seconds


@dataclass
class _Training:
    """Where the job is. Saves lie on a grid of `minibatches_per_save` from `saved_at`."""

    minibatch_seconds: float  # overhead included
    minibatches_per_save: int | None
    stall_seconds: float
    lag_seconds: float
    memory_minibatches: int  # per memory checkpoint; 0: no such tier
    done: int = 0  # minibatches
    cycle_start: int = 0  # minibatches done at the last point of the grid
    in_files: int = 0
    memory_since: int = 0  # since when memory checkpoints have been made without a break
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def run(self, seconds: float) -> None:
        """Train for so long, then stop: what the current minibatch or save has done so far is lost."""
        offset = (self.done - self.cycle_start) * self.minibatch_seconds
        per_save = self.minibatches_per_save
        if per_save is None:
            count = int((offset + seconds) / self.minibatch_seconds)
            self._advance_to(self.cycle_start + max(count, self.done - self.cycle_start), seconds, 0.0)
            return
        useful = per_save * self.minibatch_seconds
        cycle = useful + self.stall_seconds
        cycles, rest = divmod(offset + seconds, cycle)
        durable = math.floor((offset + seconds - self.lag_seconds) / cycle)
        if durable > 0:
            self.in_files = self.cycle_start + durable * per_save
        self.cycle_start += int(cycles) * per_save
        count = min(per_save, int(rest / self.minibatch_seconds))
        self._advance_to(
            self.cycle_start + count, seconds, cycles * self.stall_seconds + max(0.0, rest - useful)
        )

    def _advance_to(self, done: int, seconds: float, saving: float) -> None:
        done = max(done, self.done)
        trained = (done - self.done) * self.minibatch_seconds
        self.seconds[SAVING] += saving
        self.seconds[REDONE] += max(0.0, seconds - trained - saving)
        self.done = done

    def newest_in_memory(self) -> int:
        """A checkpoint is whole one checkpoint time after its minibatch."""
        whole_ones = (self.done - self.memory_since) // self.memory_minibatches - 1
        return self.memory_since + max(0, whole_ones) * self.memory_minibatches

    def back_to(self, done: int) -> int:
        """Go on from another state; returns how many minibatches are lost."""
        lost = self.done - done
        self.seconds[REDONE] += lost * self.minibatch_seconds
        self.done = self.memory_since = done
        if self.minibatches_per_save is not None and done < self.cycle_start:
            cycles = (done - self.cycle_start) // self.minibatches_per_save
            self.cycle_start += cycles * self.minibatches_per_save
        return lost

    def back_to_files(self) -> int:
        self.cycle_start = self.in_files
        return self.back_to(self.in_files)


class _Machines:
    """Spares and repairs."""

    def __init__(self, spares: int, repair_seconds: float) -> None:
        self._spares = spares
        self._repair_seconds = repair_seconds
        self._back_at: list[float] = []

    def replace(self, now: float) -> float:
        """A machine has failed at `now`; returns when another one is at hand."""
        while self._back_at and self._back_at[0] <= now:
            heapq.heappop(self._back_at)
            self._spares += 1
        heapq.heappush(self._back_at, now + self._repair_seconds)
        if self._spares > 0:
            self._spares -= 1
            return now
        return heapq.heappop(self._back_at)


class _Coming:
    """The failures still to come, in order of time; the next one is in sight."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self._failures = iter(failures)
        self.failure = next(self._failures, None)

    @property
    def at_seconds(self) -> float:
        return self.failure.at_seconds if self.failure else math.inf

    def take(self) -> Failure:
        taken = self.failure
        assert taken is not None
        self.failure = next(self._failures, None)
        return taken


@dataclass(frozen=True)
class _Pause:
    end_seconds: float
    waiting_seconds: float
    failures: int
    tier: PlannedTier | None


def _pause(
    description: Description,
    policy: Policy,
    coming: _Coming,
    *,
    machines: _Machines,
    until: float,
    random: Random,
    seen: Counter[str],
) -> _Pause:
    """From the next failure until training goes on, or until the time is over."""
    lost, tier, count, waiting, fails_share = OutageLoss(), None, 0, 0.0, 0.0
    at = ready = end = coming.at_seconds  # the last failure; its machines replaced; the outage over
    while True:
        while coming.failure is not None and coming.at_seconds <= min(end, until):
            failure = coming.take()
            waiting += max(0.0, min(ready, failure.at_seconds) - at)
            at = failure.at_seconds
            seen[failure.mode.name] += 1
            count += 1
            fails_share = max(fails_share, failure.mode.recovery_fails_share)
            more = lost_by(description, failure.mode.scope, failure.component, failure.mode.takes)
            for _ in more.machines_to_replace - lost.machines_to_replace:
                ready = max(ready, machines.replace(at))
            lost |= more
            tier = policy.tier_for(lost)
            end = max(at, ready) + _outage_seconds(tier, description, lost)
        if end >= until or random.random() >= fails_share:
            break
        end += _outage_seconds(tier, description, lost)
    stopped = min(end, until)
    return _Pause(stopped, waiting + max(0.0, min(ready, stopped) - at), count, tier)


def simulate(
    description: Description,
    policy: Policy,
    failures: Iterable[Failure],
    *,
    days: float,
    minibatches_per_save: int | None = None,
    seed: int = 0,
    report: Callable[[float], None] = lambda share: None,
) -> Result:
    """Play `days` of wall time. minibatches_per_save: None for none, as `plan.analyse` finds it for a policy.

    `seed` is of the recoveries that fail. `report` is called with the share of the time played so far.
    """
    until = positive("days", days) * 86400.0
    if minibatches_per_save is not None:
        whole("minibatches_per_save", minibatches_per_save, low=1)
    files = policy.files
    memory = [tier.checkpoint_minibatches for tier in policy.tiers if tier.checkpoint_minibatches]
    minibatch_seconds = description.job.minibatch_seconds * (1 + policy.overhead_share)
    training = _Training(
        minibatch_seconds,
        minibatches_per_save if files else None,
        files.stall_seconds if files else 0.0,
        files.lag_seconds if files else 0.0,
        max(memory, default=0),
    )
    machines = _Machines(description.cluster.spare_machines, description.cluster.repair_seconds)
    seen: Counter[str] = Counter()
    recoveries: Counter[str] = Counter()
    outages: list[Outage] = []
    progress: list[tuple[float, int]] = [(0.0, 0)]
    coming = _Coming(failures)
    random = Random(seed)
    now = 0.0
    while now < until:
        quiet_until = min(until, coming.at_seconds)
        training.run(quiet_until - now)
        now = quiet_until
        progress.append((now, training.done))
        if coming.failure is None or now >= until:
            break
        pause = _pause(description, policy, coming, machines=machines, until=until, random=random, seen=seen)
        training.seconds[WAITING] += pause.waiting_seconds
        training.seconds[RECOVERING] += pause.end_seconds - now - pause.waiting_seconds
        gone = _restore(training, pause.tier)
        name = pause.tier.name if pause.tier else "start over"
        recoveries[name] += 1
        outages.append(Outage(now, pause.end_seconds, pause.failures, name, gone))
        now = pause.end_seconds
        progress.append((now, training.done))
        report(now / until)
    # From the count, not summed up on the way: rounding would leave a trace of minibatches taken back.
    training.seconds[TRAINING] = training.done * description.job.minibatch_seconds
    training.seconds[OVERHEAD] = training.done * (minibatch_seconds - description.job.minibatch_seconds)
    return Result(
        until,
        training.seconds,
        training.done,
        {mode.name: seen[mode.name] for mode in description.failures},
        dict(recoveries),
        tuple(outages),
        tuple(progress),
    )


def _outage_seconds(tier: PlannedTier | None, description: Description, lost: OutageLoss) -> float:
    if tier is not None:
        return tier.outage_seconds(lost)
    replacement = description.cluster.replacement_seconds if lost.machines_to_replace else 0.0
    return description.job.detection_seconds + replacement + description.job.start_seconds


def _restore(training: _Training, tier: PlannedTier | None) -> int:
    if tier is None:
        training.in_files = 0
        return training.back_to_files()
    if tier.checkpoint_minibatches:
        return training.back_to(training.newest_in_memory())
    if tier.resumes:
        return 0
    return training.back_to_files()
