"""What every example prints: steps that are done, and at the end digests to compare two runs bit for bit."""

import hashlib
from collections import deque
from collections.abc import Iterable

import torch
from safetensors.torch import save_file

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class DoneSteps:
    """Announces each step of rank 0 once the device has finished it, without waiting for the device."""

    def __init__(self, rank: int, steps: int) -> None:
        self.announcing, self.steps = rank == 0, steps
        self.unfinished: deque[tuple[int, torch.cuda.Event]] = deque()

    def queued(self, step: int) -> None:
        """Everything of this step, counted from 1, is now on the current stream."""
        event = torch.cuda.Event()
        event.record()
        self.unfinished.append((step, event))
        while self.unfinished and self.unfinished[0][1].query():
            self.announce_oldest()

    def finish(self) -> None:
        """Waits for the device and announces the rest."""
        while self.unfinished:
            self.unfinished[0][1].synchronize()
            self.announce_oldest()

    def announce_oldest(self) -> None:
        done, _ = self.unfinished.popleft()
        if self.announcing:
            print(f"step {done} of {self.steps}\n", end="", flush=True)


def sha256(named_tensors: NamedTensors) -> str:
    """The SHA-256 of all names and bytes, which waits for the device."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def report(rank: int, model: torch.nn.Module, parameters_file: str | None) -> None:
    """Prints one line a rank with the digests of its parameters and buffers; rank 0 also writes the file."""
    parameters, buffers = sha256(model.named_parameters()), sha256(model.named_buffers())
    # One write with its newline: the ranks share their output.
    print(f"rank {rank}: parameters {parameters} buffers {buffers}\n", end="", flush=True)
    if rank == 0 and parameters_file:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
        save_file(tensors, parameters_file)
