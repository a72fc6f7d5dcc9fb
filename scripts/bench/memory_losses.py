"""How often a state in memory survives the loss of hosts: agents are killed at random (GEMINI, Corollary 1).

    python scripts/bench/memory_losses.py [--hosts 8] [--copies 2] [--lost 2 3] [--trials 100] [--seed 0]
        [--json]

Each host is an agent, a process with the memory tier and a keeper, without a training: it has the state of
one rank, 5 MiB, and holds the others' as it was placed. In a trial all ranks get a new state; once that is
safe, `--lost` of the hosts, drawn at random, are killed by SIGKILL, agent and keeper, so that their memory is
gone. Others come in their places, all meet anew, and get what they lack. The state has come back if each rank
has all of its bytes; no host may say another thing than the others. The share of such trials stands beside
Corollary 1, with the interval that holds the true share with 95 % (Wilson). With --json a line for each
number of lost hosts, as in docs/data/losses.jsonl.
"""

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.protection import MemoryProtection
from jitckpt.cli.progress import shown_progress
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.hosts import connections
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.planning.counting import corollary_1
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.tier import Shard
from jitckpt.wire.agents import OF_MEMORY
from jitckpt.wire.hosts import Host

HERE = "127.0.0.1"
STATE_BYTES = shard.CHUNK + (1 << 20)
LIMIT = 300.0
KEEP_SECONDS = 1.0  # no agent comes back to a keeper
NORMAL_95 = 1.96
_processes = get_context("fork")  # which has all that is needed already


def state_of(seed: int, rank: int, step: int) -> bytes:
    return random.Random(f"{seed} {rank} {step}").randbytes(STATE_BYTES)


def wilson(came_back: int, trials: int) -> tuple[float, float]:
    """Return the interval that holds the true share with 95 %."""
    share, square = came_back / trials, NORMAL_95**2
    middle = share + square / (2 * trials)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return (middle - half) / (1 + square / trials), (middle + half) / (1 + square / trials)


class Agent:
    """What runs in a host's process: does what it is told over a pipe, and answers."""

    def __init__(self, number: int, hosts: int, copies: int, name: str) -> None:
        self.number, self.hosts = number, hosts
        wanted = Wanted("peer", copies, limit=1 << 30, keep=KEEP_SECONDS)
        self.tier = MemoryTier(wanted, name, EventLog())
        self.met: Hosts | None = None
        self.protection: MemoryProtection | None = None

    def leave(self) -> None:
        """Leave the meeting."""
        if self.protection is not None:
            self.protection.stop()
        if self.met is not None:
            self.met.close()
        self.protection = self.met = None

    def listen(self) -> int:
        """Leave the meeting before; return the port for the next."""
        self.leave()
        self.listener = connections.listen(HERE)
        return int(self.listener.getsockname()[1])

    def meet(self, ports: Sequence[int]) -> None:
        known = [Host(HERE, port, (number,), 0) for number, port in enumerate(ports)]
        self.met = Hosts(self.number, known, self.listener, b"secret", LIMIT)
        self.tier.answer_others(self.met)
        self.met._thread.start()
        for connected in self.met._connected.values():
            assert connected.wait(LIMIT)

    def gather(self, step: int, seed: int) -> str:
        """Get what this rank lacks; return what it has then of the step: 'whole', 'nothing', or 'wrong'."""
        assert self.met is not None
        self.tier.gather(self.met)
        if self.tier._gathered != step:
            return "nothing"
        try:
            _, state = host_memory.read(self.tier.memory.of(self.number), step)
        except SaveError:
            return "wrong"
        same = state.tensors["state"].numpy().tobytes() == state_of(seed, self.number, step)
        return "whole" if same else "wrong"

    def protect(self) -> None:
        """Begin a start: there is a rank."""
        assert self.met is not None
        self.protection = MemoryProtection(
            self.tier, {self.number: self.tier.given(self.number)}, self.met, EventLog()
        )

    def put(self, step: int, seed: int) -> None:
        """Make a snapshot, as the rank does, and wait until it is safe."""
        assert self.protection is not None
        assert self.met is not None
        memory = self.tier.memory
        host_memory.put_word(memory.of(self.number), host_memory.READY, 1)
        memory.put(made(Identity("job", "f", self.hosts, self.number, self.number, self.hosts), step, seed))
        end = time.monotonic() + LIMIT
        while self.protection.safe < step:
            assert time.monotonic() < end, f"step {step} is not safe"
            self.protection.look()
            for arrived in self.met.take():
                if isinstance(arrived, Arrived) and isinstance(arrived.message, OF_MEMORY):
                    self.protection.hear(arrived.host, arrived.message)
            time.sleep(0.002)


def made(identity: Identity, step: int, seed: int) -> Shard:
    data = state_of(seed, identity.rank, step)
    index = shard.Index(
        identity=identity,
        step=step,
        timeline=f"{step}",
        time=1.0,
        checksums=[
            xxhash.xxh3_128_hexdigest(data[begin : begin + shard.CHUNK])
            for begin in range(0, len(data), shard.CHUNK)
        ],
        tensors={"state": ("uint8", [len(data)], 0)},
        host_from=len(data),
        document={},
    ).encode()
    descriptor = host_memory.create()
    host_memory.write(descriptor, data, host_memory.PAGE)
    window = chunks.window(descriptor, host_memory.PAGE, len(data))
    os.close(descriptor)
    return Shard(identity.rank, step % 2, shard.seal_of(index, step, len(data)), index, window)


