"""Trains with CUDA graphs and without; prints which ways gave other bits than the eager one, as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from models import GPT, batch
from torch import Tensor, nn

STEPS = 5
Step = Callable[[Tensor, Tensor], Tensor]


class Training:
    """A GPT with dropout, its optimizer, and random numbers of the device, always from the same beginning."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(dropout=0.2).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, capturable=True)
        generator = torch.Generator().manual_seed(1)
        self.batches = [batch("gpt", generator) for _ in range(STEPS + 3)]

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def warm_up(self) -> None:
        """Three steps that all ways make alike, on a stream of their own as torch wants it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs, targets in self.batches[STEPS:]:
                self.step(inputs.cuda(), targets.cuda())
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, step: Step) -> dict[str, Tensor]:
        losses = [
            step(inputs.cuda(), targets.cuda()).detach().cpu() for inputs, targets in self.batches[:STEPS]
        ]
        state = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        moments = self.optimizer.state_dict()["state"]
        state |= {
            f"{name} {index}": value.cpu() for index, of in moments.items() for name, value in of.items()
        }
        return state | {"losses": torch.stack(losses), "random": torch.cuda.get_rng_state()}


def eager(training: Training) -> Step:
    return training.step


def whole_step(training: Training) -> Step:
    """Forward, backward and the optimizer in one graph."""
    inputs, targets = (tensor.cuda() for tensor in training.batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> Tensor:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()
        return loss

    return replay


def two_graphs_of_one_pool(training: Training) -> Step:
    """The gradients in one graph and the optimizer in another, which share their memory."""
    inputs, targets = (tensor.cuda() for tensor in training.batches[0])
    gradients, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(gradients):
        loss: Tensor = training.model(inputs, targets)
        loss.backward()
    with torch.cuda.graph(update, pool=gradients.pool()):
        training.optimizer.step()

    def replay(new_inputs: Tensor, new_targets: Tensor) -> Tensor:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        gradients.replay()
        update.replay()
        return loss

    return replay


def graphed_callables(training: Training) -> Step:
    """torch's own graphs of the blocks' forward and backward, eager around them."""
    state = torch.cuda.get_rng_state()
    blocks = list(training.model.blocks)
    examples = tuple((torch.randn(8, 32, 64, device="cuda", requires_grad=True),) for _ in blocks)
    graphed: Any = torch.cuda.make_graphed_callables(tuple(blocks), examples)
    torch.cuda.set_rng_state(state)
    assert training.model.blocks[0] is graphed[0]
    return training.step


def compiled(training: Training) -> Step:
    forward: Any = torch.compile(training.model, backend="cudagraphs")

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        training.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = forward(inputs, targets)
        loss.backward()
        training.optimizer.step()
        return loss

    return step


def side_streams(training: Training) -> Step:
    """The copy of the batch on another stream, within the graph."""
    inputs, targets = (tensor.cuda() for tensor in training.batches[0])
    pinned = [tensor.clone().pin_memory() for tensor in training.batches[0]]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            inputs.copy_(pinned[0], non_blocking=True)
            targets.copy_(pinned[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        loss = training.step(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> Tensor:
        torch.cuda.synchronize()
        pinned[0].copy_(new_inputs)
        pinned[1].copy_(new_targets)
        graph.replay()
        return loss

    return replay


WAYS: dict[str, Callable[[Training], Step]] = {
    way.__name__: way
    for way in (whole_step, two_graphs_of_one_pool, graphed_callables, side_streams, compiled)
}


def train(way: Callable[[Training], Step]) -> dict[str, Tensor]:
    training = Training()
    training.warm_up()
    return training.run(way(training))


def many_tensors() -> None:
    """An operator whose record is too long for a kernel's parameter."""
    tensors = [torch.zeros(3, device="cuda") for _ in range(1000)]
    graph = torch.cuda.CUDAGraph()
    torch._foreach_add_(tensors, 1)
    with torch.cuda.graph(graph):
        torch._foreach_add_(tensors, 1)
    for _ in range(3):
        graph.replay()
    assert all(tensor.tolist() == [4, 4, 4] for tensor in tensors)


def other_generators() -> None:
    """Numbers of a generator that the graph was told of go on from launch to launch, as without a graph."""
    generator = torch.Generator("cuda").manual_seed(5)
    expected = [torch.rand(4, device="cuda", generator=generator) for _ in range(3)]
    generator.manual_seed(5)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        numbers = torch.rand(4, device="cuda", generator=generator)
    for wanted in expected:
        graph.replay()
        assert torch.equal(numbers, wanted)


def recurrent() -> None:
    model = nn.LSTM(8, 8).cuda()
    x = torch.randn(4, 2, 8, device="cuda")
    expected = model(x)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model(x)[0]
    graph.replay()
    assert torch.equal(outputs, expected)


def main() -> None:
    expected = train(eager)
    different = {}
    for name in sys.argv[1:]:
        found = train(WAYS[name])
        assert found.keys() == expected.keys()
        different[name] = [key for key in expected if not torch.equal(expected[key], found[key])]
    many_tensors()
    other_generators()
    recurrent()
    print(json.dumps(different))


if __name__ == "__main__":
    main()
