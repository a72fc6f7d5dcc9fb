"""Trains in several ways, each undisturbed and then again while servers of devices are killed.

Nothing of jitckpt is called. Each rank says whether it has ended with the same, bit for bit.
"""

import contextlib
import ctypes
import itertools
import os
import random
import signal
from collections.abc import Callable, Collection

import torch
from sharded_training import INPUTS, OUTPUTS, Batches, Training, digest, fsdp2, loss, pipeline, tensor
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

STEPS = 4  # of the optimizer, in each training
KILL_AT = 3
proxy = ctypes.CDLL(None)


class ConvNet(nn.Module):
    """BatchNorm and dropout: what changes outside of the optimizer, on each rank for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.convolution = nn.Linear(INPUTS, 16), nn.Conv2d(1, 4, 3, padding=1)
        self.norm, self.dropout, self.head = nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Linear(64, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        image = self.stem(inputs).view(-1, 1, 4, 4)
        output: Tensor = self.head(self.dropout(self.norm(self.convolution(image)).relu()).flatten(1))
        return output


class Scaled(torch.optim.AdamW):
    """With mixed precision: a step that has no finite gradients is left out, and the scale goes on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.scaler = GradScaler("cuda", init_scale=2.0**16, growth_interval=1)


def mixed_precision() -> Training:
    """Gradients of two parts of a batch are added up."""
    model = ConvNet().to("cuda")
    wrapped = DistributedDataParallel(model)
    optimizer = Scaled(model)

    def backward(batch: Tensor, target: Tensor) -> None:
        for part, end in ((slice(0, 4), False), (slice(4, 8), True)):
            wrapped.require_backward_grad_sync = end
            with torch.autocast("cuda", dtype=torch.float16):
                lost = loss(wrapped(batch[part]), target[part])
            optimizer.scaler.scale(lost).backward()
        optimizer.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return Training(model, [optimizer], backward, dist.get_rank())


def train(form: Callable[[], Training], kills: Collection[tuple[str, int]] = ()) -> list[object]:
    """Return what the rank ends with. kills: after which part of the step whose server is killed."""

    def place(step: int, name: str) -> None:
        if step == KILL_AT and (name, dist.get_rank()) in kills:
            with contextlib.suppress(ProcessLookupError):  # just replaced, for another rank's failure
                os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)

    torch.manual_seed(0)
    random.seed(0)
    training = form()
    torch.manual_seed(100 + training.data_index)
    random.seed(training.data_index)
    batches = Batches()
    scales: list[float] = []
    for step in range(1, STEPS + 1):
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.backward(*batches.next())
        place(step, "backward")
        for optimizer in training.optimizers:
            if isinstance(optimizer, Scaled):
                optimizer.scaler.step(optimizer)
                optimizer.scaler.update()
                scales.append(optimizer.scaler.get_scale())
            else:
                optimizer.step()
        place(step, "step")
    buffers = [buffer.tolist() for buffer in training.model.buffers()]
    if scales and dist.get_rank() == 0:
        grew = {later > earlier for earlier, later in itertools.pairwise(scales)}
        print(f"steps are left out and made: {grew == {True, False}}\n", end="", flush=True)
    return [digest(training), buffers, scales]


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for form, kills in (
        (mixed_precision, {("backward", 1)}),
        (fsdp2, {("backward", 0), ("backward", 3)}),  # two at once
        (tensor, {("step", 2)}),
        (pipeline, {("backward", 1)}),
    ):
        undisturbed = train(form)
        disturbed = train(form, kills)
        print(
            f"{form.__name__}, rank {dist.get_rank()}, equal: {disturbed == undisturbed}\n",
            end="",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
