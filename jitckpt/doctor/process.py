"""The doctor's small process, with the libraries preloaded as in a worker: who has the calls, do steps count?

Run as a program; its last line is JSON.
"""

import json
import tempfile
import time

import torch

import jitckpt
from jitckpt.bindings import symbols

NAMES = (
    "__cudaLaunchKernel",
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaMemcpyAsync",
    "cudaEventRecord",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclReduceScatter",
)
STEPS = 3
WAIT_SECONDS = 5.0


def steps_seen() -> int:
    """Train for STEPS steps under protection; return how many of them the library saw end on the device."""
    model = torch.nn.Linear(8, 8).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        job = jitckpt.init(checkpoint_dir=folder, model=model, optimizer=optimizer)
        for _ in range(STEPS):
            model(torch.ones(2, 8, dtype=torch.float32, device="cuda")).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
        until = time.monotonic() + WAIT_SECONDS
        while job.steps_on_device() < STEPS and time.monotonic() < until:
            time.sleep(0.01)
        seen = job.steps_on_device()
        job.close()
    return seen


def main() -> None:
    cuda = torch.version.cuda
    facts = {
        "torch": torch.__version__,
        "cuda": cuda,
        "nccl": None if cuda is None else ".".join(map(str, torch.cuda.nccl.version())),
        "bound": {name: symbols.is_in(name, "libjitckpt.so") for name in NAMES},
        "steps": 0 if cuda is None else steps_seen(),
        "made_steps": STEPS,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
