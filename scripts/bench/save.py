"""The built-in saver beside plain write() and torch.save, of as many bytes into the same folder.

    .venv/bin/jitckpt exec --device softgpu -- .venv/bin/python scripts/bench/save.py [--folder DIR]

A model's worth of tensors on the device goes into a file that is brought to the disk (fsync). `write` is the
bound: write() of the same bytes, which lie in host memory already. Medians of alternating runs, and ratios
of speeds.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from jitckpt.encoding import tensor_file
from jitckpt.encoding.staging import Staging
from jitckpt.saves.folders import HashedFile

PIECE_BYTES = 16 << 20


def plain_write(path: Path, content: memoryview) -> None:
    with open(path, "xb", buffering=0) as file:
        for begin in range(0, len(content), PIECE_BYTES):
            file.write(content[begin : begin + PIECE_BYTES])
        os.fsync(file.fileno())


def built_in(path: Path, tensors: dict[str, Tensor], staging: Staging) -> None:
    with HashedFile(path) as file:
        tensor_file.write(file.append, tensors, staging, file.show)


def torch_save(path: Path, tensors: dict[str, Tensor]) -> None:
    with open(path, "xb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def seconds(save: Callable[[Path], None], folder: str) -> float:
    path = Path(folder, "save")
    begun = time.perf_counter()
    save(path)
    took = time.perf_counter() - begun
    path.unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of ways to save.")
    parser.add_argument("--folder", default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--mib", type=int, default=512, help="how much (default 512)")
    parser.add_argument("--runs", type=int, default=7, help="of each (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    # As a GPT's: large matrices, and small vectors between them.
    tensors = {f"matrix{index}": torch.randn(1024, 1024, device="cuda") for index in range(args.mib // 4)}
    tensors |= {f"vector{index}": torch.randn(1024, device="cuda") for index in range(args.mib // 4)}
    on_host = torch.cat([tensor.cpu().flatten() for tensor in tensors.values()]).view(torch.uint8)
    size = on_host.numel()
    staging = Staging(pinned=True)
    ways: dict[str, Callable[[Path], None]] = {
        "write": lambda path: plain_write(path, on_host.numpy().data),
        "jitckpt": lambda path: built_in(path, tensors, staging),
        "torch.save": lambda path: torch_save(path, tensors),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for _ in track(range(args.runs), "saving", console=Console(stderr=True)):
            for name, way in ways.items():
                found[name].append(seconds(way, folder))
    speed = {name: size / statistics.median(times) for name, times in found.items()}
    ratios = {
        name: statistics.median(w / t for w, t in zip(found["write"], times, strict=True))
        for name, times in found.items()
    }
    if args.json:
        print(
            json.dumps({name: {"bytes_per_second": speed[name], "of_write": ratios[name]} for name in ways})
        )
        return
    table = Table("", "GB/s", "of plain write()")
    for name in ways:
        table.add_row(name, f"{speed[name] / 1e9:.2f}", f"{ratios[name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
