"""What the memory tier costs, and how fast it gives back what is lost.

    jitckpt exec --device softgpu -- python scripts/bench/memory_tier.py [--mib 256] [--pairs 5] [--json]

Bytes: as memory_transfer.py has them. Decision: for 1,000 ranks. Step: a training under FSDP2 full shard on
two ranks, in windows with and without snapshots by turns, in the running job.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memory_transfer import bytes_moved

from jitckpt.decisions.sources import Kind, Source, decide

WINDOWS, WINDOW = 12, 20  # of steps
TRAINING = Path(__file__).parent / "memory_tier_training.py"


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def decision(ranks: int = 1000, hosts: int = 125) -> float:
    """Return the seconds that a decision takes, with a host lost and a damaged copy."""
    found = [
        Source(rank, step, kind, "a", (rank + kind) % hosts, 1 << 30)
        for rank in range(ranks)
        for step in (41, 42)
        for kind in (Kind.OWN_MEMORY, Kind.PEER_MEMORY)
        if (rank + kind) % hosts != 7
    ]
    return min(seconds(lambda: decide(range(ranks), found, found[:1])) for _ in range(5))


def step_ratio() -> dict[str, float]:
    """Return the median time of a step with the tier and without, and their ratio, in one running job."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["jitckpt", "run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu"]
        run += ["--warm-spares", "0", "--no-self-check", "--checkpoint-dir", folder, "--memory-tier", "peer"]
        done = subprocess.run(
            [*run, str(TRAINING), str(WINDOWS), str(WINDOW)], capture_output=True, text=True, check=False
        )
    told = re.search(r"^windows (.*)$", done.stdout, re.MULTILINE)
    if told is None:
        raise SystemExit(done.stderr)
    windows: list[float] = json.loads(told[1])
    with_tier, without = windows[::2], windows[1::2]
    ratios = [one / two for one, two in zip(with_tier, without, strict=True)]
    return {
        "with": statistics.median(with_tier),
        "without": statistics.median(without),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of a shard (default 256)")
    parser.add_argument("--pairs", type=int, default=5, help="how often each is done (default 5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    moved = bytes_moved(args.mib << 20, args.pairs)
    decided, step = decision(), step_ratio()
    if args.json:
        print(json.dumps({"bytes_per_second": moved, "decision_seconds": decided, "step": step}))
        return
    for name, rate in moved.items():
        print(f"{name:8} {rate / 1e9:6.2f} GB/s")
    put, hashing = moved["put"] / moved["raw TCP"], moved["xxh3"] / moved["copy"]
    get = moved["get"] / moved["raw TCP"]
    print(f"put / raw TCP {put:.2f}, get / raw TCP {get:.2f}, xxh3 / copy {hashing:.2f}")
    print(f"decision for 1,000 ranks  {1e3 * decided:.1f} ms")
    print(
        f"step {1e3 * step['with']:.2f} ms with, {1e3 * step['without']:.2f} ms without: {step['ratio']:.4f} "
        f"(medians of {WINDOWS // 2} pairs of windows of {WINDOW} steps)"
    )


if __name__ == "__main__":
    main()
