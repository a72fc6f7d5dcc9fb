"""The ways to protect a job, in tiers: after a failure the first tier that still has the state recovers it.

What a tier can recover and what that takes is said here once; `jitckpt.planning.plan` computes with it,
`jitckpt.planning.simulator` plays it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.placement import BUFFERS, Machine, Placement, place
from jitckpt.decisions.sizes import show_bytes
from jitckpt.planning import redundancy
from jitckpt.planning.cluster import Description
from jitckpt.planning.mesh import loses_a_shard
from jitckpt.planning.units import SECONDS, quantity

GEMINI_BUFFER_BYTES = 128 * 2**20  # device memory that receives checkpoint chunks


@dataclass(frozen=True)
class OutageLoss:
    """What an outage has taken so far. Several failures in one outage add up."""

    device_ranks: frozenset[int] = frozenset()  # their device memory is gone
    host_machines: frozenset[int] = frozenset()  # their host memory is gone
    machines_to_replace: frozenset[int] = frozenset()

    def __or__(self, other: "OutageLoss") -> "OutageLoss":
        return OutageLoss(
            self.device_ranks | other.device_ranks,
            self.host_machines | other.host_machines,
            self.machines_to_replace | other.machines_to_replace,
        )


def lost_by(description: Description, scope: str, component: int, takes: str) -> OutageLoss:
    """What one failure takes."""
    if takes == "nothing":
        return OutageLoss()
    ranks = description.ranks_of(scope, component)
    if takes == "process":
        return OutageLoss(frozenset(ranks))
    per_machine = description.cluster.gpus_per_machine
    machines = frozenset(range(ranks[0] // per_machine, ranks[-1] // per_machine + 1))
    return OutageLoss(frozenset(ranks), machines if takes == "machine" else frozenset(), machines)


@dataclass(frozen=True)
class Times:
    """Seconds of the steps that recoveries are made of."""

    description: Description

    @cached_property
    def snapshot(self) -> float:
        """A GPU's state to its host."""
        given = self.description.measured.snapshot_seconds
        if given is not None:
            return given
        return self.description.job.gpu_state_bytes / self.description.cluster.device_to_host_bytes_per_second

    @cached_property
    def write(self) -> float:
        """One replica of the state to the shared files."""
        given = self.description.measured.save_seconds
        if given is not None:
            return max(0.0, given - self.snapshot)
        return self.description.job.state_bytes / self.description.cluster.storage_write_bytes_per_second

    @cached_property
    def jit_save(self) -> float:
        """All healthy ranks write their state at once."""
        given = self.description.measured.jit_save_seconds
        if given is not None:
            return given
        job, cluster = self.description.job, self.description.cluster
        return self.snapshot + job.gpu_state_bytes * job.mesh.gpus / cluster.storage_write_bytes_per_second

    @cached_property
    def load(self) -> float:
        """Every rank reads its state from the shared files."""
        given = self.description.measured.load_seconds
        if given is not None:
            return given
        job, cluster = self.description.job, self.description.cluster
        return self.snapshot + job.gpu_state_bytes * job.mesh.gpus / cluster.storage_read_bytes_per_second

    @cached_property
    def machine_fetch(self) -> float:
        """A machine's whole state over its network."""
        cluster = self.description.cluster
        return (
            self.description.job.gpu_state_bytes * cluster.gpus_per_machine / cluster.network_bytes_per_second
        )

    def replacement(self, lost: OutageLoss) -> float:
        return self.description.cluster.replacement_seconds if lost.machines_to_replace else 0.0


