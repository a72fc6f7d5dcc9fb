"""Trials of jobs without replicas on three hosts, whose state the memory tier keeps.

A host dies whole, or a rank, or the keeper of a host's memory; or that memory is damaged.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitckpt.faults.injection import phases_of
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.runs_on_hosts import HOSTS, HostStrike, JobOnHosts
from jitckpt.rehearsal.trials import Trial, Verdict, differences
from jitckpt.tiers import host_memory

RANK, HOST, STORE_HOST, KEEPER = "kill", "host", "store-host", "keeper"
CHUNK, HEADER, STOPPED = "flipped-chunk", "flipped-header", "stopped-holder"
MEMORY_KINDS = (RANK, HOST, STORE_HOST, KEEPER, CHUNK, HEADER, STOPPED)
STOPPED_SECONDS = 3.0
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
        elif self.what == KEEPER:
            _signal(keepers, signal.SIGKILL)
        else:
            _signal(workers, signal.SIGSTOP)  # so that it does not write another snapshot over it
            for keeper in keepers:
                _flip(keeper, header=self.what == HEADER)
        _signal(workers, signal.SIGKILL)

    def _what(self) -> str:
        return self.what


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


def choose_trial(seed: int, number: int, *, steps: int, step_seconds: float, kinds: Sequence[str]) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(list(kinds))
    if kind == RANK:
        step, phase = chance.randint(3, steps * 3 // 4), chance.choice(phases_of("kill"))
        fault = f"rank={chance.randrange(HOSTS)} step={step} phase={phase} kind=kill"
        return Trial(number, kind, (fault,), ())
    delay = round(chance.uniform(0, steps * step_seconds / 2), 4)
    if kind in (HOST, STORE_HOST):
        host = 0 if kind == STORE_HOST else chance.randrange(1, HOSTS)
        return Trial(number, kind, (), (HostStrike(host, "memory_safe", delay),))
    return Trial(number, kind, (), (MemoryStrike(chance.randrange(HOSTS), "memory_safe", delay, what=kind),))


def missed(trial: Trial, run: Run) -> bool:
    """Return whether the failure should have come when the training was over."""
    return any(strike not in run.struck for strike in trial.strikes)


def judge(trial: Trial, run: Run, undisturbed: Run, folder: Path, ignored: Sequence[str] = ()) -> Verdict:
    """Return whether the run has ended as the undisturbed one, from memory and without a file."""
    reasons = [f"ended with status {run.status}"] if run.status else differences(run, undisturbed, ignored)
    restored = [event for event in run.events if event["event"] == "restored"]
    if not restored:
        reasons.append("no rank went on from a state")
    if any(not event.get("in_memory") for event in restored):
        reasons.append("a rank went on from files")
    steps = {event["step"] for event in restored if event["restart"] == 1}
    if len(steps) > 1:
        reasons.append(f"ranks went on from steps {sorted(steps)}")
    if saves := list(folder.rglob("step-*/rank-*")):
        reasons.append(f"{len(saves)} saves were written")
    kept = [event for event in run.events if event["event"] == "kept_in_memory"]
    redone = max((event["newest"] - step for event in kept for step in steps if event["newest"]), default=1)
    if redone > MOST_REDONE:
        reasons.append(f"{redone} minibatches redone")
    reasons += [f"left behind {thing}" for thing in run.left_behind]
    times = [one.first_step_seconds for one in run.recoveries if one.first_step_seconds is not None]
    return Verdict(
        failure=str(trial),
        step=max(steps, default=0),
        redone=redone,
        recovery_seconds=max(times, default=None),
        seconds=run.seconds,
        failures=len(run.recoveries),
        reason="; ".join(reasons),
    )
