#!/usr/bin/env python3
"""What softgpu adds to torch's CPU backend, per operator: median of paired runs, one after the other.

OMP_NUM_THREADS=1 jitckpt exec --device softgpu -- python scripts/bench/softgpu_operators.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

CALLS, PAIRS = 2000, 15


def seconds_per_call(function: Callable[[], object], device: str) -> float:
    """Time of one call when CALLS of them are issued in a row and waited for at the end."""
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS


def cases(device: str) -> dict[str, Callable[[], object]]:
    small, matrix = torch.ones(16, device=device), torch.ones(32, 32, device=device)
    row = torch.ones(32, device=device)
    many: list[Tensor] = [torch.ones(16, device=device) for _ in range(50)]
    return {
        "add": lambda: small + small,
        "add_": lambda: small.add_(1),
        "mm": lambda: matrix @ matrix,
        "layer_norm": lambda: torch.nn.functional.layer_norm(matrix, (32,), row, row),
        "50 x _foreach_add_": lambda: torch._foreach_add_(many, 1.0),
    }


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "There is no CUDA device: run this with `jitckpt exec --device softgpu -- python ...`."
        )
    print(f"{'operator':>20} {'cpu us':>9} {'softgpu us':>11} {'added us':>9}")
    on_host, on_device = cases("cpu"), cases("cuda")
    with torch.no_grad():
        for name, host_call in on_host.items():
            pairs = [
                (seconds_per_call(host_call, "cpu"), seconds_per_call(on_device[name], "cuda"))
                for _ in range(PAIRS + 1)
            ][1:]
            host, device = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
            added = statistics.median(device_time - host_time for host_time, device_time in pairs) * 1e6
            print(f"{name:>20} {host:9.2f} {device:11.2f} {added:9.2f}")


if __name__ == "__main__":
    main()
