"""What it costs a step that calls are watched for changes of the state outside of the optimizer step.

    .venv/bin/python scripts/bench/state_watch.py OTHER_TREE [--parameters 100 10000] [--pairs 5]

Pairs of jobs in transparent mode, whose state stays on the devices: one of this tree, one of another with
its libraries in place (an older one, say), in an order that is drawn. Prints for each number of parameters
the median of the ratios of their median steps, this tree's to the other's, and the least and the greatest.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OWN = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
FIRST = 9  # step that is timed: by then the state stays, and what reads it is known
SCRIPT = """
import os, statistics, sys, time
import torch
from torch import distributed as dist, nn

layers, steps = int(sys.argv[1]) // 2, int(sys.argv[2])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).cuda())
optimizer = torch.optim.Adam(model.parameters(), foreach=True)
data, took = torch.randn(4, 8).cuda(), []
for step in range(steps):
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss = model(data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    took.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print("seconds", statistics.median(took[FIRST:]), flush=True)
dist.destroy_process_group()
"""


def seconds_of_a_step(tree: Path, parameters: int, steps: int) -> float:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.replace("FIRST", str(FIRST)))
        command = [*PROGRAM, "run", "--mode", "transparent", "--nproc-per-node", "2", "--device", "softgpu"]
        command += ["--warm-spares", "0", "--warm-start", str(script), str(parameters), str(steps)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode != 0 or not lines:
        sys.exit(f"The job of {tree} has failed:\n{done.stderr}")
    return float(lines[0].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 10000])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for parameters in options.parameters:
        steps = FIRST + (60 if parameters <= 1000 else 8)
        ratios, own = [], []
        for _ in range(options.pairs):
            trees = [OWN, options.other.resolve()]
            random.shuffle(trees)
            found = {tree: seconds_of_a_step(tree, parameters, steps) for tree in trees}
            own.append(found[OWN])
            ratios.append(found[OWN] / found[options.other.resolve()])
        print(
            f"{parameters} parameters: {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}) of the other tree's step; {1000 * statistics.median(own):.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
