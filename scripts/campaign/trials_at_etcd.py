"""Trials of a job whose hosts meet at etcd: agents, hosts and members of etcd are killed, stopped, cut off.

In half of them three hosts have a rank each; in the others two have, and the third stands by, so that the job
goes on without a host that is cut off and comes back.
"""

import random
from collections.abc import Callable, Sequence

from campaign import trials_on_hosts
from campaign.runs_on_hosts import HOSTS, HostStrike
from campaign.strikes_at_etcd import (
    BOTH,
    IN,
    OUT,
    AgentDies,
    ClockJumps,
    CutOff,
    Lasting,
    MemberCutOff,
    MemberDies,
    MembersStop,
    Stops,
)
from jitckpt.bindings.clock import HOUR
from jitckpt.faults.injection import phases_of
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial, TrialVerdict, differences, verdict

HOST = "host"
RANKS = (HOSTS, HOSTS - 1)
# That something lasts. A host of which nothing comes is given up after 4 s, an agent that is silent on a host
# which is not after 24 s.
SHORT, MOST, MOST_OF_A_STOP = 1.0, 15.0, 45.0
TOLD_BY = 3  # a step in which all ranks have told of their first one, from which strikes are counted
RESTARTS = 6  # at most; what comes back may fail a start that has just begun
# Said of a host that is seen no more. If it has come true, the end is another.
MAYBE_LOST = "its own host may have it"
Making = Callable[[random.Random, int, float], HostStrike]


def _lasting(strike: type[Lasting], most: float = MOST, **details: object) -> Making:
    def make(chance: random.Random, host: int, delay: float) -> HostStrike:
        seconds = round(chance.choice((SHORT, most, most)) * chance.uniform(0.2, 1.0), 1)
        drawn = {name: value(chance) if callable(value) else value for name, value in details.items()}
        return strike(host, "first_step", delay, seconds=seconds, **drawn)  # type: ignore[arg-type]

    return make


def _perhaps(chance: random.Random) -> bool:
    return chance.random() < 0.5


def _jump(chance: random.Random) -> int:
    return chance.choice((-HOUR, HOUR))


HOST_STRIKES: dict[str, Making] = {
    HOST: lambda chance, host, delay: HostStrike(host, "first_step", delay),
    "agent": lambda chance, host, delay: AgentDies(host, "first_step", delay),
    "stop-agent": _lasting(Stops, MOST_OF_A_STOP),
    "stop-host": _lasting(Stops, MOST_OF_A_STOP, whole=True),
    "cut-host": _lasting(CutOff, way=BOTH),
    "cut-host-in": _lasting(CutOff, way=IN),
    "cut-host-out": _lasting(CutOff, way=OUT),
}
# Nothing comes of these by themselves, so a rank is killed beside them.
MEMBER_STRIKES: dict[str, Making] = {
    "member": _lasting(MemberDies, leader=_perhaps),
    "stop-member": _lasting(MembersStop, leader=_perhaps),
    "stop-members": _lasting(MembersStop, leader=_perhaps, two=True),
    "cut-member": _lasting(MemberCutOff, leader=_perhaps, way=BOTH),
    "cut-member-in": _lasting(MemberCutOff, leader=_perhaps, way=IN),
    "cut-member-out": _lasting(MemberCutOff, leader=_perhaps, way=OUT),
    "clock": _lasting(ClockJumps, jump=_jump),
}
KINDS = (trials_on_hosts.RANK, *HOST_STRIKES, *MEMBER_STRIKES)


def choose_trial(
    seed: int, number: int, *, ranks: int, steps: int, step_seconds: float, kinds: Sequence[str]
) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    steps: of the whole job. step_seconds: their mean duration. kinds: to choose from, of KINDS.
    """
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(list(kinds))
    delay = round(chance.uniform(0, steps * step_seconds / 2), 4)
    host = chance.randrange(ranks)
    step, phase = chance.randint(2, steps * 3 // 4), chance.choice(phases_of("kill"))
    if kind in MEMBER_STRIKES:
        step = max(step, TOLD_BY)
    fault = f"rank={chance.randrange(ranks)} step={step} phase={phase} kind=kill"
    if kind in HOST_STRIKES:
        return Trial(number, kind, (), (HOST_STRIKES[kind](chance, host, delay),))
    if kind in MEMBER_STRIKES:
        member = chance.randrange(HOSTS) if kind != "clock" else host
        return Trial(number, kind, (fault,), (MEMBER_STRIKES[kind](chance, member, delay),))
    return Trial(number, kind, (fault,), ())


def missed(trial: Trial, run: Run) -> bool:
    """Return whether what comes from outside should have come when the training was over."""
    return any(strike not in run.struck for strike in trial.strikes)


def judge(trial: Trial, run: Run, undisturbed: Run, said: str, ignored: Sequence[str] = ()) -> TrialVerdict:
    """Return whether the run has ended as the undisturbed one, and never in two halves. said: by all agents.

    What lasts may cost as many restarts as there are; where a host only stood still for a moment, none.
    """
    if trial.kind not in HOST_STRIKES or trial.kind == HOST:
        return trials_on_hosts.judge_on_hosts(trial, run, undisturbed, said, ignored)
    reasons = [f"ended with status {run.status}"] if run.status else differences(run, undisturbed, ignored)
    lost = trials_on_hosts.LOST_STATE
    reasons += sorted(
        {line for line in said.splitlines() if any(text in line for text in lost) and MAYBE_LOST not in line}
    )
    return verdict(
        trial,
        run,
        reasons,
        step=trials_on_hosts.went_on_from(run),
        redone=None,  # what a stopped or cut-off host has printed comes late
        note="" if run.restarts else "nothing came of it, equal bit for bit",
    )
