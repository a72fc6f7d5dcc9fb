"""Trials of jobs on two to five hosts, whose state the memory tier keeps; most have no replicas.

A host dies whole, or several at once, or one after the other; or a rank, also while its state is copied or
sent; or an agent, or the keeper of a host's memory; or that memory is damaged, or too little; or a host is
slow or silent for a while, or the network is cut.
"""

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaign.runs_on_hosts import STRIKE_SECONDS, HostStrike, JobOnHosts
from campaign.trials_on_hosts import LOST_STATE
from jitckpt.decisions import memory_wanted
from jitckpt.faults.injection import phases_of
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial, TrialVerdict, differences, verdict
from jitckpt.tiers import host_memory

RANK, HOST, STORE_HOST, KEEPER = "kill", "host", "store-host", "keeper"
CHUNK, HEADER, STOPPED = "flipped-chunk", "flipped-header", "stopped-holder"
IN_COPY, IN_SEND, AGENT = "in-copy", "in-send", "agent"
PAIR, SECOND = "pair", "second"  # more is lost than two copies survive
DEFAULT_TIER = "peer"
LOSSES = "losses"  # of so many hosts at once as the job's tier survives, or fewer, or one more
CUT, LONG_CUT = "cut-1-s", "cut-20-s"
SLOW, SILENT, FULL = "slow-holder", "silent-holder", "budget-full"
MEMORY_KINDS = (
    *(RANK, HOST, STORE_HOST, KEEPER, CHUNK, HEADER, STOPPED),
    *(IN_COPY, IN_SEND, AGENT, PAIR, SECOND, CUT, LONG_CUT, SLOW, SILENT, FULL, LOSSES),
)
MOST_HOSTS = 5
# With a budget that is less than the state of a rank with so much state.
LEAST_BUDGET = ("--memory-limit", "1")
MUCH_STATE = ("--width", "20000")
STOPPED_SECONDS = 3.0
SLOWED_SECONDS, SLOWED_BITS = 2.0, 2_000_000  # a second
SILENT_SECONDS = 12.0  # longer than an agent that says nothing is waited for
# Who is cut off from more hosts than copies survive saves what it has, and so does a rank without an agent.
SAVED_ALONE = (LONG_CUT, AGENT, SILENT)
NO_RESTART = (CUT, SILENT)  # it may be over before anybody is taken for lost
CUT_SECONDS = {CUT: 1.0, LONG_CUT: 20.0}
LOOK_SECONDS = 0.0005  # for a moment within a snapshot
COMES_SECONDS = 60.0  # until that moment, or the end of what has no host any more, is given up
MOST_REDONE = 8  # minibatches of a training whose snapshots take longer than they
KEEPER_PROGRAM = b"jitckpt.tiers.keeper"


