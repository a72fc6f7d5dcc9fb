"""Trials of transparent mode on two hosts of two ranks, and hosts that stand by: devices break for good.

A host that has another device goes on with that; all ranks of one that has none move to a host that stands
by, once or twice, or those of both hosts at once. The first host, which leads, has another device, but where
all its ranks are to move.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jitckpt.faults.injection import parse_fault, phases_of
from jitckpt.rehearsal import trials_in_place
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial, TrialVerdict

FIRST_HOST, SECOND_HOST = (0, 1), (2, 3)  # ranks
RANKS = (len(FIRST_HOST), len(SECOND_HOST))
DEVICE, SICK, TWICE, BOTH = "device-lost-hard", "host-sick", "moved-twice", "both-hosts"
FIRST_SICK, BOTH_SICK = "first-host-sick", "both-hosts-sick"
MOVE_KINDS = (DEVICE, SICK, FIRST_SICK, TWICE, BOTH, BOTH_SICK)
SPARE = 1  # device of the first host
CALLS = 12
BETWEEN = 3  # steps at least, from one failure to the next
HERE, ELSEWHERE = "worker_moved", "ranks_moved"  # events


def choose_trial(seed: int, number: int, *, steps: int, kinds: Sequence[str], attempt: int = 1) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    host-sick: all devices of the second host break at once. first-host-sick: those of the first.
    both-hosts-sick: those of both. moved-twice: then another device breaks on the host that the second one's
    ranks have moved to. both-hosts: one of each host, one after the other. attempt: at drawing one whose
    failures can all come.
    """
    chance = random.Random(f"{seed} {number} {attempt}")
    kind, phase = chance.choice(list(kinds)), chance.choice(phases_of(DEVICE))
    first, then = chance.randint(2, steps // 2), chance.randint(steps // 2 + BETWEEN, steps - 2)
    one, other = chance.sample(SECOND_HOST, 2)
    calls = "" if phase == "allreduce" else f" call={chance.randint(1, CALLS)}"

    def fault(rank: int, step: int) -> str:
        return f"rank={rank} step={step} phase={phase} kind={DEVICE}{calls}"

    match kind:
        case "host-sick":
            faults: tuple[str, ...] = (fault(one, first), fault(other, first))
        case "first-host-sick":
            faults = tuple(fault(rank, first) for rank in FIRST_HOST)
        case "both-hosts-sick":
            faults = tuple(fault(rank, first) for rank in (*FIRST_HOST, *SECOND_HOST))
        case "moved-twice":
            faults = (fault(one, first), fault(other, then))
        case "both-hosts":
            faults = (fault(chance.choice(FIRST_HOST), first), fault(one, then))
        case _:
            faults = (fault(chance.choice((*FIRST_HOST, *SECOND_HOST)), first),)
    return Trial(number, kind, faults, ())


def ranks_of_hosts(trial: Trial) -> tuple[int, ...]:
    """Return how many ranks each host has; those with none stand by."""
    return (*RANKS, *(0,) * (2 if trial.kind in (TWICE, BOTH_SICK) else 1))


def devices_of_hosts(trial: Trial) -> tuple[int, ...]:
    """Return how many devices each host has."""
    spare = 0 if trial.kind in (FIRST_SICK, BOTH_SICK) else SPARE
    return (RANKS[0] + spare, *(RANKS[1] for _ in ranks_of_hosts(trial)[1:]))


def options(trial: Trial) -> tuple[str, ...]:
    """Return what the command needs beside: where all devices go at once, no replica has the state there."""
    return ("--no-state-on-device",) if trial.kind == BOTH_SICK else ()


def came_too_late(trial: Trial, run: Run) -> bool:
    """Return whether what befell the job is not what was to: it says nothing of how that ends.

    A failure never came; a second one was ordered, and the job over before it; or one came where its rank had
    moved to, so that a device broke there for which nobody stands by.
    """
    if _hit_elsewhere(trial, run):
        return True
    if run.status != 0:
        return False
    told = [event["event"] for event in run.events if event["event"] in ("fault", "recovery_begun")]
    is_unheard = trial.kind in (TWICE, BOTH) and told[-1:] == ["fault"]
    return is_unheard or trials_in_place.came_too_late(trial, run)


def _hit_elsewhere(trial: Trial, run: Run) -> bool:
    gone: set[int] = set()
    for event in run.events:
        if event["event"] == ELSEWHERE:
            gone |= set(event["ranks"])
        elif event["event"] == "fault" and event["rank"] in gone and trial.kind != TWICE:
            return True
    return False


def judge(trial: Trial, run: Run, undisturbed: Run) -> TrialVerdict:
    """Return whether a run ended as the undisturbed one, with all processes made anew that had to be."""
    found = Counter(event["event"] for event in run.events)
    wanted = _moves_of(trial)
    reasons = [
        f"{what} {found[what]} times in the place of {wanted[what]}"
        for what in (HERE, ELSEWHERE)
        if found[what] != wanted[what]
    ]
    reasons += [f"two halves went on at once: {sign}" for sign in run.halves]
    # In transparent mode the first host alone writes events, and of its own ranks' processes.
    verdict = trials_in_place.judge(trial, run, undisturbed, told_of=len(FIRST_HOST))
    return replace(verdict, reason="; ".join([*reasons, *filter(None, [verdict.reason])]))


def _moves_of(trial: Trial) -> Counter[str]:
    """Return how often processes have to be made anew on their host, and elsewhere."""
    if trial.kind in (SICK, FIRST_SICK, BOTH_SICK):
        return Counter({ELSEWHERE: 2 if trial.kind == BOTH_SICK else 1})
    ranks = [parse_fault(fault).rank for fault in trial.faults]
    return Counter(HERE if rank in FIRST_HOST else ELSEWHERE for rank in ranks)
