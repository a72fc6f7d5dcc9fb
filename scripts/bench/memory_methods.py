"""The memory tier's methods side by side: bytes a step over the network, host memory, a step's time, load.

    sudo env PATH="$PATH" python scripts/bench/memory_methods.py [--windows 8] [--steps 12] [--pause 0.4]
        [--only METHOD ...] [--json]

For each method a training on softgpu, with AdamW and one rank on each of three hosts, network namespaces of
this machine: under FSDP2 full shard where nothing has a replica, under DDP where states are cut. In windows
of steps with snapshots and without, by turns in the running job: the time of a step with over without, and
what a host sends with less without. Host memory: what a host's keeper holds. Then the last host's processes
are killed, with its memory, and another comes (with "sharded", which does not survive that, all ranks are
killed): the seconds in which the slowest host has what its rank needs. All hosts share this machine's
processors, and what is sent is copied there twice.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jitckpt.rehearsal.namespaces import Namespaces, namespaces

TRAINING = Path(__file__).parent / "memory_methods_training.py"
MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
HOSTS = 3
LIMIT = 300.0  # seconds, for what hangs
SETTLED = 3  # steps of a window until nothing of the one before is under way, and gradients are sent again
LAUNCHERS_OPTION = b"--nnodes"
KEEPER = b"jitckpt.tiers.keeper"
# The papers' methods, with the training that each is for.
METHODS = {
    "peer=2": ("full-shard", "GEMINI, two copies"),
    "peer=3": ("full-shard", "GEMINI, three copies"),
    "parity=3": ("full-shard", "REFT's AEC"),
    "peer=2+optimizer": ("full-shard", "REFT's AOR"),
    "sharded": ("replicas", "REFT's cut alone"),
    "sharded+peer=2": ("replicas", "REFT's ARC"),
    "sharded+parity=3": ("replicas", "REFT's AEC of the cut"),
}


@dataclass
class Job:
    """The launchers of one job, and what they say."""

    hosts: Namespaces
    folder: str
    command: list[str]
    said: list[IO[str]] = field(default_factory=list)
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: int) -> None:
        self.said.append(open(Path(self.folder) / f"said-{len(self.said)}", "w+"))  # noqa: SIM115
        self.launchers.append(
            subprocess.Popen(
                [*self.hosts.on(host), *self.command],
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=self.said[-1],
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def told(self) -> list[str]:
        return [Path(one.name).read_text() for one in self.said]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end or self.launchers[0].poll() is not None:
                raise SystemExit("\n".join(self.told()))
            time.sleep(0.05)

    def kill(self, host: int, *, ranks: bool = False) -> None:
        """Kill a host's processes, or of these only its ranks'."""
        for pid in self.hosts.processes(host):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if not ranks or (TRAINING.name.encode() in command and LAUNCHERS_OPTION not in command):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for host in range(HOSTS):
            self.kill(host)
        for launcher in self.launchers:
            launcher.wait()
        for one in self.said:
            one.close()


def memory_of(job: Job, host: int) -> int:
    """Return the bytes that a host's keeper holds."""
    size = 0
    for pid in job.hosts.processes(host):
        with suppress(OSError):
            if KEEPER in Path(f"/proc/{pid}/cmdline").read_bytes():
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    if "jitckpt-memory-tier" in os.readlink(descriptor):
                        size += 512 * descriptor.stat().st_blocks
    return size


def sent_for_a_snapshot(counts: list[list[int]]) -> float:
    """Return the bytes for a snapshot; counts: before each step of each window, and behind the last."""
    with_, without = (
        [(of[-1] - of[SETTLED]) / (len(of) - 1 - SETTLED) for of in counts[first::2]] for first in (0, 1)
    )
    return statistics.median(one - two for one, two in zip(with_, without, strict=True))


def fetched(text: str) -> list[tuple[str, float]]:
    """Return what hosts have said that they fetched, and the seconds."""
    return [
        (size, float(seconds))
        for size, seconds in re.findall(r"from other hosts' memory: (\S+ \S+) in ([\d.]+) s", text)
    ]


def measured(method: str, windows: int, length: int, pause: float) -> dict[str, Any]:
    """Return what one method takes."""
    run = [sys.executable, "-P", "-c", MAIN, "run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
    run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400", "--device", "softgpu"]
    run += ["--warm-spares", "0", "--no-self-check", "--memory-tier", method, "--memory-every", "1"]
    run += ["--memory-limit", "4096", "--checkpoint-dir", "ckpt"]
    run += [str(TRAINING), str(windows), str(length), str(pause), METHODS[method][0]]
    with tempfile.TemporaryDirectory() as folder, namespaces(HOSTS) as hosts:
        job = Job(hosts, folder, run)
        try:
            for host in range(HOSTS):
                job.start(host)
            lines: list[str] = []

            def all_have_told() -> bool:
                lines[:] = re.findall(r"^windows (.*)$", "\n".join(job.told()), re.MULTILINE)
                return len(lines) == HOSTS

            job.wait_for(all_have_told)
            of_ranks = sorted((json.loads(line) for line in lines), key=lambda one: int(one["rank"]))
            memory = [memory_of(job, host) for host in range(HOSTS)]
            has_replicas = METHODS[method][0] == "replicas"
            if has_replicas:  # each would save
                for host in range(HOSTS):
                    job.kill(host, ranks=True)
            if method != "sharded":  # which survives no more than that
                job.kill(HOSTS - 1)
                job.start(HOSTS - 1)
            expected = HOSTS if has_replicas else 1
            job.wait_for(lambda: sum(len(fetched(text)) for text in job.told()) >= expected)
            loads = [one for text in job.told() for one in fetched(text)]
            seconds = of_ranks[0]["seconds"]
            ratios = [one / two for one, two in zip(seconds[::2], seconds[1::2], strict=True)]
            return {
                "sent": statistics.mean(sent_for_a_snapshot(one["sent"]) for one in of_ranks),
                "memory": statistics.mean(memory),
                "step": statistics.median(ratios),
                "step seconds": statistics.median(seconds[1::2]),
                "load": max(took for _, took in loads),
                "loaded": [size for size, _ in loads],
            }
        finally:
            job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, help="of steps, an even number (default 8)")
    parser.add_argument("--steps", type=int, default=12, help="of a window (default 12)")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds, of a step (default 0.4)")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {}
    for method in args.only:
        one = found[method] = measured(method, args.windows, args.steps, args.pause)
        if not args.json:
            load = f"{one['load']:.2f} s ({', '.join(one['loaded'])})"
            print(
                f"{method:18} ({METHODS[method][1]}): a host sends {one['sent'] / 1e6:.1f} MB a step, has "
                f"{one['memory'] / 1e6:.1f} MB in memory; step {one['step']:.3f} of "
                f"{one['step seconds']:.3f} s; load {load}",
                flush=True,
            )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
