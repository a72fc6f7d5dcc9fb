"""The training of other_tools.py: windows of steps with snapshots in memory and without, by turns.

usage: other_tools_training.py jitckpt|lm-resiliency|nvrx WINDOWS STEPS-IN-A-WINDOW PAUSE

Each tool keeps each rank's shard in the memory of two hosts after every step of a window with it, as its own
documents have it. PAUSE: seconds of each step in which a device would compute, and here nobody uses a
processor. Rank 0 prints the median of each window's steps.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from windows import Windows, snapshots_in

WIDTH, LAYERS, BATCH = 1024, 6, 16

Save = Callable[[int], None]  # told the step that has ended


def main() -> None:
    windows, pause = Windows(int(sys.argv[2]), int(sys.argv[3])), float(sys.argv[4])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    steps, save = TOOLS[sys.argv[1]](model, optimizer, windows)
    for step in windows.over(steps):
        batch = torch.randn(BATCH, WIDTH, device="cuda")
        optimizer.zero_grad()
        time.sleep(pause)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        if windows.with_it:
            save(step + 1)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"windows {json.dumps(windows.medians)}\n", end="", flush=True)
    dist.barrier()


def _jitckpt(model: nn.Module, optimizer: Optimizer, windows: Windows) -> tuple[Iterable[int], Save]:
    import jitckpt

    job = jitckpt.init(model=model, optimizer=optimizer)
    snapshots_in(windows)
    return job.steps(windows.steps), lambda step: None  # it makes its snapshots by itself


def _lm_resiliency(model: nn.Module, optimizer: Optimizer, windows: Windows) -> tuple[Iterable[int], Save]:
    from lm_resiliency.checkpointing.config import InMemoryCkptConfig
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

    config = InMemoryCkptConfig(interval=1, replication_jump=1, disk_flush_interval=0)
    manager = InMemoryCheckpointManager(config)
    return range(windows.steps), lambda step: manager.save_tensors([*_tensors(model, optimizer)], step)


def _nvrx(model: nn.Module, optimizer: Optimizer, windows: Windows) -> tuple[Iterable[int], Save]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    strategy = CliqueReplicationStrategy.from_replication_params(1, dist.get_world_size())
    manager = LocalCheckpointManager("local", repl_strategy=strategy)  # the bench has it in memory
    queue = AsyncCallsQueue(persistent=False)

    def save(step: int) -> None:
        queue.maybe_finalize_async_calls(blocking=True)
        # A copy: it takes the tensors out of what it is given.
        state = {str(number): one for number, one in enumerate(_tensors(model, optimizer))}
        request = manager.save(BasicTensorAwareStateDict(state), step, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)

    return range(windows.steps), save


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this rank's part of all state."""
    of_optimizer = (value for state in optimizer.state.values() for value in state.values())
    for one in (*model.parameters(), *of_optimizer):
        local = one.to_local() if hasattr(one, "to_local") else one
        if isinstance(local, Tensor):
            yield local.detach().cuda()


TOOLS = {"jitckpt": _jitckpt, "lm-resiliency": _lm_resiliency, "nvrx": _nvrx}

if __name__ == "__main__":
    main()
