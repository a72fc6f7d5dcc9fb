"""The training of beside_others.py: FSDP2 full shard, without replicas, each rank's part kept by the other.

usage: beside_others_training.py none|jitckpt|lm-resiliency|nvrx EVERY STEPS KILLED-AT FOLDER

Steps are counted from 1. At the step KILLED-AT of the first start rank 1 sends itself SIGKILL; 0: at none.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, BATCH, LAYERS = 1024, 128, 6

Save = Callable[[int], None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor."""
    return tensor.detach().to_local()  # type: ignore[attr-defined,no-any-return]


def by_nvrx(model: nn.Module, optimizer: torch.optim.Optimizer, every: int, folder: str) -> tuple[int, Save]:
    """Return the step that was done, and what is to be called after each step."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    copies = CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = LocalCheckpointManager(folder, repl_strategy=copies)
    queue = AsyncCallsQueue(persistent=False)  # the other kind can't be used with copies, says its example

    def tensors() -> list[torch.Tensor]:
        found = [local(parameter) for parameter in model.parameters()]
        for state in optimizer.state.values():
            found += [local(state["exp_avg"]), local(state["exp_avg_sq"])]
        return found

    def save(step: int) -> None:
        queue.maybe_finalize_async_calls(blocking=step % every == 0, no_dist=False)
        if step % every == 0:
            kept = BasicTensorAwareStateDict({"tensors": tensors()})
            queue.schedule_async_request(manager.save(kept, step, is_async=True))

    done = manager.find_latest()
    if done == -1:
        return 0, save
    for parameter in model.parameters():
        state = {"step": torch.tensor(float(done))}
        optimizer.state[parameter] = state | {
            name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
        }
    kept, _ = manager.load()
    with torch.no_grad():
        for mine, saved in zip(tensors(), kept.state_dict["tensors"], strict=True):
            mine.copy_(saved)
    return done, save


def by_lm_resiliency(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, folder: str
) -> tuple[int, Callable[[], None]]:
    """Return the step that was done, and what is to be called at the end."""
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    # What it has in memory ends with the workers; without files a SIGKILL would lose all.
    config = InMemoryCkptConfig(
        enable=True,
        interval=every,
        replication_jump=1,
        disk_flush_interval=every,
        disk_folder=folder,
        run_id="beside-others",
    )
    handle = enable_resiliency(model, optimizer, interval=every, enable_detection=False, checkpoint=config)
    return max(0, handle.recovered_step), handle.close


def main() -> None:
    way, every, steps, killed_at = sys.argv[1], *map(int, sys.argv[2:5])
    folder = Path(sys.argv[5])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    save: Save = lambda step: None  # noqa: E731
    close: Callable[[], None] = lambda: None  # noqa: E731
    iterations: Iterable[int] | None = None
    if way == "jitckpt":
        import jitckpt

        iterations = jitckpt.init(model=model, optimizer=optimizer).steps(steps)
    elif way == "lm-resiliency":
        done, close = by_lm_resiliency(model, optimizer, every, str(folder / "kept"))
    elif way == "nvrx":
        done, save = by_nvrx(model, optimizer, every, str(folder / "kept"))
    times: list[tuple[int, float, float]] = []
    started = folder / "killed"
    for step in iterations or range(done, steps):
        began = time.perf_counter()
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank)).cuda()
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        if step + 1 == killed_at and rank == 1 and not started.exists():
            started.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        save(step + 1)
        torch.cuda.synchronize()
        times.append((step + 1, time.perf_counter() - began, time.time()))
    if rank == 0:
        sums = [local(parameter).double().sum().item() for parameter in model.parameters()]
        print(f"measured {json.dumps({'times': times, 'end': float(sum(sums)).hex()})}\n", end="", flush=True)
    dist.barrier()
    close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
