"""How much shorter zstd makes the way of a process's images to another host, on links of several speeds.

    python scripts/bench/packed_images.py [--pairs 5] [--parameters-mb 64] [--json]

The images are the writable pages of a process that has loaded torch, and holds a loader's batches and
parameters of noise on the host. They go as a move of a host sends them, no faster than so many bytes a
second; each pair is without zstd and with it, in turn. Needs the package zstandard.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from jitckpt.agent.migration.image_transfer import send_file
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.standby import _receive_files
from jitckpt.hosts import visiting
from jitckpt.wire.moves import Whole

SO_MAX_PACING_RATE = 47  # from asm-generic/socket.h: bytes a second
PATIENCE = 60.0  # seconds with one that sends nothing
LINKS = {"1 Gbit/s": 125e6, "2.5 Gbit/s": 312e6, "10 Gbit/s": 1.25e9, "as fast as it goes": float("inf")}


def pages(parameters_mb: int, path: Path) -> int:
    """Write the writable pages of this process to a file, without empty ones; return how much it was."""
    kept = [torch.randn(1 << 18) for _ in range(parameters_mb)]
    batches = [torch.randint(0, 50_000, (64, 1024)) for _ in range(16)]
    with (
        Path("/proc/self/maps").open() as maps,
        open("/proc/self/mem", "rb") as memory,
        path.open("wb") as file,
    ):
        for line in maps:
            where, rights, *_ = line.split()
            begin, end = (int(one, 16) for one in where.split("-"))
            if rights.startswith("rw") and "[v" not in line:
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(begin)
                    while begin < end:
                        piece = memory.read(min(end - begin, 1 << 12))
                        begin += 1 << 12
                        if piece.strip(b"\0"):
                            file.write(piece)
    del kept, batches
    return path.stat().st_size


async def seconds(path: Path, rate: float, packs: bool) -> tuple[float, int]:
    """Return how long the way of a file takes, and the bytes that zstd has taken off."""
    came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory(dir=path.parent) as there:
        rank: Any = SimpleNamespace(images=os.open(there, os.O_RDONLY), ring=-1)

        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _receive_files(reader, writer, {1: rank}, PATIENCE)
            came.set_result(None)
            writer.close()

        server = await asyncio.start_server(called, "127.0.0.1")
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            if rate < float("inf"):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate))
            packer, began = Packer(packs), time.monotonic()
            with path.open("rb") as file:
                await send_file(writer, 1, "pages-1.img", file.fileno(), packer)
            writer.write(visiting.encode(Whole()))
            await came
            took = time.monotonic() - began
            writer.close()
        os.close(rank.images)
    return took, packer.saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--parameters-mb", type=int, default=64, help="of the process, on the host")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages"
        size = pages(options.parameters_mb, path)
        for name, rate in LINKS.items():
            without, packed, saved = [], [], 0
            for _ in range(options.pairs):
                without.append(asyncio.run(seconds(path, rate, False))[0])
                took, saved = asyncio.run(seconds(path, rate, True))
                packed.append(took)
            found[name] = {
                "without_s": statistics.median(without),
                "packed_s": statistics.median(packed),
                "ratio": statistics.median(b / a for a, b in zip(without, packed, strict=True)),
                "left": 1 - saved / size,
            }
    if options.json:
        print(json.dumps({"bytes": size, "links": found}))
        return
    print(f"{size / 1e6:.0f} MB of pages; median seconds without zstd, with it, and of the pairs' ratios:")
    for name, one in found.items():
        print(
            f"  {name:20} {one['without_s']:6.2f} {one['packed_s']:6.2f} {one['ratio']:5.2f}  "
            f"{one['left']:.0%} of the bytes went"
        )


if __name__ == "__main__":
    main()
