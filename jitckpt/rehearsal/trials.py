"""Trials of a job: where each is hit, chosen by a seed, and what is expected of it afterwards."""

import os
import random
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jitckpt.faults.injection import SILENT_KINDS, phases_of
from jitckpt.rehearsal.runs import LAUNCHER, NOBODY, FullDisk, Run, Strike, Unwritable
from jitckpt.saves.final_state import FinalState
from jitckpt.wire.exit_statuses import SAVED

FROM_OUTSIDE = "signal"  # a SIGKILL at any time, not in a chosen phase
# A rank is killed, and another's disk is full before its save is written, or nobody can write at all.
FULL_DISK, UNWRITABLE = "full-disk", "unwritable"
# The launcher is killed, and one of the saves that it leaves may be cut off; or it is asked to end. Then the
# same command is given again.
LAUNCHER_KILLED, SAVE_CUT_OFF, PREEMPTION = "launcher", "cut-save", "preemption"
STOPPING_KINDS = (LAUNCHER_KILLED, SAVE_CUT_OFF, PREEMPTION)
TRIAL_KINDS = (FROM_OUTSIDE, FULL_DISK, UNWRITABLE, *STOPPING_KINDS)
# When a second failure comes, after which event of which start, and within how many seconds of it.
SECOND_MOMENTS = (("save_ordered", 0, 0.3), ("restart", 1, 4.0), ("registered", 1, 0.5))
NOTHING_YET = "No minibatch is finished yet"  # then nothing is saved and nothing is lost


@dataclass(frozen=True)
class Trial:
    """One run with a failure, and perhaps a second one. kind: of the first failure.

    cut: which of the files that the ranks saved is cut off before the job is started again, and where, as
    shares of their number and of its size. must_be_saved: a rank that can save is left whenever the first
    ones fail, so no more than the minibatch under way may be lost.
    """

    number: int
    kind: str
    faults: tuple[str, ...]
    strikes: tuple[Strike, ...]
    cut: tuple[float, float] | None = None
    must_be_saved: bool = True

    def __str__(self) -> str:
        cut = [] if self.cut is None else ["a save cut off"]
        return ", then ".join([*self.faults, *map(str, self.strikes), *cut])

    @property
    def failures(self) -> int:
        """How many processes fail, at least if nothing else comes before."""
        return len(self.faults) + sum(strike.is_a_failure for strike in self.strikes)

    def missed(self, run: Run) -> bool:
        """Return whether the first strike hit nobody, or a job or a rank that was over before it."""
        first = [strike for strike in self.strikes if strike.event == "first_step"]
        over = self.kind in STOPPING_KINDS and bool(run.final)
        if first and all(event["event"] != "detected" for event in run.events):
            over |= all(strike.rank in run.final for strike in first)  # it had told its end
        return over or (bool(first) and not any(strike in run.struck for strike in first))


@dataclass(frozen=True)
class TrialVerdict:
    """What came of a trial. reason: why it did not pass, empty if it did.

    note: of one that passed, where it did not end as most do, what happened; else empty. step: the one that
    the job went on from, after the last failure. redone: minibatches at most, over all failures; None where
    no save served. recovery_seconds: from detection to the slowest rank's first new step, the longest.
    failures: how many were detected, those in a save apart.
    """

    failure: str
    step: int | None
    redone: int | None
    recovery_seconds: float | None
    seconds: float | None
    failures: int
    reason: str
    note: str = ""