@dataclass(frozen=True)
class PlannedTier(ABC):
    description: Description = field(repr=False)

    @cached_property
    def times(self) -> Times:
        return Times(self.description)

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def recovers(self, lost: OutageLoss) -> bool:
        """Whether this tier still has the whole state."""

    @abstractmethod
    def outage_seconds(self, lost: OutageLoss) -> float:
        """From the failure until training goes on, with machines at hand to replace lost ones."""

    @property
    def resumes(self) -> bool:
        """Whether training goes on from the minibatch that failed (memory tiers: a few back)."""
        return True

    @property
    def overhead_share(self) -> float:
        """Lost time per useful time while nothing fails, saves apart."""
        return 0.0

    @property
    def checkpoint_minibatches(self) -> int:
        """How many minibatches a checkpoint takes, and how many lie between two; 0: none are made."""
        return 0

    @property
    def host_memory_bytes(self) -> float:
        """Of the machine that needs most."""
        return 0.0

    def host_memory_bytes_of(self, machine: int) -> float:
        """Of one machine."""
        return self.host_memory_bytes

    @property
    def device_memory_bytes(self) -> float:
        """Of each GPU, beyond what training needs."""
        return 0.0


class TransparentJit(PlannedTier):
    """Recovered under the running processes: the application sees a pause."""

    name = "transparent-jit"

    def recovers(self, lost: OutageLoss) -> bool:
        return not loses_a_shard(self.description.job.state_mesh, lost.device_ranks)

    def outage_seconds(self, lost: OutageLoss) -> float:
        job, times = self.description.job, self.times
        seconds = job.detection_seconds + job.communicator_seconds
        if lost.machines_to_replace:  # hard error: the processes move by CRIU, device memory by files
            return seconds + times.jit_save + times.replacement(lost) + times.load
        return seconds + (times.machine_fetch if lost.device_ranks else 0.0)

    @property
    def overhead_share(self) -> float:
        return self.description.measured.jit_overhead_share


class UserJit(PlannedTier):
    """Healthy ranks save after the failure, the job is started again from those files."""

    name = "user-jit"

    def recovers(self, lost: OutageLoss) -> bool:
        return not loses_a_shard(self.description.job.state_mesh, lost.device_ranks)

    def outage_seconds(self, lost: OutageLoss) -> float:
        job, times = self.description.job, self.times
        return (
            job.detection_seconds + times.jit_save + times.replacement(lost) + job.start_seconds + times.load
        )

    @property
    def overhead_share(self) -> float:
        return self.description.measured.jit_overhead_share


