"""What a step waits for the copy of its ranks' own states on another host, and for the step barrier.

    .venv/bin/python scripts/bench/host_copies.py [--rounds 15] [--steps 10] [--json]

One job of one softgpu rank on each of two hosts, network namespaces of this machine (so as root), trains the
model of examples/train_gpt.py, which keeps buffers of its own on the device. In turn it makes so many steps
as ever; without waiting for the other host; without the step barrier, too; and without the barrier, but
waiting for what lies in host memory after each forward pass, as jobs do that keep nothing else. Prints the
medians of the differences, round by round, of a step's time and of a rank's processor time for one.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from gpt_training import GptTraining

import jitckpt
from jitckpt.rehearsal.namespaces import namespaces
from jitckpt.worker.protection import Protection

HOSTS = 2
LIMIT = 550  # seconds
AS_EVER, UNCONFIRMED, BARE, EARLY = "as ever", "without waiting", "without the barrier", "waiting early"
WAYS = (AS_EVER, UNCONFIRMED, BARE, EARLY)
RESULT = "result: "


def train(rounds: int, steps: int) -> None:
    """One rank; rank 0 prints for each round and way the seconds of a step, and of the processor."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    training = GptTraining((rounds + 1) * len(WAYS) * steps)
    model, optimizer = training.model, training.optimizer
    job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
    assert isinstance(job._protection, Protection)
    own, around = job._protection._own, job._protection._steps
    copies, barrier = own._copies, around._barrier
    assert copies is not None
    assert barrier is not None
    chance, step, found = random.Random(0), 0, []
    for _ in range(rounds + 1):
        took = {}
        for way in chance.sample(WAYS, len(WAYS)):
            own._copies = copies if way in (AS_EVER, EARLY) else None
            around._barrier = barrier if way in (AS_EVER, UNCONFIRMED) else None
            own._has_barrier = around._barrier is not None
            torch.cuda.synchronize()
            torch.distributed.barrier()
            begun, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                training.backward(step)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            torch.cuda.synchronize()
            took[way] = [(time.perf_counter() - begun) / steps, (time.process_time() - processor) / steps]
        found.append(took)
    own._copies, around._barrier, own._has_barrier = copies, barrier, barrier is not None
    if rank == 0:
        print(RESULT + json.dumps(found[1:]), flush=True)  # the first round warms up
    torch.distributed.destroy_process_group()


def measure(rounds: int, steps: int) -> list[dict[str, list[float]]]:
    """Return for each round and way the seconds of a step, and of the processor that a rank took for one."""
    command = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "run"]
    command += ["--nnodes", str(HOSTS), "--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400"]
    command += [__file__, "--train", "--rounds", str(rounds), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="jitckpt-bench-") as folder, namespaces(HOSTS) as hosts:
        jobs = [
            subprocess.Popen(
                [*hosts.on(host), *command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(HOSTS)
        ]
        try:
            said = [job.communicate(timeout=LIMIT)[0] for job in jobs]
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
    results = [line for line in "\n".join(said).splitlines() if line.startswith(RESULT)]
    if any(job.returncode for job in jobs) or len(results) != 1:
        sys.exit("The job failed:\n" + "\n".join(said))
    found: list[dict[str, list[float]]] = json.loads(results[0].removeprefix(RESULT))
    return found


def figures(found: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the medians over the rounds, in milliseconds; of the differences also the quartiles."""
    result: dict[str, Any] = {}
    for column, what in enumerate(("time", "processor")):
        result[what] = {way: statistics.median(1e3 * took[way][column] for took in found) for way in WAYS}
        for more, less in ((AS_EVER, UNCONFIRMED), (UNCONFIRMED, BARE), (EARLY, BARE)):
            differences = [1e3 * (took[more][column] - took[less][column]) for took in found]
            result[what][f"{more}, over {less}"] = statistics.quantiles(differences, n=4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of each way in a round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.rounds, args.steps)
        return
    result = figures(measure(args.rounds, args.steps))
    if args.json:
        print(json.dumps(result))
        return
    for what, of_way in result.items():
        for way in WAYS:
            print(f"{what} of a step {way}: {of_way.pop(way):.2f} ms")
        for difference, (low, middle, high) in of_way.items():
            print(f"{what} {difference}: {middle:+.2f} ms (middle half {low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
