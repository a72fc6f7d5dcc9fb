"""Every way of training in parallel, on softgpu with NCCL and on the CPU with gloo: the same numbers?

Eight ranks, forked from one process that has imported torch, do each on both devices. All groups that sum
have two ranks, whose sum has only one order, so the numbers must be the same bits. Prints as JSON, for each
tool, on which ranks they are.
"""

import ctypes
import json
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT, VOCABULARY, Block, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, PARTS = 8, 3, 4

SINGLE = MixedPrecisionPolicy()

Numbers = list[Tensor]


class Work:
    """One rank's devices and groups: a mesh of (pipeline, data, tensor), and pairs of neighbours."""

    def __init__(self, kind: str, rank: int) -> None:
        self.rank = rank
        self.device = torch.device(f"cuda:{rank}" if kind == "cuda" else "cpu")
        self.mesh = init_device_mesh(kind, (2, 2, 2), mesh_dim_names=("pipeline", "data", "tensor"))
        self.pair = self.mesh["tensor"]

    def batch(self, step: int, of: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch("gpt", torch.Generator().manual_seed(100 * step + of))
        return inputs.to(self.device), targets.to(self.device)


def gpt(work: Work) -> GPT:
    torch.manual_seed(0)
    return GPT(width=16, heads=2).to(work.device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def numbers(model: nn.Module) -> Numbers:
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [parameter.detach().cpu().clone() for parameter in parameters]


def train(
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    of: int | None = None,
    largest_norm: float | None = None,
) -> Numbers:
    losses = []
    for step in range(STEPS):
        loss = model(*work.batch(step, work.rank if of is None else of))
        optimizer.zero_grad()
        loss.backward()
        if largest_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *numbers(model)]


# ---- torch's own tools, one a function: each returns numbers of the finished training ----


def data_parallel(work: Work, bucket_view: bool = False, static_graph: bool = False) -> Numbers:
    model = DistributedDataParallel(
        gpt(work),
        process_group=work.pair.get_group(),
        gradient_as_bucket_view=bucket_view,
        static_graph=static_graph,
    )
    return train(work, model, adamw(model))


class Branches(nn.Module):
    """Each step leaves one of two branches without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.branches = nn.ModuleList(nn.Linear(16, VOCABULARY) for _ in range(2))
        self.calls = 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        found = self.branches[self.calls % 2](self.embedding(inputs))
        return F.cross_entropy(found.flatten(0, 1), targets.flatten())


def unused_parameters(work: Work) -> Numbers:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Branches().to(work.device), process_group=work.pair.get_group(), find_unused_parameters=True
    )
    return train(work, model, adamw(model))


def accumulation(work: Work) -> Numbers:
    model = DistributedDataParallel(gpt(work), process_group=work.pair.get_group())
    optimizer = adamw(model)
    for step in range(STEPS):
        with model.no_sync():
            model(*work.batch(step, work.rank)).backward()
        model(*work.batch(step + 50, work.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model)


def zero_redundancy(work: Work) -> Numbers:
    group = work.pair.get_group()
    model = DistributedDataParallel(gpt(work), process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2, foreach=False
    )
    return train(work, model, optimizer)


def shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = SINGLE) -> None:
    made = fully_shard(module, mesh=mesh, mp_policy=policy)
    if mesh.device_type == "cpu":  # gloo has no mean; with two ranks a sum and a half are the same
        made.set_force_sum_reduction_for_comms(True)


def sharded(work: Work) -> Numbers:
    """FSDP2 on four ranks: two replicas of two shards."""
    mesh = work.mesh["data", "tensor"]
    model = gpt(work)
    for part in (*model.blocks, model):
        shard(part, mesh)
    return train(work, model, adamw(model))


def half_precision(work: Work) -> Numbers:
    """FSDP2 with half precision parameters and single precision gradients, clipped by their common norm."""
    torch.manual_seed(0)
    model = Branches().to(work.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, work.pair, policy)
    return train(work, model, adamw(model), largest_norm=0.1)


def hybrid_sharded(work: Work) -> Numbers:
    """FSDP1 on four ranks: two replicas of two shards."""
    model = FullyShardedDataParallel(
        gpt(work),
        device_mesh=work.mesh["data", "tensor"],
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=work.device,
    )
    return train(work, model, adamw(model))


BLOCK_PLAN = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}


def tensor_parallel(work: Work) -> Numbers:
    model = gpt(work)
    for block in model.blocks:
        parallelize_module(block, work.pair, BLOCK_PLAN)
    return train(work, model, adamw(model), of=0)


class Stage(nn.Module):
    """One of `count` parts of a model: an embedding at the start, a block, a head at the end."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embedding = nn.Embedding(VOCABULARY, 16) if index == 0 else nn.Identity()
        self.block = Block(16, 2)
        self.head = nn.Linear(16, VOCABULARY) if index == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.embedding(x)))
        return found


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def run_pipeline(work: Work, stages_per_rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Numbers:
    """A pipeline of two ranks, whose every stage `wrap` makes ready for the other dimensions."""
    line = work.mesh["pipeline"]
    count, first = 2 * stages_per_rank, line.get_local_rank()
    modules = {index: wrap(Stage(index, count).to(work.device)) for index in range(first, count, 2)}
    stages: list[Any] = [  # torch's list of a base class
        PipelineStage(module, index, count, work.device, group=line.get_group())
        for index, module in modules.items()
    ]
    schedule = (
        Schedule1F1B(stages[0], PARTS, loss_fn=loss_of)
        if stages_per_rank == 1
        else ScheduleInterleaved1F1B(stages, PARTS, loss_fn=loss_of)
    )
    optimizers = [adamw(module) for module in modules.values()]
    losses: list[Tensor] = []
    for step in range(STEPS):
        data = work.batch(step, work.mesh["data"].get_local_rank())
        inputs, targets = (tensor.contiguous() for tensor in data)  # as a pipeline wants them
        if first == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = [number for module in modules.values() for number in numbers(module)]
    return [*(loss.detach().cpu() for loss in losses), *trained]


def pipeline(work: Work) -> Numbers:
    return run_pipeline(work, 1, lambda stage: stage)


def interleaved_pipeline(work: Work) -> Numbers:
    return run_pipeline(work, 2, lambda stage: stage)


def three_dimensions(work: Work) -> Numbers:
    """Pipeline x data (FSDP2) x tensor, two ranks each."""

    def wrap(stage: nn.Module) -> nn.Module:
        plan = {f"block.{name}": how for name, how in BLOCK_PLAN.items()}
        parallelize_module(stage, work.mesh["tensor"], plan)
        shard(stage, work.mesh["data"])
        return stage

    return run_pipeline(work, 1, wrap)


TOOLS: dict[str, Callable[[Work], Numbers]] = {
    "ddp": data_parallel,
    "ddp, gradient_as_bucket_view": lambda work: data_parallel(work, bucket_view=True),
    "ddp, static_graph": lambda work: data_parallel(work, static_graph=True),
    "ddp, find_unused_parameters": unused_parameters,
    "ddp, no_sync": accumulation,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "fsdp2, replicate and shard": sharded,
    "fsdp2, half precision, clipped": half_precision,
    "fsdp1, HYBRID_SHARD": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "pipeline, 1F1B": pipeline,
    "pipeline, interleaved": interleaved_pipeline,
    "pipeline x data x tensor": three_dimensions,
}


def eight_in_order(host: Work, work: Work) -> bool:
    """Whether DDP of all ranks gives what one process gives that adds their gradients in rank order."""
    model = DistributedDataParallel(gpt(work), process_group=dist.group.WORLD)
    together = train(work, model, adamw(model))[STEPS:]
    alone = gpt(host)
    optimizer = adamw(alone)
    for step in range(STEPS):
        gradients = [
            torch.autograd.grad(alone(*host.batch(step, rank)), list(alone.parameters()))
            for rank in range(RANKS)
        ]
        for parameter, *parts in zip(alone.parameters(), *gradients, strict=True):
            total = parts[0] / RANKS
            for part in parts[1:]:
                total = total + part / RANKS
            parameter.grad = total
        optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(together, numbers(alone), strict=True))


def run_rank(rank: int, store: str, report: Connection) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # a hung rank must not outlive the test
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    works = [Work(kind, rank) for kind in ("cpu", "cuda")]
    equal = {}
    for name, tool in TOOLS.items():
        expected, actual = (tool(work) for work in works)
        equal[name] = len(expected) == len(actual) > STEPS and all(map(torch.equal, expected, actual))
    equal["eight ranks in order"] = eight_in_order(*works)
    report.send(equal)
    dist.destroy_process_group()


def main() -> None:
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks, reports = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            reports.append(ours)
            arguments = rank, os.path.join(folder, "store"), theirs
            ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
            ranks[-1].start()
            theirs.close()
        found: list[dict[str, bool]] = [report.recv() for report in reports]
        for process in ranks:
            process.join()
    print(json.dumps({name: [answers[name] for answers in found] for name in found[0]}))


if __name__ == "__main__":
    main()
