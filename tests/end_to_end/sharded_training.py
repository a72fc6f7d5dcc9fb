"""Trainings whose state is spread over ranks, run by test_shards.py under `jitckpt run`.

usage: sharded_training.py FORM... [--unprotected] [--save-every N] [--pause SECONDS] [--until-safe]
                           [--steps N] [--memory TIER] [--dies-in STEP] [--dies-with FILE] [--state FILE]
                           [--stays-for FILE] [--counts FOLDER] [--waits-in STEP]

Each rank prints a digest of what it holds in the end: parameters, optimizer state, random numbers.
"""

import argparse
import hashlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from coded import CodedMomentum, inner_of
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import jitckpt
from jitckpt.events import read_events
from jitckpt.tiers import host_memory
from jitckpt.worker.protection import Protection

PATIENCE = 60.0  # seconds, for a snapshot to be whole everywhere
STEPS, BATCH, MICROBATCHES, INPUTS, OUTPUTS = 8, 8, 2, 8, 6


@dataclass
class Training:
    """`model`: what jitckpt is given. `backward`: the forward and backward pass of one batch."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    backward: Callable[[Tensor, Tensor], object]
    data_index: int  # ranks of one index get the same batches


def body() -> nn.Sequential:
    width = int(os.environ.get("WIDTH", "16"))
    layers = [nn.Linear(INPUTS, width), nn.GELU(), nn.Linear(width, width), nn.Dropout(0.2)]
    layers.append(nn.Linear(width, OUTPUTS))
    return nn.Sequential(*layers).to("cuda")


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, : output.shape[1]]).square().mean()


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def simple(model: nn.Module, optimizer: torch.optim.Optimizer, data_index: int) -> Training:
    def backward(batch: Tensor, target: Tensor) -> None:
        loss(model(batch), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return Training(model, [optimizer], backward, data_index)


def fsdp2() -> Training:
    """Two shards, two replicas of each; one layer can't be cut evenly."""
    return hybrid(mesh_of(replicate=2, shard=2))


def side_by_side() -> Training:
    """The same with replicas that follow each other: ranks 0 and 1, and 2 and 3; with six the first three."""
    count = dist.get_world_size() // 2
    ranks = [[rank, rank + count] for rank in range(count)]
    return hybrid(DeviceMesh("cuda", ranks, mesh_dim_names=("replicate", "shard")))


def hybrid(mesh: DeviceMesh) -> Training:
    model = body()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return simple(model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True), dist.get_rank())


def mixed() -> Training:
    """The same with passes and sums of half precision, two micro-batches, and activations computed again."""
    mesh = mesh_of(replicate=2, shard=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = body()
    for number in (0, 2):  # each with what follows it: random numbers, too, are to be drawn as they were
        part = checkpoint_wrapper(nn.Sequential(model[number], model[number + 1]))
        fully_shard(part, mesh=mesh, mp_policy=policy)
        model[number], model[number + 1] = part, nn.Identity()
    whole = fully_shard(model, mesh=mesh, mp_policy=policy)

    def backward(batch: Tensor, target: Tensor) -> None:
        for micro, (inputs, wanted) in enumerate(zip(batch.chunk(2), target.chunk(2), strict=True)):
            whole.set_requires_gradient_sync(micro == 1)
            (loss(model(inputs).float(), wanted) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return Training(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], backward, dist.get_rank())


def full() -> Training:
    """As many shards as ranks: no replica anywhere."""
    model = body()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return simple(model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True), dist.get_rank())


