"""In how many seconds all hosts have the state of a job again that was cut among them (REFT-load).

    python scripts/bench/memory_load.py [--mib 96] [--runs 3] [--json]

Agents in this process on the loopback network, one rank each: replicas of a state of `--mib`, of which each
has its part in memory after three steps. Some hosts lose all of it. Measured is until each host has got all
parts, has decoded what was lost, and has put them together. Beside it: each host reads one save of the whole
from a directory of this machine, with its checksum; nothing of it is in the page cache then. The same over
links, and beside a directory on a file server: shared_directory.py.
"""

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from memory_parity import Agent, Agents, seconds

from jitckpt.decisions.memory_wanted import tier
from jitckpt.encoding import tensor_file
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.tiers.shard import Cut

STEPS = 3
UNLIMITED = 1 << 40
# Hosts, the tier, and how many of the hosts lose what they have.
WAYS = {
    "3 hosts lose one": (3, "sharded+parity=3", 1),
    "5 hosts lose one": (5, "sharded+parity=5", 1),
    "5 hosts lose two": (5, "sharded+peer=3", 2),
}


def cut_of(rank: int, count: int, size: int) -> Cut:
    """Return which part a rank has of a state that is cut into so many, each of so many bytes."""
    return Cut(list(range(count)), {"all": ([count * size], rank * size)})


def check_whole(agent: Agent) -> None:
    """Raises SystemExit where a host has not put the state together."""
    if agent.tier.whole(agent.rank) is None:
        raise SystemExit(f"host {agent.rank} has not got all parts")


class Replicas(Agents):
    """Agents whose ranks hold the same, cut among them."""

    def cut(self, rank: int) -> Cut:
        return cut_of(rank, len(self.all), self._size)

    def get(self, host: int) -> None:
        super().get(host)
        check_whole(self.all[host])


def from_memory(way: str, size: int) -> float:
    """Return the seconds until all hosts have the whole again."""
    count, text, lost = WAYS[way]
    wanted = tier(text)
    with tempfile.TemporaryDirectory() as folder:
        agents = Replicas(folder, wanted, count, size // count)
        try:
            for step in range(1, STEPS + 1):
                agents.make(step)
            return agents.restored(lost)
        finally:
            agents.close()


def saved(folder: Path, count: int, size: int) -> Path:
    """Write a save of a state that so many ranks have; return its folder."""
    identity = Identity("job", "f", count, 0, 0, 1)
    with SaveFolder(folder, identity, STEPS, "rank", "builtin") as save:
        save.add_tensors(layout.TENSORS_FILE, {"all": torch.empty(size, dtype=torch.uint8)})
        save.add_json(layout.STATE_FILE, {})
        path, _ = save.commit()
    return path


def from_files(way: str, size: int) -> float:
    """Return the seconds until all hosts have read it from a directory."""
    count, _, _ = WAYS[way]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = saved(Path(folder), count, size)
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        record = folders.look_at(Path(folder), STEPS, "rank", 0)

        def read(_host: int) -> None:
            if (problem := folders.verify(record)) is not None:
                raise SystemExit(problem)
            tensor_file.read(path / layout.TENSORS_FILE)

        with ThreadPoolExecutor(count) as pool:
            return seconds(lambda: list(pool.map(read, range(count))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=96, help="size of the state (default 96)")
    parser.add_argument("--runs", type=int, default=3, help="how often each is done (default 3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size = args.mib << 20
    found = {
        way: {
            "from memory": statistics.median(from_memory(way, size) for _ in range(args.runs)),
            "from files": statistics.median(from_files(way, size) for _ in range(args.runs)),
        }
        for way in WAYS
    }
    if args.json:
        print(json.dumps(found))
        return
    for way, numbers in found.items():
        print(f"{way:18}", ", ".join(f"{name} {value:.2f} s" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
