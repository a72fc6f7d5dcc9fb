"""What the memory tier costs, and how fast it gives back what is lost.

    sudo env PATH="$PATH" jitckpt exec --device softgpu -- python scripts/bench/memory_tier.py
        [--mib 256] [--pairs 5] [--windows 12] [--steps 20] [--megabits 200] [--json]

Bytes: as memory_transfer.py has them. Device: a state of 64 tensors into the tier's memory, against one copy
of as many bytes into page-locked memory. Decision: for 1,000 ranks. Step: a training under FSDP2 full shard
with one rank on each of two hosts, network namespaces of this machine, in windows with and without snapshots
by turns in the running job: where idle time suffices, and on a link of so many Mbit/s, where it does not.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from memory_transfer import bytes_moved

from jitckpt.decisions.sources import Kind, Source, decide
from jitckpt.rehearsal.namespaces import namespaces
from jitckpt.tiers import host_memory, shard
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.snapshots import _Room

TRAINING = Path(__file__).parent / "memory_tier_training.py"
MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
HOSTS, TENSORS = 2, 64
PAUSE = 0.3  # seconds of a step in which a device would compute
LIMIT = 1800  # seconds, for what hangs
# Whether the link is slow, and how often a snapshot is made.
WAYS = {
    "idle time suffices": (False, "1"),
    "slow link, each step": (True, "1"),
    "slow link, --memory-every auto": (True, "auto"),
}


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


def device_copy(size: int, pairs: int) -> dict[str, float]:
    """Return the bytes per second of a plain copy and of the tier's, and the median ratio of pairs."""
    state = {
        str(one): torch.zeros(size // TENSORS, dtype=torch.uint8, device="cuda") for one in range(TENSORS)
    }
    flat = torch.zeros(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    room = _Room(host_memory.create())
    copies = HostCopies(None, lambda *_: None, lambda needed: room.of(0, shard.aligned(needed)))
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: pinned.copy_(flat, non_blocking=True),
        "tier": lambda: copies.begin({}, state),
    }

    def wait_for(call: Callable[[], object]) -> None:
        call()
        torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs + 1):
        for name, call in ways.items():
            times[name].append(seconds(lambda call=call: wait_for(call)))  # type: ignore[misc]
    taken = {name: of[1:] for name, of in times.items()}  # the first ones have made the memory
    ratios = [plain / tier for plain, tier in zip(taken["plain"], taken["tier"], strict=True)]
    rates = {name: size / statistics.median(of) for name, of in taken.items()}
    return rates | {"ratio": statistics.median(ratios)}


def step_ratio(
    options: Sequence[str],
    training: Sequence[str],
    bits_per_second: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Return the median time of a step with the tier and without, and their ratio, in one running job.

    options: of `jitckpt run`. training: the script, which prints each window's median, and its arguments.
    """
    run = [sys.executable, "-P", "-c", MAIN, "run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
    run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400", "--device", "softgpu"]
    run += ["--warm-spares", "0", "--no-self-check", *options, *training]
    with tempfile.TemporaryDirectory() as folder, namespaces(HOSTS) as hosts, ExitStack() as stack:
        if bits_per_second is not None:
            for host in range(HOSTS):
                stack.enter_context(hosts.slowed(host, bits_per_second))
        jobs = [
            subprocess.Popen(
                [*hosts.on(host), *run],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | {**(environment or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(HOSTS)
        ]
        try:
            said = "".join(job.communicate(timeout=LIMIT)[0] for job in jobs)
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
    told = re.search(r"^windows (.*)$", said, re.MULTILINE)
    if told is None:
        raise SystemExit(said)
    found: list[float] = json.loads(told[1])
    with_tier, without = found[::2], found[1::2]
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
    parser.add_argument("--windows", type=int, default=12, help="of steps, an even number (default 12)")
    parser.add_argument("--steps", type=int, default=20, help="of a window (default 20)")
    parser.add_argument("--megabits", type=int, default=200, help="a second, of the slow link (default 200)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    moved = bytes_moved(args.mib << 20, args.pairs)
    copied, decided = device_copy(args.mib << 20, args.pairs), decision()
    steps = {
        way: step_ratio(
            ["--memory-tier", "peer", "--memory-every", every],
            [str(TRAINING), str(args.windows), str(args.steps), str(PAUSE)],
            args.megabits * 1_000_000 if is_slow else None,
        )
        for way, (is_slow, every) in WAYS.items()
    }
    if args.json:
        found = {"bytes_per_second": moved, "device": copied, "decision_seconds": decided, "steps": steps}
        print(json.dumps(found))
        return
    for name, rate in moved.items():
        print(f"{name:8} {rate / 1e9:6.2f} GB/s")
    put, hashing = moved["put"] / moved["raw TCP"], moved["xxh3"] / moved["copy"]
    get = moved["get"] / moved["raw TCP"]
    print(f"put / raw TCP {put:.2f}, get / raw TCP {get:.2f}, xxh3 / copy {hashing:.2f}")
    print(
        f"off the device {copied['tier'] / 1e9:.2f} GB/s, plain copy {copied['plain'] / 1e9:.2f} GB/s: "
        f"{copied['ratio']:.2f}"
    )
    print(f"decision for 1,000 ranks  {1e3 * decided:.1f} ms")
    for way, step in steps.items():
        print(
            f"step, {way}: {1e3 * step['with']:.2f} ms with, {1e3 * step['without']:.2f} ms without: "
            f"{step['ratio']:.4f} (medians of {args.windows // 2} pairs of windows of {args.steps} steps)"
        )


if __name__ == "__main__":
    main()