@dataclass(frozen=True)
class Gemini(PlannedTier):
    """Every checkpoint whole in host memory, on the machine itself and on replicas - 1 others."""

    replicas: int = 2
    name = "gemini"

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.description.cluster.machines:
            raise InvalidInput(
                f"gemini={self.replicas}: the number of replicas must be from 1 to the number of machines, "
                f"{self.description.cluster.machines}"
            )

    @property
    def machine_checkpoint_bytes(self) -> float:
        return self.description.job.gpu_state_bytes * self.description.cluster.gpus_per_machine

    @cached_property
    def placement(self) -> Placement:
        cluster = self.description.cluster
        # What takes most machines first: where not all domains can be avoided, that one is.
        scopes = sorted(("power", "switch", "rack"), key=cluster.gpus_of, reverse=True)
        sizes = [(scope, cluster.gpus_of(scope) // cluster.gpus_per_machine) for scope in scopes]
        machines = [
            Machine(tuple(f"{scope}-{i // size}" for scope, size in sizes), cluster.host_memory_of(i))
            for i in range(cluster.machines)
        ]
        return place(machines, self.replicas, self.machine_checkpoint_bytes)

    @cached_property
    def _held_with(self) -> Mapping[int, list[frozenset[int]]]:
        """By machine: the sets of holders that it is in."""
        found: dict[int, set[frozenset[int]]] = {}
        for holder in self.placement.holders:
            for machine in holder:
                found.setdefault(machine, set()).add(frozenset(holder))
        return {machine: list(sets) for machine, sets in found.items()}

    def recovers(self, lost: OutageLoss) -> bool:
        gone = lost.host_machines
        return not any(holder <= gone for machine in gone for holder in self._held_with[machine])

    def outage_seconds(self, lost: OutageLoss) -> float:
        job, times = self.description.job, self.times
        fetch = times.machine_fetch if lost.machines_to_replace else 0.0
        return job.detection_seconds + times.replacement(lost) + job.start_seconds + fetch + times.snapshot

    @cached_property
    def checkpoint_minibatches(self) -> int:
        """As often as the traffic fits the idle time of the network."""
        job = self.description.job
        seconds = max((self.replicas - 1) * self.times.machine_fetch, self.times.snapshot)
        idle = job.network_idle_share * job.minibatch_seconds
        if seconds == 0:
            return 1
        if idle == 0:
            raise InvalidInput(
                "job.network_idle_share is 0: gemini sends its checkpoints while the network is idle"
            )
        return max(1, math.ceil(seconds / idle))

    @property
    def host_memory_bytes(self) -> float:
        return BUFFERS * self.machine_checkpoint_bytes * (1 + max(self._hosted))

    def host_memory_bytes_of(self, machine: int) -> float:
        return BUFFERS * self.machine_checkpoint_bytes * (1 + self._hosted[machine])

    @cached_property
    def _hosted(self) -> list[int]:
        return self.placement.hosted()

    @property
    def device_memory_bytes(self) -> float:
        return GEMINI_BUFFER_BYTES if self.replicas > 1 else 0.0


@dataclass(frozen=True)
class Reft(PlannedTier):
    """Each data-parallel member keeps its part of what is redundant, and something of its peers' parts."""

    method: str = "arc"
    name = "reft"

    @cached_property
    def costs(self) -> redundancy.Costs:
        """Of one member: one GPU."""
        job = self.description.job
        model_ranks = job.mesh.pipeline * job.mesh.tensor
        if job.optimizer_is_sharded:
            if self.method != "aor":
                raise InvalidInput(f"reft={self.method}: with job.optimizer_is_sharded it must be reft=aor")
            parameters = job.parameters / model_ranks
            return redundancy.aor(
                parameters * job.parameter_bytes,
                parameters * job.optimizer_bytes,
                parameters * job.gradient_bytes,
                job.mesh.data,
            )
        if self.method == "aor":
            raise InvalidInput("reft=aor: it is for job.optimizer_is_sharded = true; use arc or aec")
        if job.mesh.replicas == 1:
            raise InvalidInput(
                "reft: the job has one replica of each shard, nothing is redundant; use gemini "
                "or shard over fewer"
            )
        ways = {"arc": redundancy.arc, "aec": redundancy.aec, "arc-aec": redundancy.arc_with_aec}
        if self.method not in ways:
            raise InvalidInput(f"reft={self.method}: the method must be arc, aec, arc-aec or aor")
        return ways[self.method](job.gpu_state_bytes, job.mesh.replicas)

    def recovers(self, lost: OutageLoss) -> bool:
        per_machine = self.description.cluster.gpus_per_machine
        ranks = [machine * per_machine + i for machine in lost.host_machines for i in range(per_machine)]
        return not loses_a_shard(self.description.job.mesh, ranks, self.costs.survives_losses)

    def outage_seconds(self, lost: OutageLoss) -> float:
        job, times = self.description.job, self.times
        gather = times.machine_fetch  # all-gather of the parts, whoever lost something
        return job.detection_seconds + times.replacement(lost) + job.start_seconds + gather + times.snapshot

    @property
    def overhead_share(self) -> float:
        return self.description.measured.sharded_overhead_share

    @cached_property
    def checkpoint_minibatches(self) -> int:
        size = self.costs.snapshot_bytes + self.costs.redundant_traffic_bytes
        seconds = size / self.description.cluster.device_to_host_bytes_per_second
        return max(1, math.ceil(seconds / self.description.job.minibatch_seconds))

    @property
    def host_memory_bytes(self) -> float:
        return self.costs.host_memory_bytes(BUFFERS) * self.description.cluster.gpus_per_machine


@dataclass(frozen=True)
class Files(PlannedTier):
    """Saves to shared files every so often; asks nothing of any machine's memory."""

    interval_seconds: float | None = None  # None: the optimum
    in_background: bool = False  # CheckFreq: only the copy to the host stops training

    @property
    def name(self) -> str:
        return "checkfreq" if self.in_background else "periodic"

    def recovers(self, lost: OutageLoss) -> bool:
        return True

    @property
    def resumes(self) -> bool:
        return False

    def outage_seconds(self, lost: OutageLoss) -> float:
        job, times = self.description.job, self.times
        return job.detection_seconds + times.replacement(lost) + job.start_seconds + times.load

    @property
    def stall_seconds(self) -> float:
        """Training stands still for each save."""
        return self.times.snapshot if self.in_background else self.times.snapshot + self.times.write

    @property
    def lag_seconds(self) -> float:
        """After the stall, until the save is whole."""
        return self.times.write if self.in_background else 0.0

    @property
    def host_memory_bytes(self) -> float:
        per_machine = self.description.cluster.gpus_per_machine
        return self.description.job.gpu_state_bytes * per_machine if self.in_background else 0.0


@dataclass(frozen=True)
class Policy:
    """Tiers, the first that can recover does."""

    text: str
    tiers: tuple[PlannedTier, ...]

    @property
    def files(self) -> Files | None:
        return next((tier for tier in self.tiers if isinstance(tier, Files)), None)

    @property
    def overhead_share(self) -> float:
        return sum(tier.overhead_share for tier in self.tiers)

    @property
    def host_memory_bytes(self) -> float:
        return sum(tier.host_memory_bytes for tier in self.tiers)

    @property
    def device_memory_bytes(self) -> float:
        return sum(tier.device_memory_bytes for tier in self.tiers)

    def tier_for(self, lost: OutageLoss) -> PlannedTier | None:
        """Who recovers from this; None: nobody, the job starts over."""
        return next((tier for tier in self.tiers if tier.recovers(lost)), None)


def parse_policy(text: str, description: Description) -> Policy:
    """Read a policy: tiers joined by "+", such as "user-jit+gemini=2+periodic=6h".

    Tiers: none, periodic[=interval], checkfreq[=interval], gemini[=replicas], reft[=arc|aec|arc-aec|aor],
    user-jit, transparent-jit. Raises InvalidInput when one does not exist or does not fit the cluster.
    """
    tiers: list[PlannedTier] = []
    for part in [] if text == "none" else text.split("+"):
        name, _, value = part.partition("=")
        tiers.append(_tier(name, value, description))
    for earlier, tier in pairwise(tiers):
        if isinstance(earlier, Files):
            raise InvalidInput(f"policy {text!r}: {earlier.name} recovers everything, so it must be last")
        if type(earlier) is type(tier):
            raise InvalidInput(f"policy {text!r}: {tier.name} is there twice")
    policy = Policy(text, tuple(tiers))
    for machine in range(description.cluster.machines):
        need = sum(tier.host_memory_bytes_of(machine) for tier in tiers)
        have = description.cluster.host_memory_of(machine)
        if need > have:
            key = "memory.host" if have == description.cluster.host_memory_bytes else "memory.different"
            raise InvalidInput(
                f"policy {text!r} needs {show_bytes(need)} of host memory on machine {machine}: {key} gives "
                f"it {show_bytes(have)}"
            )
    return policy


def _tier(name: str, value: str, description: Description) -> PlannedTier:
    if name in ("periodic", "checkfreq"):
        interval = quantity(name, _spaced(value), SECONDS) if value else None
        return Files(description, interval, name == "checkfreq")
    if name == "gemini":
        if value and not value.isdigit():
            raise InvalidInput(f"gemini={value}: it must be a whole number of replicas")
        return Gemini(description, int(value) if value else min(2, description.cluster.machines))
    if name == "reft":
        return Reft(description, value or ("aor" if description.job.optimizer_is_sharded else "arc"))
    if name in ("user-jit", "transparent-jit") and not value:
        return UserJit(description) if name == "user-jit" else TransparentJit(description)
    raise InvalidInput(
        f"policy part {name + ('=' + value if value else '')!r} is none of: none, periodic[=interval], "
        "checkfreq[=interval], gemini[=replicas], reft[=arc|aec|arc-aec|aor], user-jit, transparent-jit"
    )


def _spaced(value: str) -> str:
    """ "6h" as "6 h"."""
    digits = value.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{digits} {value[len(digits) :]}"
