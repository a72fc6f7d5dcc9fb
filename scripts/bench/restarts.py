"""Whether the launcher stays as it began in a job that is started again and again.

    .venv/bin/python scripts/bench/restarts.py [--restarts 1000] [--minutes 20] [--picture FILE]

One rank, as cheap as can be: it registers with the agent, notes what the agent has of descriptors, threads,
memory and zombies, and kills itself. Prints each at the beginning, in the middle and at the end; with
--picture, for which matplotlib is needed, draws them by restart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import jitckpt

WORKER = Path(__file__).with_name("restarting_worker.py")
BEGUN = 10  # starts, after which what a launcher needs at all is there


def facts_by_start(restarts: int, minutes: float) -> list[dict[str, float]]:
    """Run the job; return what its worker has seen in each start, as far as time allows."""
    with tempfile.TemporaryDirectory(prefix="jitckpt-restarts-") as temporary:
        facts, checkpoints = (Path(temporary) / name for name in ("facts", "ckpt"))
        command = [str(Path(sys.executable).parent / "jitckpt"), "run", "--standalone", "--warm-spares", "0"]
        command += ["--max-restarts", str(restarts), "--no-python", sys.executable, "-S", str(WORKER)]
        process = subprocess.Popen(
            [*command, str(facts), str(checkpoints)],
            cwd=temporary,
            # Its worker runs without site packages, so that it takes no time.
            env=os.environ | {"TMPDIR": temporary, "PYTHONPATH": str(Path(jitckpt.__file__).parents[1])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        if not facts.exists():
            raise SystemExit(
                f"The job ended with status {process.returncode} before its worker had noted anything."
            )
        return [json.loads(line) for line in facts.read_text().splitlines()]


def draw(facts: list[dict[str, float]], path: Path) -> None:
    """Draw each by restart, from 0 on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(len(facts[0]), sharex=True, figsize=(8, 7), layout="constrained")
    for axes, name in zip(all_axes, facts[0], strict=True):
        axes.plot([one[name] for one in facts], linewidth=1)
        axes.set_title(f"{name} of the launcher", fontsize=10, loc="left")
        axes.set_ylim(0, max(1.0, 1.3 * max(one[name] for one in facts)))
        axes.grid(alpha=0.3)
    all_axes[-1].set_xlabel("restart")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the launcher stay as it began?")
    parser.add_argument("--restarts", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most (default 20)")
    parser.add_argument("--picture", type=Path, help="a PNG file to draw them into")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    facts = facts_by_start(args.restarts, args.minutes)
    if args.picture is not None:
        draw(facts, args.picture)
    places = {"begin": facts[min(BEGUN, len(facts) - 1)], "middle": facts[len(facts) // 2], "end": facts[-1]}
    if args.json:
        print(json.dumps({"restarts": len(facts) - 1, **places}))
        return
    table = Table(f"{len(facts) - 1} restarts", *facts[0])
    for place, one in places.items():
        table.add_row(place, *(f"{value:.0f}" for value in one.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
