"""How long a minibatch takes whose snapshot leaves the device in idle spans, and at once: a pipeline.

    .venv/bin/python scripts/bench/snapshot_spans.py [--jobs 3] [--steps 120] [--width 512]

A job of the memory tier makes every other snapshot at once, and the others in spans, until 16 of each are
known, and later one of eight: so both ways have the same load. What is said is each job's medians, of its
slowest rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = Path(__file__).parents[2] / "tests" / "end_to_end" / "sharded_training.py"


def measured(steps: int, width: int) -> dict[str, dict[str, float]]:
    """Return what the last event memory_safe of a job tells."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jitckpt", "run", "--device", "softgpu", "--nproc-per-node", "2"]
        command += ["--warm-spares", "0", "--checkpoint-dir", folder, "--memory-tier", "peer"]
        command += [str(TRAINING), "stages", "--steps", str(steps)]
        environment = os.environ | {"WIDTH": str(width), "JITCKPT_SNAPSHOT_SPANS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        lines = map(json.loads, (Path(folder) / "events.jsonl").read_text().splitlines())
        *_, last = (event for event in lines if event["event"] == "memory_safe")
        return {"copied": last["copied"], "minibatch": last["minibatch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    ratios = []
    for _ in range(options.jobs):
        found = measured(options.steps, options.width)
        minibatch = found["minibatch"]
        ratios.append(minibatch["in spans"] / minibatch["at once"])
        print(json.dumps(found | {"ratio": round(ratios[-1], 3)}), flush=True)
    print(f"in spans over at once: {statistics.median(ratios):.3f} (median of {options.jobs} jobs)")


if __name__ == "__main__":
    main()
