"""What it takes to find the step to go on from in a directory of so many shards.

    .venv/bin/python scripts/bench/shards.py [--shards 256 1024 2048] [--command] [--json]

The saves are real files, of a few bytes each, so that the time is that of the decision and of the metadata.
`all`: who sees all saves decides (selection.choose, every checksum read). `inspect`: reports.inspection, for
all ranks; with --command the whole command, with Python's start. `a rank`: what one rank of a restart does by
itself (same_step.OwnSaves). `rank 0`: what rank 0 does more, with all ranks' words (same_step.Decision).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jitckpt.reports import inspection
from jitckpt.saves import folders, layout, same_step, selection
from jitckpt.saves.layout import FileEntry, Identity, Metadata
from jitckpt.saves.same_step import Decision, OwnSaves

STEPS = (10, 20)
CONTENT = b"{}"


def fill(root: Path, shards: int) -> Identity:
    """Write a save of each shard after each step, without waiting for the disk; return rank 0's identity."""
    job = folders.open_directory(root)
    (root / "content").write_bytes(CONTENT)
    entry = FileEntry(layout.STATE_FILE, len(CONTENT), folders.checksum(root / "content"))
    for step in STEPS:
        for rank in range(shards):
            identity = Identity(job, "f", shards, rank, rank, shards, "a bench's")
            folder = root / layout.step_folder(step) / layout.rank_folder("rank", rank)
            folder.mkdir(parents=True)
            (folder / layout.STATE_FILE).write_bytes(CONTENT)
            metadata = Metadata(identity, "rank", "builtin", step, time.time(), (entry,))
            (folder / layout.METADATA_FILE).write_bytes(metadata.to_json())
    return Identity(job, "f", shards, 0, 0, shards, "a bench's")


def timed(call: Callable[[], object]) -> float:
    """Return the least of three times in seconds."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def seconds(shards: int, command: bool) -> dict[str, float]:
    """Return what each takes."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        identity = fill(root, shards)

        def choose() -> None:
            choice = selection.choose(folders.find(root), identity, folders.verify)
            assert choice is not None
            assert choice.step == max(STEPS)

        def inspect() -> None:
            found = inspection.inspect(root)
            assert (found.restart, len(found.loads)) == (max(STEPS), shards)

        def run_command() -> None:
            program = [sys.executable, "-c", "from jitckpt.cli import main; main()", "inspect", str(root)]
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL)

        def one_rank() -> None:
            own = OwnSaves(root, identity, [0])
            assert own.check(max(own.offer.steps))

        def rank_0() -> None:
            decision = Decision(range(shards))
            offers = [same_step.Offer(STEPS, max(STEPS))] * shards
            assert decision.hear_offers(offers).step == max(STEPS)
            assert decision.hear_checks([True] * shards).decided

        calls = {"all": choose, "inspect": run_command if command else inspect}
        return {name: timed(call) for name, call in (calls | {"a rank": one_rank, "rank 0": rank_0}).items()}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {shards: seconds(shards, args.command) for shards in args.shards}
    if args.json:
        print(json.dumps(found))
        return
    table = Table("shards", *next(iter(found.values())), title=f"seconds, {len(STEPS)} steps")
    for shards, taken in found.items():
        table.add_row(str(shards), *(f"{one:.3f}" for one in taken.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
