"""Sharded snapshots in host memory and what protects them (REFT): copies, parity, recomputing the optimizer.

The D data-parallel members of a pipeline stage form a sharding group; each keeps 1/D of the stage's state.
To that each method adds:

- ARC, asynchronous redundant copying: a peer's shard, |P|/D more a member;
- AEC, asynchronous erasure coding: XOR parity over the other members' cells, |P|/(D - 1) more a *group*
  (a shard is cut into D - 1 cells, one under each other member's parity), |P|/(D (D - 1)) a member;
- AOR, asynchronous optimizer recomputing (ZeRO-1): a peer's gradient shard every step, from which the host
  steps its own copy of the peer's optimizer shard.

Several methods together survive as many losses as there are methods: k copies always do, with strides 1..k.
ARC and AEC together do so only if no parity lies on the member that keeps the copy (then a shard has
D - 2 cells); otherwise two neighbours lost together take a cell and its parity. `survives` in
decisions/redundancy.py decides this from the layout itself.
"""

from dataclasses import dataclass

from jitckpt.decisions.check import number, whole
from jitckpt.decisions.redundancy import protectable


@dataclass(frozen=True)
class Costs:
    """A member's bytes (one member: a pipeline stage's data-parallel path)."""

    snapshot_bytes: float  # its own share, copied to the host at every snapshot
    redundant_traffic_bytes: float  # more bytes copied to the host at every snapshot
    redundant_memory_bytes: float  # more bytes of host memory, one buffer
    survives_losses: int  # in one sharding group

    def host_memory_bytes(self, buffers: int = 2) -> float:
        """Host memory with a whole snapshot and one in progress."""
        return buffers * (self.snapshot_bytes + self.redundant_memory_bytes)


def unprotected(stage_bytes: float, members: int) -> Costs:
    """Each member keeps 1/D of its stage: one loss is one too many."""
    number("stage_bytes", stage_bytes)
    whole("members", members, low=1)
    return Costs(stage_bytes / members, 0.0, 0.0, 0)


def arc(stage_bytes: float, members: int, copies: int = 1) -> Costs:
    """`copies` further members' shards: 2 |P| / D in all for one."""
    shard = unprotected(stage_bytes, protectable(members, copies)).snapshot_bytes
    return Costs(shard, copies * shard, copies * shard, copies)


def aec(stage_bytes: float, members: int) -> Costs:
    """XOR parity, made on the device in bubbles: |P| / (D - 1) more for the group."""
    shard = unprotected(stage_bytes, protectable(members, 1)).snapshot_bytes
    parity = shard / (members - 1)
    return Costs(shard, parity, parity, 1)


def arc_with_aec(stage_bytes: float, members: int) -> Costs:
    """One copy and one parity that avoids it; needs three members."""
    shard = unprotected(stage_bytes, protectable(members, 2)).snapshot_bytes
    extra = shard + shard / (members - 2)
    return Costs(shard, extra, extra, 2)


def aor(
    parameter_bytes: float, optimizer_bytes: float, gradient_bytes: float, members: int, peers: int = 1
) -> Costs:
    """ZeRO-1: parameters are cut for saving, the optimizer is already; peers' optimizers are recomputed.

    All three sizes are the stage's. Per member: its parameter and optimizer shard are copied out, and for
    each peer its gradient shard; the peer's optimizer shard stays on the host. (Parameters are whole on
    every member: a lost member's parameter shard is protected by copying a peer's, as in ARC.)
    """
    for name, size in (("optimizer_bytes", optimizer_bytes), ("gradient_bytes", gradient_bytes)):
        number(name, size)
    copy = arc(parameter_bytes, members, peers)
    return Costs(
        snapshot_bytes=copy.snapshot_bytes + optimizer_bytes / members,
        redundant_traffic_bytes=copy.redundant_traffic_bytes + peers * gradient_bytes / members,
        redundant_memory_bytes=copy.redundant_memory_bytes
        + peers * (optimizer_bytes + gradient_bytes) / members,
        survives_losses=peers,
    )
