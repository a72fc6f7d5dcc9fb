"""From SIGKILL to the first new step, wherever and by whomever the job was started.

    .venv/bin/python scripts/bench/surroundings.py [--runs 5] [--json]

The training and the kill are those of recovery.py, with warm spares. `usual`: started in the script's folder.
The others differ from it in one thing each; they take turns, so that what else the machine does is the same
for all. Prints medians, the least and the most, and whether a median lies among those of `usual`. Another
user needs root, who may read everything as that user, too, but not write.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery import KILL, TRAINING, phases
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-P", "-c", "import sys; from jitckpt.cli import main; sys.exit(main())"]
RUN = ["run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu", "--warm-spares", "1"]
USER = 64321
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
AS_USER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
NAMES = ("json", "queue", "random", "socket", "statistics", "numbers", "jitckpt")  # of modules
LONG = "a folder with spaces " * 10  # 210 characters


@dataclass(frozen=True)
class Surroundings:
    """before: in front of the command. below: the name of its folder. files: in there. where: it starts."""

    before: Sequence[str] = ()
    below: str = "job"
    files: Sequence[str] = ()
    where: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "usual": Surroundings(),
    "the repository's root": Surroundings(where=ROOT),
    "files named like modules": Surroundings(files=NAMES),
    "another user": Surroundings(before=AS_USER, variables={"HOME": "/tmp"}),
    "without HOME": Surroundings(before=["env", "-u", "HOME"]),
    "a long path with spaces": Surroundings(below=LONG),
}


def recover(kind: Surroundings) -> float:
    """Run the training with one kill; return the seconds until the first new step."""
    with tempfile.TemporaryDirectory(prefix="jitckpt-surroundings-", dir="/tmp") as top:
        folder = Path(top, kind.below)
        folder.mkdir()
        started = kind.where or folder
        if kind.files:  # beside the script no program could go on
            started = folder / "here"
            started.mkdir()
        for name in kind.files:
            (started / f"{name}.py").write_text("raise SystemExit('a file of the user, and no module')")
        script = folder / "train.py"
        script.write_text(TRAINING.replace('"ckpt"', repr(str(folder / "ckpt"))))
        if kind.before == AS_USER:
            for path in (Path(top), folder):
                os.chown(path, USER, USER)
        command = [*kind.before, *PROGRAM, *RUN, "--fault", KILL, str(script)]
        ended = subprocess.run(
            command,
            cwd=started,
            env=os.environ | kind.variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if ended.returncode != 0:
            sys.exit(f"The training failed:\n{ended.stderr}")
        events = [json.loads(line) for line in (folder / "ckpt" / "events.jsonl").read_text().splitlines()]
    if not any(event["event"] == "spare_used" and event["restart"] == 1 for event in events):
        sys.exit(f"No spare was used:\n{ended.stderr}")
    return sum(phases(events).values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Time recoveries of jobs that were started in odd places.")
    parser.add_argument("--runs", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    kinds = {name: kind for name, kind in KINDS.items() if kind.before != AS_USER or os.geteuid() == 0}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for name in track([*kinds] * args.runs, "recovering", console=Console(stderr=True)):
        found[name].append(recover(kinds[name]))
    if args.json:
        print(json.dumps(found))
        return
    usual = found["usual"]
    table = Table("started in, or by", "median", "least", "most", "as usual")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        figures = (f"{value:.3f} s" for value in (median, min(seconds), max(seconds)))
        table.add_row(name, *figures, "yes" if median <= max(usual) else "no")
    Console().print(table)


if __name__ == "__main__":
    main()
