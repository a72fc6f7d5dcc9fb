"""What copies from pinned memory to the device cost, in minibatches that the device proxy keeps.

    jitckpt exec --device softgpu --proxy -- python scripts/bench/pinned_copies.py

For each length: how long the caller is in the call, and how long until the device is through with all copies
of a minibatch, both for one copy; medians over minibatches, in microseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import torch


def measure(length: int, copies: int, minibatches: int) -> tuple[float, float]:
    """Microseconds of one copy of so many bytes: for the caller, and until it is over."""
    keep = ctypes.CDLL(None).jitckpt_proxy_keep
    pinned = torch.zeros(length, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(length, dtype=torch.uint8, device="cuda")
    calls, all_over = [], []
    for _ in range(minibatches):
        if keep() != 0:
            raise RuntimeError("The device proxy does not keep this minibatch: start it with --proxy.")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(copies):
            device.copy_(pinned, non_blocking=True)
        told = time.perf_counter()
        torch.cuda.synchronize()
        calls.append((told - begun) / copies * 1e6)
        all_over.append((time.perf_counter() - begun) / copies * 1e6)
    return statistics.median(calls), statistics.median(all_over)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=int, default=20, help="in a minibatch")
    parser.add_argument("--minibatches", type=int, default=30)
    options = parser.parse_args()
    for length in (64, 4096, 65536, 1 << 20, 1 << 23):
        call, over = measure(length, options.copies if length < 1 << 22 else 4, options.minibatches)
        print(f"{length} bytes: {call:.1f} us for the caller, {over:.1f} us until it is over")


if __name__ == "__main__":
    main()
