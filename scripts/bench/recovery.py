"""From SIGKILL to the first new step, phase by phase, with and without warm spares.

    .venv/bin/python scripts/bench/recovery.py [--runs 5] [--json]

Two softgpu ranks train six Linear(1024) with AdamW (76 MB of state); rank 1 is killed in a backward pass.
Medians of alternating runs. The phases are those of the checkpoint directory's events:

    detect    the fault fires -> the launcher knows of it
    rest      -> the device is at rest, and the save begins
    save      -> the state lies on the disk
    end       -> the other rank has ended and what the dead one alone knew is written
    restart   -> the slowest rank has called jitckpt.init
    restore   -> the slowest rank has its state back
    step      -> the slowest rank's first new step is done
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

TRAINING = """\
import os
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

torch.manual_seed(0)
distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(checkpoint_dir="ckpt", model=model.module, optimizer=optimizer)
for _ in job.steps(160):
    model(torch.randn(32, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""
KILL = "rank=1 step=150 phase=backward kind=kill"  # late enough for the spares to be ready
PHASES = {
    "detect": "detected",
    "rest": "held",
    "save": "saved",
    "end": "restart",
    "restart": "registered",
    "restore": "restored",
    "step": "first_step",
}


def recover(spares: int) -> dict[str, float]:
    """Run the training with one kill; return the seconds of each phase."""
    jitckpt = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAINING)
        command = [*jitckpt, "run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu"]
        command += ["--warm-spares", str(spares), "--fault", KILL, "train.py"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode != 0:
            sys.exit(f"The training failed:\n{ended.stderr}")
        lines = Path(folder, "ckpt", "events.jsonl").read_text().splitlines()
    return phases([json.loads(line) for line in lines])


def phases(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase from the events of a job with one failure."""
    after = events[[event["event"] for event in events].index("fault") :]
    begun, seconds = after[0]["time"], {}
    for phase, name in PHASES.items():
        ended = max(event["time"] for event in after if event["event"] == name)
        seconds[phase], begun = ended - begun, ended
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a recovery, phase by phase.")
    parser.add_argument("--runs", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    runs = track([0, 1] * args.runs, "recovering", console=Console(stderr=True))
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for spares in runs:
        found[spares].append(recover(spares))
    medians = {
        kind: {phase: statistics.median(run[phase] for run in found[spares]) for phase in PHASES}
        | {"all": statistics.median(sum(run.values()) for run in found[spares])}
        for kind, spares in (("cold", 0), ("warm", 1))
    }
    if args.json:
        print(json.dumps(medians))
        return
    table = Table("seconds", *medians["cold"])
    for kind, values in medians.items():
        table.add_row(kind, *(f"{value:.3f}" for value in values.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
