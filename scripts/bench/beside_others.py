"""Jobs without replicas, protected by jitckpt and by others of the same purpose, on the same work by turns.

    python scripts/bench/beside_others.py [--every 1,10] [--steps 60] [--runs 3] [--json]

A training under FSDP2 full shard, two ranks on softgpu, each of which keeps the other's part every so many
steps. The others come from PyPI in an environment of their own, in the versions that stand below, as their
examples use them. Step: the median time, over that of the same training without any protection in the same
turn. Killed: rank 1 dies by SIGKILL in the middle of a step; which step was the first that was made again,
how long it took until a step was done that had not been, and whether the end is that of an undisturbed run.
`jitckpt run` launches jitckpt's, torchrun the others', and again after the kill: what they use of gloo does
not always connect in a restart of torchrun's own.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

PACKAGES = ["nvidia-resiliency-ext==0.4.1", "lm-resiliency==0.2.0"]
WAYS = ["none", "jitckpt", "lm-resiliency", "nvrx"]
TRAINING = Path(__file__).parent / "beside_others_training.py"
MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
LIMIT = 900  # seconds, for what hangs
WARM_UP = 10  # steps


def environment(folder: Path) -> str:
    """Make an environment with the others' packages and all that this one has; return its Python."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    (places,) = folder.glob("lib/python*/site-packages")
    (places / "this.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # What they need beyond torch and numpy is not needed for what is measured.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
    return python


def run(way: str, python: str, every: int, steps: int, killed_at: int = 0) -> dict[str, Any]:
    """Run the training; return what it measured, and the seconds from a kill to the end of a new step."""
    with tempfile.TemporaryDirectory(prefix="jitckpt-beside-") as folder:
        common = ["--standalone", "--nproc-per-node", "2"]
        if way == "jitckpt":
            command = [sys.executable, "-P", "-c", MAIN, "run", "--device", "softgpu", *common]
            command += ["--memory-tier", "peer", "--memory-every", str(every)]
            command += ["--checkpoint-dir", str(Path(folder, "kept"))]
        else:
            command = [sys.executable, "-P", "-c", MAIN, "exec", "--device", "softgpu", "--"]
            command += [python, "-m", "torch.distributed.run", *common]
        command += [str(TRAINING), way, str(every), str(steps), str(killed_at), folder]
        done = _run(command, folder)
        if killed_at and way != "jitckpt" and Path(folder, "killed").exists():
            done = _run(command, folder)
        told = re.search(r"^measured (.*)$", done.stdout, re.MULTILINE)
        if told is None or done.returncode:
            return {"why": (done.stderr or done.stdout).strip().splitlines()[-1:]}
        found: dict[str, Any] = json.loads(told[1])
        if killed_at:
            killed = float(Path(folder, "killed").read_text())
            found["back"] = next(at for step, _, at in found["times"] if step >= killed_at) - killed
    return found


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=LIMIT)


def step_time(found: dict[str, Any]) -> float:
    seconds: list[float] = [seconds for step, seconds, _ in found["times"] if step > WARM_UP]
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", default="1,10", help="steps between two copies (default 1,10)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default 60)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    killed_at = args.steps // 2 + 7
    results = []
    with tempfile.TemporaryDirectory(prefix="jitckpt-others-") as folder:
        python = environment(Path(folder))
        kinds = [(int(every), way) for every in args.every.split(",") for way in WAYS]
        steps: dict[tuple[int, str], list[dict[str, Any]]] = {kind: [] for kind in kinds}
        kills: dict[tuple[int, str], list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for every, way in track(kinds * args.runs, "training", console=Console(stderr=True)):
            steps[every, way].append(run(way, python, every, args.steps))
            kills[every, way].append(run(way, python, every, args.steps, killed_at))
    for every, way in kinds:
        pairs = zip(steps[every, way], steps[every, "none"], strict=True)
        ratios = [
            step_time(one) / step_time(none) for one, none in pairs if "times" in one and "times" in none
        ]
        ends = [found["end"] for found in steps[every, "none"] if "end" in found]
        back = [found for found in kills[every, way] if "times" in found]
        results.append(
            {
                "way": way,
                "every": every,
                "step over none": statistics.median(ratios) if ratios else None,
                "killed in step": killed_at,
                "first step made again": max((found["times"][0][0] for found in back), default=None),
                "seconds to a new step": statistics.median(f["back"] for f in back) if back else None,
                "equal": sum(found["end"] in ends for found in back),
                "runs": args.runs,
                "why not": [line for f in steps[every, way] + kills[every, way] for line in f.get("why", [])],
            }
        )
    if args.json:
        print(json.dumps(results))
        return
    table = Table("way", "every", "step over none", "killed in, back to", "a new step after", "equal end")
    for found in results:
        ratio, seconds = found["step over none"], found["seconds to a new step"]
        table.add_row(
            found["way"],
            str(found["every"]),
            "-" if ratio is None else f"{ratio:.3f}",
            f"{found['killed in step']}, {found['first step made again']}",
            "-" if seconds is None else f"{seconds:.1f} s",
            f"{found['equal']} of {found['runs']}",
        )
    Console().print(table)
    for found in results:
        for line in found["why not"]:
            print(f"{found['way']}: {line}")


if __name__ == "__main__":
    main()