def serve(pipe: Connection, others: Sequence[Connection], number: int, *of_agent: Any) -> None:
    """Be an agent, until the end of the pipe. others: what came from the parent, and is not for this host."""
    os.setsid()  # who ends the parent by Ctrl-C leaves the end of this to it
    for one in others:
        one.close()  # else the other agents would not see the parent's end
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # what it says to its user
        agent = Agent(number, *of_agent)
        try:
            keeper = agent.tier._keeper._process
            assert keeper is not None
            pipe.send(keeper.pid)
            while True:
                told, *arguments = pipe.recv()
                pipe.send(getattr(agent, told)(*arguments))
        except (EOFError, BrokenPipeError):
            pass
        finally:
            agent.leave()
            agent.tier.close(end=True)


@dataclass
class Running:
    """A host: its agent's process, the pipe to it, and its keeper, which is 0 as long as it is not known."""

    process: Any
    pipe: Connection
    keeper: int = 0

    def await_ready(self) -> None:
        self.keeper = self.keeper or self.pipe.recv()

    def kill(self) -> None:
        """Lose the host, with what its memory had."""
        for pid in (self.process.pid, self.keeper):
            os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()
        end = time.monotonic() + LIMIT
        while is_there(self.keeper):  # no agent reaps it any more
            assert time.monotonic() < end, "the keeper lives"
            time.sleep(0.001)


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Job:
    """So many hosts."""

    def __init__(self, hosts: int, copies: int, name: str, seed: int) -> None:
        self.count, self.copies, self.name, self.seed = hosts, copies, name, seed
        self.started = 0
        self.hosts: list[Running] = []
        for number in range(hosts):
            self.hosts.append(self.start(number))
        self.meet()

    def start(self, number: int) -> Running:
        """Start a host; its name is new, so it finds no keeper of one before it."""
        self.started += 1
        ours, theirs = _processes.Pipe()
        others = [ours, *(host.pipe for host in self.hosts if not host.pipe.closed)]
        of_agent = self.count, self.copies, f"{self.name} {self.started}"
        process = _processes.Process(target=serve, args=(theirs, others, number, *of_agent))
        process.start()
        theirs.close()
        return Running(process, ours)

    def all(self, told: str, *arguments: object) -> list[Any]:
        """Have all hosts do something, at the same time; return their answers."""
        for host in self.hosts:
            host.pipe.send((told, *arguments))
        return [host.pipe.recv() for host in self.hosts]

    def meet(self) -> None:
        for host in self.hosts:
            host.await_ready()
        self.all("meet", self.all("listen"))

    def trial(self, step: int, lost: Sequence[int]) -> bool:
        """Return whether all that the ranks had at that step is there again after the loss of these hosts."""
        self.all("protect")
        self.all("put", step, self.seed)
        for number in lost:
            self.hosts[number].kill()
        for number in lost:
            self.hosts[number] = self.start(number)
        self.meet()
        (said,) = {*self.all("gather", step, self.seed)}
        assert said in ("whole", "nothing"), said
        return bool(said == "whole")

    def end(self) -> None:
        for host in self.hosts:
            host.pipe.close()
        for host in self.hosts:
            host.process.join()


@contextlib.contextmanager
def job_of(hosts: int, copies: int, seed: int) -> Iterator[Job]:
    job = Job(hosts, copies, secrets.token_hex(8), seed)
    try:
        yield job
    finally:
        job.end()


def drawn(seed: int, hosts: int, lost: int, trials: int) -> list[list[int]]:
    """Return the hosts that are lost in each trial."""
    chance = random.Random(f"{seed} {lost}")
    return [sorted(chance.sample(range(hosts), lost)) for _ in range(trials)]


def measured(options: argparse.Namespace, lost: int, each: Callable[[], None]) -> dict[str, Any]:
    """Return what came of the trials with so many lost hosts. each: called after one."""
    hosts, copies, trials = options.hosts, options.copies, options.trials
    begun, came_back = time.monotonic(), 0
    with job_of(hosts, copies, options.seed) as job:
        for number, of_trial in enumerate(drawn(options.seed, hosts, lost, trials), 1):
            came_back += job.trial(number, of_trial)
            each()
    return {
        "hosts": hosts,
        "copies": copies,
        "lost": lost,
        "trials": trials,
        "came_back": came_back,
        "interval": [round(one, 4) for one in wilson(came_back, trials)],
        "corollary_1": round(float(corollary_1(hosts, copies, lost)), 4),
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun),
    }


def in_words(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return (
        f"{one['lost']} of {one['hosts']} hosts lost, {one['copies']} copies: {one['came_back']} of "
        f"{one['trials']} states came back, {one['came_back'] / one['trials']:.3f} (95 % interval {low:.3f} "
        f"to {high:.3f}); Corollary 1: {one['corollary_1']:.3f}; {one['seconds']} s"
    )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--lost", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--trials", type=int, default=100, help="of each number of lost hosts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    progress = shown_progress(BarColumn(), MofNCompleteColumn(), TextColumn("trials"), TimeRemainingColumn())
    progress.live.auto_refresh = False  # by a thread: the agents come from this process by fork
    with progress:
        task = progress.add_task("", total=len(options.lost) * options.trials)
        for lost in options.lost:
            one = measured(options, lost, partial(progress.update, task, advance=1, refresh=True))
            print(json.dumps(one) if options.json else in_words(one), flush=True)


if __name__ == "__main__":
    main()