class Kinds(nn.Module):
    """Buffers of types and forms that parameters seldom have; each changes in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8):
            self.add(dtype, torch.zeros(5, dtype=torch.uint8, device="cuda").view(dtype))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
            self.add(dtype, torch.zeros(3, dtype=dtype, device="cuda"))
        self.add("one number", torch.zeros((), device="cuda"))
        self.add("empty", torch.zeros(0, 3, device="cuda"))
        self.add("turned", torch.zeros(5, 3, device="cuda").t())
        self.add("with gaps", torch.zeros(4, 6, device="cuda")[:, :2])

    def add(self, kind: object, buffer: Tensor) -> None:
        self.register_buffer(f"kind {str(kind).removeprefix('torch.')}", buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for buffer in self.buffers():
                if buffer.dtype == torch.bool:
                    buffer.logical_not_()
                elif buffer.dtype.itemsize == 1:
                    buffer.view(torch.uint8).add_(3)
                elif buffer.is_complex():
                    torch.view_as_real(buffer).add_(1.5)
                else:
                    buffer.add_(1)
        return inputs


def kinds() -> Training:
    """The same with buffers of all kinds."""
    training = full()
    assert isinstance(training.model, nn.Sequential)
    training.model.append(Kinds())
    return training


def coded() -> Training:
    """Shards and replicas as of fsdp2, and an optimizer whose state has codes and scales in DTensors."""
    return with_codes(hybrid(mesh_of(replicate=2, shard=2)))


def coded_full() -> Training:
    """The same with as many shards as ranks."""
    return with_codes(full())


def coded_plain() -> Training:
    """DDP, and the same optimizer."""
    return with_codes(plain())


def with_codes(training: Training) -> Training:
    training.optimizers = [CodedMomentum(training.model.parameters())]
    return training


def flat() -> Training:
    """As many shards as ranks by the older wrapper, whose flat parameters the optimizer has."""
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(body(), auto_wrap_policy=policy, use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward(batch: Tensor, target: Tensor) -> None:
        loss(model(batch), target).backward()
        model.clip_grad_norm_(0.5)

    return Training(model, [optimizer], backward, dist.get_rank())


def narrow() -> Training:
    """The same where all ranks but the first have no row of the last layer."""
    layers = [nn.Linear(INPUTS, 16), nn.GELU(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers).to("cuda")
    fully_shard(model)
    return simple(model, torch.optim.AdamW(model.parameters(), lr=0.01), dist.get_rank())


def fsdp1() -> Training:
    """The same by the older wrapper."""
    mesh = mesh_of(replicate=2, shard=2)
    model = FullyShardedDataParallel(
        body(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward(batch: Tensor, target: Tensor) -> None:
        loss(model(batch), target).backward()
        model.clip_grad_norm_(0.5)

    return Training(model, [optimizer], backward, dist.get_rank())


def tensor() -> Training:
    """Tensor parallel layers, replicated by hand: all-reduced gradients, no wrapper that says so."""
    mesh = mesh_of(data=2, tensor=2)
    model = body()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # plain parameters and DTensors

    def backward(batch: Tensor, target: Tensor) -> None:
        loss(model(batch), target).backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            part = getattr(gradient, "_local_tensor", gradient)
            dist.all_reduce(part, op=dist.ReduceOp.AVG, group=mesh["data"].get_group())

    return Training(model, [optimizer], backward, mesh["data"].get_local_rank())


def pipeline() -> Training:
    """Two stages, whose parameters have the same names, with an optimizer for each half of them."""
    return pipelined(mesh_of(data=2, stage=2))


def stages() -> Training:
    """Two stages and no replica."""
    return pipelined(mesh_of(data=1, stage=2))


def three() -> Training:
    """FSDP2, pipeline and tensor parallel together, on eight ranks: four shards, two replicas of each."""
    return pipelined(mesh_of(data=2, whole=1, stage=2, tensor=2))


def pipelined(mesh: DeviceMesh) -> Training:
    index = mesh["stage"].get_local_rank()
    layers = list(body())
    model = nn.Sequential(*(layers[:2] if index == 0 else layers[2:]))
    module: nn.Module = model
    if "tensor" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["data", "whole"])
    else:
        module = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    # With shapes given: to infer them a stage makes a forward pass at each start, which draws random numbers.
    linear: Any = model[0]
    width = linear.out_features if index == 0 else linear.in_features
    sizes = (INPUTS, width, OUTPUTS)
    shapes = [torch.empty(BATCH // MICROBATCHES, size, device="cuda") for size in sizes]
    stage = PipelineStage(
        module,
        index,
        2,
        torch.device("cuda"),
        input_args=shapes[index],
        output_args=shapes[index + 1],
        group=mesh["stage"].get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    parameters = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters[:1], lr=0.01),
        torch.optim.SGD(parameters[1:], lr=0.01, momentum=0.9),
    ]

    def backward(batch: Tensor, target: Tensor) -> None:
        schedule.step(batch) if index == 0 else schedule.step(target=target)

    return Training(model, optimizers, backward, mesh["data"].get_local_rank())


def zero() -> Training:
    """Optimizer state of which each rank has a fourth."""
    model = DistributedDataParallel(body())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return simple(model, optimizer, dist.get_rank())


def replicated() -> Training:
    """DDP: nothing is cut. Two layers share a weight, one has buffers."""
    layers = [nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.Linear(16, OUTPUTS)).to("cuda")
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return simple(DistributedDataParallel(model), optimizer, dist.get_rank())


def plain() -> Training:
    """DDP with the model and the optimizer of fsdp2 and full."""
    model = body()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    return simple(DistributedDataParallel(model), optimizer, dist.get_rank())


FORMS = {
    one.__name__: one
    for one in (
        *(
            replicated,
            plain,
            fsdp2,
            side_by_side,
            mixed,
            full,
            kinds,
            coded,
            coded_full,
            coded_plain,
            flat,
            narrow,
        ),
        *(fsdp1, tensor, pipeline, stages, three, zero),
    )
}


class Batches:
    """Drawn at random; its state is how many it gave."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.given += 1
        data = torch.randn(BATCH, INPUTS + OUTPUTS).add_(random.random()).to("cuda", non_blocking=True)
        return data[:, :INPUTS].contiguous(), data[:, INPUTS:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def digest(training: Training) -> str:
    found = hashlib.sha256()

    def add(tensor: Tensor) -> None:
        for part in inner_of(tensor):
            found.update(f"{part.dtype} {part.shape} {part.stride()}".encode())
            found.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    for one in (*training.model.parameters(), *training.model.buffers()):
        add(one)
    for optimizer in training.optimizers:
        inner = getattr(optimizer, "optim", optimizer)
        for state in inner.state.values():
            for _, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    add(value)
    add(torch.rand(3))
    add(torch.rand(3, device="cuda"))
    return found.hexdigest()


def wait_for_memory(job: jitckpt.Job, start: int, step: int) -> None:
    """Wait for the snapshot of `step`, which is written once the forward pass of the next one has begun."""
    if step == start:
        return
    assert isinstance(job._protection, Protection)
    snapshots = job._protection._savers.snapshots
    assert snapshots is not None
    memory = snapshots._memory
    until = time.monotonic() + PATIENCE
    while host_memory.word(memory, host_memory.SAFE) < step:
        assert time.monotonic() < until, f"The snapshot of step {step} is not safe."
        time.sleep(0.001)


def die_with(file: Path, rank: int) -> None:
    """Die, once, as the file comes, and leave another one that tells of it."""
    mark = file.with_name(f"{file.name}-{rank}")
    while not mark.exists():
        if file.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)


