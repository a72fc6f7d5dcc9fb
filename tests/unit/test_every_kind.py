"""Every kind of tensor goes through the memory tier: into memory, to another host, and back, bit for bit."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_protection import Agents
from torch import Tensor

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.decisions.memory_wanted import tier
from jitckpt.encoding.strides import all_laid_out, others_than_rows
from jitckpt.events import EventLog
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, own_shard, shard
from jitckpt.worker.saving.host_copies import _laid_out_as
from jitckpt.worker.saving.snapshots import SnapshotRule, Snapshots

STEP = 2
RANKS = (0, 1)
# What torch has of its own, but for what it can neither copy nor look at: bits, parts of bytes, quantized.
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, one element after another: a NaN is like no other number, nor itself."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def any_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    drawn = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return drawn.view(dtype).view(shape)


def every_kind() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    for dtype in TYPES:
        name = shard.dtype_name(dtype)
        found |= {
            f"{name}.rows": any_bits(dtype, 3, 5),
            f"{name}.number": any_bits(dtype),
            f"{name}.empty": any_bits(dtype, 0, 3),
            f"{name}.turned": any_bits(dtype, 7, 3).t(),
            f"{name}.channels_last": any_bits(dtype, 2, 4, 5, 3).permute(0, 3, 1, 2),
            f"{name}.with_gaps": any_bits(dtype, 4, 6)[:, :2],
        }
    return found | {"tied": found["float32.rows"], "expanded": torch.ones(1).expand(4)}


def snapshot(agents: Agents, rank: int, members: tuple[int, ...]) -> None:
    """Do what a rank does once its device has copied the tensors."""
    memory = agents.tiers[rank].memory.of(rank)
    host_memory.put_word(memory, host_memory.READY, 1)
    host: Any = SimpleNamespace(device=None)
    history: Any = None
    snapshots = Snapshots(
        SnapshotRule(memory, members=members),
        identity=Identity("job", "", 2, rank, 0 if members else rank, 1 if members else 2),
        timeline="first",
        host=host,
        history=history,
        write_word=lambda *_: None,
        warn=pytest.fail,
    )
    shared: Any = SimpleNamespace(all_tensors=every_kind)
    tensors = snapshots._of_replicas(shared)
    size = sum(shard.aligned(tensor.nbytes) for tensor in tensors.values())
    slot = snapshots._slot = STEP % 2
    mapped = mmap.mmap(memory, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, offset=host_memory.data_place(slot))
    room = snapshots._room.by_slot[slot] = torch.frombuffer(mapped, dtype=torch.uint8)
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at = sum(shard.aligned(one.nbytes) for one in copies.values())
        copies[name] = _laid_out_as(room[at : at + tensor.nbytes].view(tensor.dtype), tensor)
        copies[name].copy_(tensor)
    begun: Any = SimpleNamespace(step=STEP, copies=copies, own={})
    snapshots._put_in(begun, {"strides": dict(others_than_rows(every_kind()))}, {})


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(tmp_path), len(RANKS))
    yield found
    found.close()


@pytest.mark.parametrize(("text", "members"), [("peer", ()), ("sharded+peer=2", RANKS)])
def test_every_kind_comes_back_from_another_host(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, text: str, members: tuple[int, ...]
) -> None:
    monkeypatch.setattr("jitckpt.worker.saving.snapshots.as_it_is", lambda identity, _: identity)
    wanted = replace(tier(text), limit=1 << 30)
    agents.tiers = [MemoryTier(wanted, agents.job, EventLog()) for _ in RANKS]
    agents.meet()
    for rank in RANKS:
        snapshot(agents, rank, members)
    agents.until_safe(STEP)
    agents.tiers[0].memory.close()
    agents.meet()
    agents.gather()
    for rank in RANKS:
        one = agents.tiers[rank]
        _, state = own_shard.read(one.memory.of(rank), STEP, one.whole(rank))
        strides: Any = state.document["strides"]
        found = all_laid_out(state.tensors, strides)
        expected = every_kind()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert name == "expanded" or found[name].stride() == tensor.stride(), name
            assert torch.equal(bits(found[name]), bits(tensor)), name
