"""Trials of a job on several hosts: a host dies whole, also while the job recovers from another failure."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from campaign.runs_on_hosts import HOSTS, HostStrike
from jitckpt.faults.injection import phases_of
from jitckpt.rehearsal.runs import Run, Strike
from jitckpt.rehearsal.trials import Trial, TrialVerdict, differences, verdict

# A host that has not the rendezvous' store, and the one that has it, at any time; a rank, in a chosen phase.
HOST, STORE_HOST, RANK = "host", "store-host", "kill"
HOST_KINDS = (HOST, STORE_HOST, RANK)
Moments = tuple[tuple[str, int, float], ...]
# When a host dies after a first failure, after which event of which start, and within how many seconds of it.
# After the loss of another host only once the hosts have met anew and each has what it keeps of another; and
# where each has a disk of its own, once all have fetched what only one of them had saved.
AFTER_A_RANK: Moments = (
    ("save_ordered", 0, 0.5),
    ("detected", 0, 8.0),
    ("restart", 1, 6.0),
    ("restored", 1, 0.5),
)
AFTER_A_HOST: Moments = (("restart", 1, 6.0), ("registered", 1, 1.0), ("restored", 1, 0.5))
AFTER_ALL_HAVE_FETCHED: Moments = (("registered", 1, 1.0), ("restored", 1, 0.5))
LOST_STATE = ("own state (random numbers, buffers ...) is lost", "left no state of its own")


def choose_trial(
    seed: int, number: int, *, steps: int, step_seconds: float, kinds: Sequence[str], second: bool
) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    steps: of the whole job. step_seconds: their mean duration. kinds: to choose from, of HOST_KINDS. second:
    a host dies while the job recovers.
    """
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(list(kinds))
    faults: tuple[str, ...] = ()
    strikes: list[Strike] = []
    if kind == RANK:
        step, phase = chance.randint(2, steps * 3 // 4), chance.choice(phases_of("kill"))
        faults = (f"rank={chance.randrange(HOSTS)} step={step} phase={phase} kind=kill",)
    else:
        host = 0 if kind == STORE_HOST else chance.randrange(1, HOSTS)
        delay = round(chance.uniform(0, steps * step_seconds / 2), 4)
        strikes.append(HostStrike(host, "first_step", delay))
    if second:
        own = has_own_directories(seed, number)
        moments = AFTER_ALL_HAVE_FETCHED if own else AFTER_A_RANK if faults else AFTER_A_HOST
        event, restart, within = chance.choice(moments)
        delay = round(chance.uniform(0, within), 4)
        strikes.append(HostStrike(chance.randrange(HOSTS), event, delay, restart))
    return Trial(number, kind, faults, tuple(strikes))


def has_own_directories(seed: int, number: int) -> bool:
    """Return whether each host has a checkpoint directory of its own in this trial."""
    return random.Random(f"{seed} {number} directories").random() < 0.5


def missed(trial: Trial, run: Run) -> bool:
    """Return whether the first failure should have come when the training was over; a second one may."""
    return trial.kind != RANK and trial.strikes[0] not in run.struck


def judge_on_hosts(
    trial: Trial, run: Run, undisturbed: Run, said: str, ignored: Sequence[str] = ()
) -> TrialVerdict:
    """Return the same as trials.judge, and whether no rank's own state was lost. said: by all agents."""
    # What a host noticed that is lost is in no log: what was done again is told by what the ranks printed.
    reasons = [f"ended with status {run.status}"] if run.status else differences(run, undisturbed, ignored)
    redone = list(_redone([step for _, step in run.steps]))
    if len(run.recoveries) < 1 or not run.restarts:
        reasons.append(f"{run.restarts} restarts, {len(run.recoveries)} failures detected")
    if run.restarts > trial.failures:
        reasons.append(f"{run.restarts} restarts after {trial.failures} failures")
    reasons += [f"{number} minibatches redone" for number in redone]
    reasons += sorted({line for line in said.splitlines() if any(text in line for text in LOST_STATE)})
    return verdict(trial, run, reasons, step=went_on_from(run), redone=max(redone, default=1))


def went_on_from(run: Run) -> int:
    """Return the step that the job went on from last; 0 if it never did."""
    return next((event["step"] for event in reversed(run.events) if event["event"] == "restored"), 0)


def _redone(printed: Sequence[int]) -> Iterator[int]:
    """Yield how many minibatches were done again where more were than the one under way."""
    for before, after in pairwise(printed):
        if after <= before:
            yield before - after + 2