@dataclass(frozen=True)
class MemoryStrike(HostStrike):
    """Something befalls a host's memory or agent, and then the host's rank is killed. what: of the kinds."""

    what: str = CHUNK

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        processes = job.hosts.processes(self.rank)
        registered = [event["pid"] for event in job.events() if event["event"] == "registered"]
        workers = [pid for pid in processes if pid in registered]
        keepers = [pid for pid in processes if KEEPER_PROGRAM in _command(pid)]
        if self.what == STOPPED:
            agent = job.agents[self.rank].pid
            _signal([agent], signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            _signal([agent], signal.SIGCONT)
        elif self.what == SLOW:
            with job.hosts.slowed(self.rank, SLOWED_BITS):
                time.sleep(SLOWED_SECONDS)
        elif self.what == KEEPER:
            _signal(keepers, signal.SIGKILL)
        elif self.what in (IN_COPY, IN_SEND):
            for keeper in keepers:
                _await_moment(keeper, in_copy=self.what == IN_COPY)
        else:
            _signal(workers, signal.SIGSTOP)  # so that it does not write another snapshot over it
            for keeper in keepers:
                _flip(keeper, header=self.what == HEADER)
        _signal(workers, signal.SIGKILL)

    def _what(self) -> str:
        return self.what


@dataclass(frozen=True)
class AgentStrike(HostStrike):
    """A host's agent is killed alone, and the same command is started there when its ranks are gone."""

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        job.lose_agent(self.rank, lambda pid: KEEPER_PROGRAM in _command(pid))
        job.start(self.rank)

    def _what(self) -> str:
        return "loses its agent"


@dataclass(frozen=True)
class LossesStrike(HostStrike):
    """This host dies, and others at once. is_survived: by what the memory of those that are left has."""

    others: tuple[int, ...] = ()
    is_survived: bool = False

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        lost = (self.rank, *self.others)
        for host in lost:
            job.lose(host)
        for host in lost:
            job.start(host)

    def _what(self) -> str:
        return f"dies with {' and '.join(map(str, self.others))}" if self.others else "dies"


@dataclass(frozen=True)
class CutStrike(HostStrike):
    """The first host's network is cut for a while; if it has ended for that, it is started again."""

    seconds: float = CUT_SECONDS[CUT]

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        with job.hosts.cable_cut():
            time.sleep(self.seconds)
        if self.seconds > CUT_SECONDS[CUT]:
            _start_if_it_ended(job, self.rank)

    def _what(self) -> str:
        return f"is cut off for {self.seconds:g} s"


@dataclass(frozen=True)
class SilentStrike(HostStrike):
    """A host's agent says nothing for a while; if it has ended for that, it is started again."""

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        agent = job.agents[self.rank].pid
        _signal([agent], signal.SIGSTOP)
        time.sleep(SILENT_SECONDS)
        _signal([agent], signal.SIGCONT)
        _start_if_it_ended(job, self.rank)

    def _what(self) -> str:
        return f"says nothing for {SILENT_SECONDS:g} s"


def _start_if_it_ended(job: JobOnHosts, host: int) -> None:
    """Start a host's command again once its agent has ended with a failure."""
    end = time.monotonic() + COMES_SECONDS
    while time.monotonic() < end and not job.over.is_set():
        if job.agents[host].poll():
            job.start(host)
            return
        time.sleep(STRIKE_SECONDS)


def _await_moment(keeper: int, *, in_copy: bool) -> None:
    """Wait until a snapshot of the host's own rank is being copied, or sent."""
    end = time.monotonic() + COMES_SECONDS
    for descriptor in _memories(keeper):
        while host_memory.word(descriptor, host_memory.READY) and time.monotonic() < end:
            begun = host_memory.word(descriptor, host_memory.BEGUN)
            newest = next((seal.step for _, seal in host_memory.found(descriptor)), 0)
            if begun > newest if in_copy else newest > host_memory.word(descriptor, host_memory.SAFE):
                return
            time.sleep(LOOK_SECONDS)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _signal(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _flip(keeper: int, *, header: bool) -> None:
    """Change a byte of the newest step of the host's own rank."""
    for descriptor in _memories(keeper):
        if host_memory.word(descriptor, host_memory.READY):
            for slot, _ in list(host_memory.found(descriptor))[:1]:
                place = host_memory.place(slot) if header else host_memory.data_place(slot)
                (before,) = os.pread(descriptor, 1, place)
                os.pwrite(descriptor, bytes([before ^ 1]), place)


def _memories(keeper: int) -> Iterator[int]:
    for path in Path(f"/proc/{keeper}/fd").iterdir():
        if "jitckpt-memory-tier" in os.readlink(path):
            descriptor = os.open(path, os.O_RDWR)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


def layout(seed: int, number: int, ranks: int) -> tuple[int, ...]:
    """Return how many of the ranks are on each host, in the `number`-th trial of the seed."""
    count = random.Random(f"{seed} {number} hosts").randint(2, min(MOST_HOSTS, ranks))
    return tuple(ranks // count + (host < ranks % count) for host in range(count))


def tier_of(seed: int, number: int, tiers: Sequence[str], hosts: int) -> str:
    """Return the memory tier of the `number`-th trial of the seed: one for which so many hosts will do."""
    fitting = [one for one in tiers if memory_wanted.tier(one).least_hosts <= hosts] or [DEFAULT_TIER]
    return random.Random(f"{seed} {number} tier").choice(fitting)


def choose_trial(
    seed: int,
    number: int,
    *,
    ranks: int,
    steps: int,
    step_seconds: float,
    kinds: Sequence[str],
    tier: str = DEFAULT_TIER,
    has_replicas: bool = False,
) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    has_replicas: of its state, for which `auto` may keep nothing in memory.
    """
    chance = random.Random(f"{seed} {number}")
    hosts = len(layout(seed, number, ranks))
    kind = chance.choice(list(kinds))
    if kind in (RANK, FULL):
        step, phase = chance.randint(3, steps * 3 // 4), chance.choice(phases_of("kill"))
        fault = f"rank={chance.randrange(ranks)} step={step} phase={phase} kind=kill"
        return Trial(number, kind, (fault,), ())
    delay = round(chance.uniform(0, steps * step_seconds / 2), 4)
    host = chance.randrange(1 if kind == HOST else 0, hosts)
    when = ("first_step" if has_replicas and tier == memory_wanted.AUTOMATIC else "memory_safe", delay)
    strikes: tuple[HostStrike, ...]
    match kind:
        case "host":
            strikes = (HostStrike(host, *when),)
        case "store-host":
            strikes = (HostStrike(0, *when),)
        case "second":
            other = (host + chance.randrange(1, hosts)) % hosts
            strikes = (HostStrike(host, *when), HostStrike(other, "restored", chance.uniform(0, 1.0), 1))
        case "pair":
            strikes = (LossesStrike(host, *when, others=((host + 1) % hosts,)),)
        case "losses":
            survived = memory_wanted.tier(tier).survived_losses(hosts)
            lost = chance.sample(range(hosts), min(hosts, chance.randint(1, survived + 1)))
            others, is_survived = tuple(lost[1:]), len(lost) <= survived
            strikes = (LossesStrike(lost[0], *when, others=others, is_survived=is_survived),)
        case "agent":
            strikes = (AgentStrike(host, *when),)
        case "silent-holder":
            strikes = (SilentStrike(host, *when),)
        case "cut-1-s" | "cut-20-s":
            strikes = (CutStrike(0, *when, seconds=CUT_SECONDS[kind]),)
        case _:
            strikes = (MemoryStrike(host, *when, what=kind),)
    return Trial(number, kind, (), strikes)


def has_own_directories(trial: Trial) -> bool:
    """Return whether each host has a checkpoint directory of its own, which is lost with it."""
    return trial.kind != FULL and not is_beyond(trial)  # there only files are sure to be left


def is_beyond(trial: Trial) -> bool:
    """Return whether more hosts are lost than the memory of those that are left is sure to make good."""
    some = (strike for strike in trial.strikes if isinstance(strike, LossesStrike))
    return trial.kind == SECOND or any(not strike.is_survived for strike in some)


def is_of_several(trial: Trial) -> bool:
    """Return whether several hosts are lost at once."""
    return any(isinstance(strike, LossesStrike) and strike.others for strike in trial.strikes)


def missed(trial: Trial, run: Run) -> bool:
    """Return whether the failure should have come, or came, when the training was over; a second one may."""
    if not run.events:
        return False  # nothing has begun
    never_came = any(strike not in run.struck for strike in trial.strikes[:1])
    return never_came or (trial.kind not in NO_RESTART and _came_too_late(run))


def _came_too_late(run: Run) -> bool:
    """Return whether all ranks had come to their end before the first failure was seen, if one was."""
    first = min((event["time"] for event in run.events if event["event"] == "detected"), default=math.inf)
    ranks = {event["rank"] for event in run.events if event["event"] == "registered"}
    return bool(ranks) and ranks <= {
        event["rank"] for event in run.events if event["event"] == "finished" and event["time"] < first
    }


def judge(
    trial: Trial,
    run: Run,
    undisturbed: Run,
    folder: Path,
    ignored: Sequence[str] = (),
    *,
    has_replicas: bool = False,
    said: str = "",
) -> TrialVerdict:
    """Return whether the run has ended as the undisturbed one, from memory and without a file.

    Where more is lost than the copies survive, from files or from the beginning. A short cut does nothing.
    has_replicas: then what a replica has saved just in time serves as well. said: by all agents; of two hosts
    that die one after the other a replica may have saved in between, without the first one's own state.
    """
    reasons = [f"ended with status {run.status}"] if run.status else differences(run, undisturbed, ignored)
    note = ""
    if has_replicas and not run.status and is_beyond(trial) and any(t in said for t in LOST_STATE):
        reasons, note = [], "goes on without a lost host's own state, which is said"
    restored = [event for event in run.events if event["event"] == "restored"]
    steps = {event["step"] for event in restored if event["restart"] == 1}
    if len(steps) > 1:
        reasons.append(f"ranks went on from steps {sorted(steps)}")
    if has_own_directories(trial):
        if not restored and trial.kind not in NO_RESTART:
            reasons.append("no rank went on from a state")
        if not has_replicas and any(not event.get("in_memory") for event in restored):
            reasons.append("a rank went on from files")
        if (
            not has_replicas
            and trial.kind not in SAVED_ALONE
            and (saves := list(folder.rglob("step-*/rank-*")))
        ):
            reasons.append(f"{len(saves)} saves were written")
    kept = [event for event in run.events if event["event"] == "kept_in_memory"]
    redone = max((event["newest"] - step for event in kept for step in steps if event["newest"]), default=1)
    if redone > MOST_REDONE and has_own_directories(trial):
        reasons.append(f"{redone} minibatches redone")
    return verdict(trial, run, reasons, step=max(steps, default=0), redone=redone, note=note)
