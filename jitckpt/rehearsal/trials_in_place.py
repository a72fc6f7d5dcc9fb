"""Trials of transparent mode: servers fail, and the same workers go on."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jitckpt.agent.proxies.recovering import NOT_YET
from jitckpt.events import Event
from jitckpt.faults.injection import FAILURES_OF_THE_DEVICE, LASTING_KINDS, keys_of, parse_fault, phases_of
from jitckpt.rehearsal.runs import Run, ServerStrike, Strike
from jitckpt.rehearsal.trials import Trial, TrialVerdict, differences, is_silent
from jitckpt.reports.timeline_transparent import transparent_recoveries
from jitckpt.saves.final_state import FinalState

# What is said of a shard of which no device is left; the ranks are those that held it.
LOST = re.compile(r"no device has the state after step \d+ of shard \d+ any more, held by ranks ([\d, ]+)")
BEGUN_ANEW = "all devices of a shard were lost, so the job has begun anew, and ended equal bit for bit"
AHEAD = "equal bit for bit; a rank that was ahead of another made that again, too"
LONGEST_DELAY = 0.1  # seconds, of a second failure: half of the training is still to come then


def choose_trial(
    seed: int,
    number: int,
    *,
    ranks: int,
    steps: int,
    kinds: Sequence[str],
    second: bool,
    two_at_once: bool,
    attempt: int = 1,
) -> Trial:
    """Return the `number`-th trial of transparent mode, of faults.TRANSPARENT_KINDS.

    second: a server is killed while the recovery is under way. two_at_once: two ranks fail. attempt: at
    drawing one whose failures can all come; each is another trial.
    """
    chance = random.Random(f"{seed} {number}" if attempt == 1 else f"{seed} {number} {attempt}")
    rank, kind = chance.randrange(ranks), chance.choice(list(kinds))
    # There must be calls left for the device to count: a step has many kernels, but few collectives. What
    # makes no sound is found from the first whole step on.
    step = chance.randint(2 if is_silent(kind) else 1, max(2, steps // 2) if second else steps - 3)
    phase = chance.choice(phases_of(kind))
    most = 12 if kind in (*FAILURES_OF_THE_DEVICE, *LASTING_KINDS) else 2
    counts = "call" in keys_of(kind) and phase != "allreduce"
    call = f" call={chance.randint(1, most)}" if counts else ""
    faults: tuple[str, ...] = (f"rank={rank} step={step} phase={phase} kind={kind}{call}",)
    if two_at_once:
        other = (rank + chance.randrange(1, ranks)) % ranks
        faults += (faults[0].replace(f"rank={rank} ", f"rank={other} ", 1),)
    strikes: tuple[Strike, ...] = ()
    if second:
        event = chance.choice(("recovery_begun", "server_restarted", "calls_made_again"))
        delay = round(chance.uniform(0, LONGEST_DELAY), 4)
        strikes = (ServerStrike(chance.randrange(ranks), event, delay),)
    return Trial(number, kind, faults, strikes)


def final_as_printed(output: str, restarts: int = 0) -> dict[int, FinalState]:
    """Return what examples/plain_ddp.py, which knows nothing of jitckpt, has printed of its ranks' end.

    restarts: how often the job has begun anew. Then it has printed its first steps before, too.
    """
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    if restarts:
        begins = [number for number, line in enumerate(steps) if line.startswith("step 1:")]
        steps = steps[begins[-1] :] if begins else steps
    ends = [line.split(": final state ") for line in output.splitlines() if ": final state " in line]
    return {
        int(rank.removeprefix("rank ")): FinalState(len(steps), {"state": digest, "steps": str(steps)}, ())
        for rank, digest in ends
    }


def came_too_late(trial: Trial, run: Run) -> bool:
    """Return whether a failure came when a rank had ended already, which can't take part in a recovery.

    So did one that never came, as in an optimizer step that a gradient scaler has left out, and a second one
    that hit no server, or after which there was no other recovery.
    """
    happened = {event["fault"] for event in run.events if event["event"] == "fault"}
    if any(str(parse_fault(fault)) not in happened for fault in trial.faults):
        return True
    given_up = [event["text"] for event in run.events if event["event"] == "recovery_given_up"]
    if any("ended with exit status 0" in text or "has hung up" in text for text in given_up):
        return True
    found = transparent_recoveries(run.events)
    replaced = {rank for one in found for rank in one.replaced}
    again = sum(one.attempts for one in found) > 1
    return any(strike not in run.struck or not (again or strike.rank in replaced) for strike in trial.strikes)


def judge(trial: Trial, run: Run, undisturbed: Run, *, told_of: int | None = None) -> TrialVerdict:
    """Return whether a run in transparent mode ended as the undisturbed one, in the same worker processes.

    told_of: how many ranks' processes events tell of; None: of all. Where the trial has hit all devices that
    had a shard's state, the workers may have begun anew instead; and once more where it hit them then before
    all had used their devices: there was nothing to lose yet.
    """
    reasons = [f"ended with status {run.status}"] if run.status else differences(run, undisturbed)
    found = transparent_recoveries(run.events)
    again = list(_made_again(run.events))
    given_up = [one.given_up for one in found if one.given_up is not None]
    anew = len(given_up) == run.restarts > 0 and _had_to_begin_anew(trial, run, given_up)
    workers = {event["pid"] for event in run.events if event["event"] == "proxy_connected"}
    if not anew:
        reasons += given_up
        if run.restarts:
            reasons.append("the workers were started again")
        if len(workers) != (expected := len(undisturbed.final) if told_of is None else told_of):
            reasons.append(f"{len(workers)} processes have had a device, instead of {expected}")
    if not found:
        reasons.append("no recovery")
    reasons += [f"{one.of_job} minibatches redone" for one in again if one.of_job > 1]
    reasons += [f"left behind {thing}" for thing in run.left_behind]
    return TrialVerdict(
        failure=str(trial),
        step=found[-1].state if found else None,
        redone=max((one.of_job for one in again), default=None),
        recovery_seconds=max((one.seconds for one in found), default=None),
        seconds=run.seconds,
        failures=sum(one.attempts for one in found),
        reason="; ".join(reasons),
        note=BEGUN_ANEW if anew else AHEAD if any(one.of_rank > one.of_job for one in again) else "",
    )


def _had_to_begin_anew(trial: Trial, run: Run, given_up: Sequence[str]) -> bool:
    """Return whether the recoveries were given up for what the trial has done."""
    first, *later = given_up
    return _has_hit_all_of_a_shard(trial, run, first) and all(NOT_YET in text for text in later)


def _has_hit_all_of_a_shard(trial: Trial, run: Run, given_up: str) -> bool:
    """Return whether it was given up for a shard that was held by no other ranks than the trial has hit."""
    hit = {parse_fault(fault).rank for fault in trial.faults}
    hit |= {strike.rank for strike in trial.strikes if strike in run.struck}
    lost = LOST.search(given_up)
    return lost is not None and {int(rank) for rank in lost[1].strip(", ").split(", ")} <= hit


@dataclass(frozen=True)
class _MadeAgain:
    """Minibatches that a recovery has made again, the one under way included.

    of_job: a job has ended a minibatch once all its ranks have. of_rank: the most of any rank's. One that was
    ahead of another, which it then waits for, makes what it was ahead by again as well.
    """

    of_job: int
    of_rank: int


def _made_again(events: Sequence[Event]) -> Iterator[_MadeAgain]:
    for recovered in events:
        if recovered["event"] != "recovered":
            continue
        state = recovered["state"]
        # Where the state stays on the devices, a rank also keeps what leads on from a step that it has not
        # begun.
        ended = [
            max(state, event["ended"])
            for event in events
            if event["event"] == "rank_stopped" and event["recovery"] == recovered["recovery"]
        ]
        yield _MadeAgain(min(ended, default=state) - state + 1, max(ended, default=state) - state + 1)