def choose_trial(
    seed: int,
    number: int,
    *,
    ranks: int,
    steps: int,
    step_seconds: float,
    kinds: Sequence[str],
    second: bool = False,
    two_at_once: bool = False,
) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    steps: of the whole job. step_seconds: their mean duration, for signals from outside. kinds: to choose
    from, of faults.FATAL_KINDS and TRIAL_KINDS. second: hit a rank again while the job saves, restarts or
    restores. two_at_once: the first failure is that of two ranks. Both are for kinds that hit ranks alone.
    """
    chance = random.Random(f"{seed} {number}")
    rank, kind = chance.randrange(ranks), chance.choice(list(kinds))
    # Not among the last steps: a signal to a rank that has ended hits nobody.
    delay = round(chance.uniform(0, steps * step_seconds * 3 / 4), 4)
    if kind in STOPPING_KINDS:
        signum = signal.SIGTERM if kind == PREEMPTION else signal.SIGKILL
        strike = Strike(LAUNCHER, "first_step", delay, signal=signum)
        cut = (chance.random(), chance.random()) if kind == SAVE_CUT_OFF else None
        return Trial(number, kind, (), (strike,), cut, must_be_saved=cut is None)
    if kind in (FULL_DISK, UNWRITABLE):
        # The disk comes first, and the failure in the second half.
        other = (rank + chance.randrange(1, ranks)) % ranks
        step, phase = chance.randint(steps // 2, steps - 1), chance.choice(phases_of("kill"))
        disk: Strike = Unwritable(NOBODY, "first_step", 0.0)
        if kind == FULL_DISK:
            disk = FullDisk(other, "first_step", 0.0, size=int(10 ** chance.uniform(0, 6)))
        fault = f"rank={rank} step={step} phase={phase} kind=kill"
        return Trial(number, kind, (fault,), (disk,), must_be_saved=kind == FULL_DISK and ranks > 2)
    faults: tuple[str, ...] = ()
    strikes: list[Strike] = []
    if kind == FROM_OUTSIDE:
        strikes.append(Strike(rank, "first_step", delay))
    else:
        step = chance.randint(min(2, steps - 1), steps - 1)
        faults = (f"rank={rank} step={step} phase={chance.choice(phases_of(kind))} kind={kind}",)
    if two_at_once:
        other = (rank + chance.randrange(1, ranks)) % ranks
        faults += tuple(fault.replace(f"rank={rank} ", f"rank={other} ", 1) for fault in faults)
        strikes += [replace(strike, rank=other) for strike in strikes]
    failed = {rank, other} if two_at_once else {rank}
    if second:
        event, restart, within = chance.choice(SECOND_MOMENTS)
        # A save is made by the others; a restart is everybody's.
        others = [one for one in range(ranks) if one not in failed or restart] or [rank]
        strikes.append(Strike(chance.choice(others), event, round(chance.uniform(0, within), 4), restart))
        failed |= set() if restart else {strikes[-1].rank}
    return Trial(number, kind, faults, tuple(strikes), must_be_saved=len(failed) < ranks or ranks == 1)


def cut_off(trial: Trial, directory: Path) -> Path:
    """Cut one of the files that the ranks have saved in this checkpoint directory; return which."""
    assert trial.cut is not None
    which, where = trial.cut
    files = sorted(directory.glob("step-*/rank-*/*"))
    file = files[int(which * len(files))]
    os.truncate(file, int(where * file.stat().st_size))
    return file


def judge(trial: Trial, run: Run, undisturbed: Run, ignored: Collection[str] = ()) -> TrialVerdict:
    """Return whether a run ended as the undisturbed one, redid at most one minibatch and left nothing behind.

    ignored: parts of the final state that differ between undisturbed runs, too.
    """
    reasons = []
    recoveries = run.recoveries
    too_late = _was_over(run)
    if run.status != 0 and not too_late:
        reasons.append(f"ended with status {run.status}")
    else:
        reasons += differences(run, undisturbed, ignored)
    if not recoveries or not (run.restarts or too_late):
        reasons.append(f"{run.restarts} restarts, {len(recoveries)} failures detected")
    redone = [recovery.redone for recovery in recoveries if recovery.redone is not None]
    # Of several one may have come too late: the others' recovery has gone past its step.
    if trial.faults and len(trial.faults) == sum(e["event"] == "fault_never_happened" for e in run.events):
        reasons.append("the rehearsed failure never happened")
    if trial.failures == 1 and len(recoveries) > 1:
        reasons.append(f"{len(recoveries)} failures detected instead of 1")
    if trial.must_be_saved and recoveries and not redone and not (too_late or _had_nothing_to_save(run)):
        reasons.append("all minibatches redone")
    if any(number > 1 for number in redone):
        reasons.append(f"{' and '.join(map(str, redone))} minibatches redone")
    step = recoveries[-1].step if recoveries else None
    return verdict(trial, run, reasons, step=step, redone=sum(redone) if redone else None)


def verdict(
    trial: Trial, run: Run, reasons: Sequence[str], *, step: int | None, redone: int | None, note: str = ""
) -> TrialVerdict:
    """Return what came of a trial; reasons why it did not pass, beside those that hold for any."""
    left = [f"left behind {thing}" for thing in run.left_behind]
    halves = [f"two halves went on at once: {sign}" for sign in run.halves]
    times = [one.first_step_seconds for one in run.recoveries if one.first_step_seconds is not None]
    return TrialVerdict(
        failure=str(trial),
        step=step,
        redone=redone,
        recovery_seconds=max(times, default=None),
        seconds=run.seconds,
        failures=len(run.recoveries),
        reason="; ".join([*reasons, *left, *halves]),
        note=note,
    )


def judge_resumed(
    trial: Trial, stopped: Run, resumed: Run, undisturbed: Run, *, saved: int, ignored: Collection[str] = ()
) -> TrialVerdict:
    """Return the same of a job whose launcher was ended, and which the same command took up again.

    saved: the newest step that a rank saved, 0 if none did.
    """
    step = next((event["step"] for event in resumed.events if event["event"] == "restored"), 0)
    redone = max(saved, *(number for _, number in stopped.steps), 0) - step + 1
    whole = any(event["event"] == "saved" for event in stopped.events)
    ended = (SAVED if whole else 1) if trial.kind == PREEMPTION else -signal.SIGKILL
    reasons = [] if stopped.status == ended else [f"ended with status {stopped.status} instead of {ended}"]
    if resumed.status != 0:
        reasons.append(f"ended with status {resumed.status} when it was taken up again")
    else:
        reasons += differences(resumed, undisturbed, ignored)
    if resumed.recoveries:
        reasons.append(f"{len(resumed.recoveries)} failures detected when it was taken up again")
    if trial.must_be_saved and redone > 1:
        reasons.append(f"{redone} minibatches redone")
    reasons += [f"left behind {thing}" for run in (stopped, resumed) for thing in run.left_behind]
    seconds = stopped.seconds + resumed.seconds
    return TrialVerdict(str(trial), step, redone, None, seconds, 1, "; ".join(reasons))


def _was_over(run: Run) -> bool:
    """Return whether the last failure came when all ranks had ended their training.

    That a rank dies may be heard before its last words, in which it says that its script is at its end.
    """
    last = [event for event in run.events if event["restart"] == run.restarts]
    if not any(event["event"] == "detected" for event in last):
        return False
    finished = {event["rank"] for event in last if event["event"] in ("at_end", "finished")}
    return bool(finished) and finished == run.final.keys()


def _had_nothing_to_save(run: Run) -> bool:
    """Return whether no rank had ended a minibatch, in none of the starts that failed.

    None has before all have called jitckpt.init, even if some hosts are ahead by then.
    """
    failed = [event["reason"] for event in run.events if event["event"] == "save_failed"]
    if failed and all(reason.startswith(NOTHING_YET) for reason in failed):
        return True
    first: dict[int, int] = {}  # by restart: the place of the first failure
    for index, event in enumerate(run.events):
        if event["event"] == "detected":
            first.setdefault(event["restart"], index)
    return all(
        run.final.keys()
        - {e["rank"] for e in run.events[:index] if (e["event"], e["restart"]) == ("registered", restart)}
        for restart, index in first.items()
    )


def differences(run: Run, other: Run, ignored: Collection[str] = ()) -> list[str]:
    """Return in what two runs ended differently, a text each, the ranks and parts named."""
    found = []
    for rank in sorted(run.final.keys() | other.final.keys()):
        one, two = run.final.get(rank), other.final.get(rank)
        if one is None or two is None:
            found.append(f"rank {rank} did not come to its end")
            continue
        if one.step != two.step:
            found.append(f"rank {rank} made {one.step} steps instead of {two.step}")
        if parts := [part for part in _unequal(one, two) if part not in ignored]:
            found.append(f"rank {rank}: {', '.join(parts)} differ")
    return found or ([] if other.final else ["no rank has told its final state"])


def differing_parts(run: Run, other: Run) -> set[str]:
    """Return the parts in which some rank ended differently."""
    return {part for rank in run.final for part in _unequal(run.final[rank], other.final[rank])}


def _unequal(one: FinalState, two: FinalState) -> list[str]:
    return [name for name in two.digests if one.digests.get(name) != two.digests[name]]


def steps_of(run: Run) -> int:
    """Return the optimizer steps of a whole run, 0 if it told none."""
    return max((state.step for state in run.final.values()), default=0)


def is_silent(kind: str) -> bool:
    """Return whether a failure of this kind is found by the hang timeout alone."""
    return kind in SILENT_KINDS
