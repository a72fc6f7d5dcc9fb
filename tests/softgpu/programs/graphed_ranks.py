"""Two DDP ranks with CUDA graphs against the same without; run by torchrun."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import GPT, batch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

WARM_UP, STEPS = 11, 3  # as DDP needs them before its backward pass may be captured
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


class Training:
    def __init__(self, graphed_model: bool = False) -> None:
        torch.manual_seed(0)
        model: Any = GPT().cuda()
        self.batches = batches()
        if graphed_model:
            example: Any = tuple(tensor.cuda() for tensor in self.batches[0])
            model = torch.cuda.make_graphed_callables(model, example)
        with torch.cuda.stream(torch.cuda.Stream()):
            self.model = DistributedDataParallel(model, device_ids=[rank])
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(inputs, targets).backward()
        self.optimizer.step()

    def run(self, way: "Callable[[Training], Callable[[Tensor, Tensor], None]]") -> list[Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs, targets in self.batches[:WARM_UP]:
                self.step(inputs.cuda(), targets.cuda())
        torch.cuda.current_stream().wait_stream(stream)
        step = way(self)
        for inputs, targets in self.batches[WARM_UP:]:
            step(inputs.cuda(), targets.cuda())
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [batch("gpt", generator) for _ in range(WARM_UP + STEPS)]


def whole_step(training: Training) -> Callable[[Tensor, Tensor], None]:
    """Forward, backward with its collectives, and the optimizer in one graph."""
    inputs, targets = (tensor.cuda() for tensor in training.batches[0])
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        training.step(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> None:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()

    return replay


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


expected = Training().run(lambda training: training.step)
assert equal(Training().run(whole_step), expected)
assert equal(Training(graphed_model=True).run(lambda training: training.step), expected)
torch.cuda.synchronize()
dist.destroy_process_group()
