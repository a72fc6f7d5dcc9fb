"""What jitckpt does on the host in each optimizer step of a GPT with 100 parameters: median in microseconds.

jitckpt exec --device softgpu --devices 1 -- python scripts/bench/host_state.py

On the host alone the optimizer's tensors are copied in each step, which no protected job does.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from jitckpt.bindings.interpose import Native
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import HostState
from jitckpt.worker.saving.history import History


def gpt(layers: int, width: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Embedding(100, width), nn.TransformerEncoder(block, layers), nn.Linear(width, 100)
    )


def median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=500)
    args = parser.parse_args()
    on_device = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_device else None
    model = gpt(args.layers, 64).to(device or "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    host = HostState(
        model=model, optimizers=[optimizer], schedulers=[scheduler], scaler=None, extra=None, device=device
    )
    ring = Ring(local_state.create(), Identity("j", "f", 1, 0, 0, 1), 10, 64 << 20)
    recorder = Recorder(ring, Native().write_area if on_device else lambda *_: None, print)
    history = History(host)
    step = 0

    def whole_step() -> None:
        nonlocal step
        step += 1
        history.settle(step - 1)
        recorder.write(step, final=False, parts=host.local())
        recorder.write(step, final=True, parts=host.local())
        history.add(step, host.shared())
        history.forget_before(step - 8)

    for name, call in {
        "random numbers and buffers taken": host.local,
        "... and written to the ring": lambda: recorder.write(1, final=True, parts=host.local()),
        "optimizer, groups, scheduler taken": host.shared,
        "groups and scheduler taken again": host.progress,
        "all of a step (forward hook, step hook, settling)": whole_step,
    }.items():
        median_us(call, 20)
        print(f"{name:50} {median_us(call, args.repeats):8.0f} us")
    print(f"parameters: {len(list(model.parameters()))}, device: {device}")


if __name__ == "__main__":
    main()
