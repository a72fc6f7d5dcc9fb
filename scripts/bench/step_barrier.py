"""What the step barrier costs: optimizer steps with and without it, in turn.

    jitckpt run --standalone --device softgpu --nproc-per-node 4 scripts/bench/step_barrier.py

Rank 0 prints the medians over the rounds: of a step, and of the host's part of the barrier alone.
"""

import os
import statistics
import time

import torch
from torch import distributed, nn

from jitckpt.state.parallel import DeviceBarrier

ROUNDS, STEPS = 15, 40


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 256, device="cuda")
    barrier = DeviceBarrier()
    hosts: list[float] = []

    def seconds_per_step(with_barrier: bool) -> float:
        torch.cuda.synchronize()
        distributed.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            model(batch).square().mean().backward()
            if with_barrier:
                before = time.perf_counter()
                barrier.enqueue()
                hosts.append(time.perf_counter() - before)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    seconds_per_step(True)
    hosts.clear()
    pairs = [(seconds_per_step(False), seconds_per_step(True)) for _ in range(ROUNDS)]
    if distributed.get_rank() == 0:
        without, with_it = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = statistics.median(b - a for a, b in pairs)
        print(f"a step without the barrier: {without * 1e3:.3f} ms, with it: {with_it * 1e3:.3f} ms")
        print(f"median of the differences of {ROUNDS} pairs: {more * 1e6:.0f} us a step")
        print(f"the host's part of a barrier: {statistics.median(hosts) * 1e6:.0f} us")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