def count(step: int, rank: int, options: argparse.Namespace) -> None:
    """Note that a minibatch is made; in the middle of one wait, once, until the file "goes-on" is there."""
    with (options.counts / f"rank-{rank}").open("a") as file:
        file.write(f"{step}\n")
    if step == options.waits_in:
        (options.counts / f"waits-{rank}").touch()
        while not (options.counts / "goes-on").exists():
            time.sleep(0.001)


def wait_for_saves(step: int) -> None:
    """Wait until each rank has written its periodic save of this step, beside the training."""
    saved: set[int] = set()
    while len(saved) < dist.get_world_size():
        events, _ = read_events(Path("ckpt"))
        saved = {one["rank"] for one in events if (one["event"], one.get("step")) == ("periodic_save", step)}
        time.sleep(0.01)


def train(form: str, options: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    training = FORMS[form]()
    torch.manual_seed(1 + training.data_index)
    random.seed(1 + training.data_index)
    batches = Batches()
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.9) for one in training.optimizers]
    start = 0
    if not options.unprotected:
        job = jitckpt.init(
            model=training.model,
            optimizer=training.optimizers,
            scheduler=schedulers,
            extra=batches,
            save_every=options.save_every,
            memory=options.memory,
        )
        start = job.restore()
        if options.until_safe:
            forward = itertools.count(start)
            training.model.register_forward_hook(lambda *_: wait_for_memory(job, start, next(forward)))
    for step in range(start, options.steps):
        while step + 1 == options.steps and options.stays_for and not options.stays_for.exists():
            time.sleep(0.01)
        batch, target = batches.next()
        time.sleep(options.pause)
        training.backward(batch, target)
        if options.counts:
            count(step + 1, rank, options)
        if (step + 1, rank) == (options.dies_in, 1):
            if options.save_every:
                wait_for_saves(step // options.save_every * options.save_every)
            os.kill(os.getpid(), signal.SIGKILL)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        torch.cuda.synchronize()  # else a rank may be killed while the devices are still in the first step
    if options.state:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(training.model, training.optimizers, options=whole)
        if rank == 0:
            torch.save({"model": model, "optim": optim}, options.state)
    print(f"{form} rank {rank} {digest(training)} {batches.given}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("forms", nargs="+", choices=FORMS)
    parser.add_argument("--unprotected", action="store_true")
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--memory", metavar="TIER", help="of the memory tier")
    parser.add_argument("--dies-in", type=int, metavar="STEP", help="rank 1 does, in each start")
    parser.add_argument("--dies-with", type=Path, metavar="FILE", help="each rank does, once it is there")
    parser.add_argument("--state", metavar="FILE", help="put torch's own state dicts there in the end")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each minibatch")
    parser.add_argument("--stays-for", type=Path, metavar="FILE", help="make no last step before it is there")
    parser.add_argument("--until-safe", action="store_true", help="until the last one is in the memory tier")
    parser.add_argument("--counts", type=Path, metavar="FOLDER", help="note each minibatch there")
    parser.add_argument("--waits-in", type=int, metavar="STEP", help='until "goes-on" is there')
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    if options.dies_with:
        threading.Thread(target=die_with, args=(options.dies_with, dist.get_rank()), daemon=True).start()
    for form in options.forms:
        train(form, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
