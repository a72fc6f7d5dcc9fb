"""The CUDA generator alone decides random numbers: same state, same numbers; the host's stays as it is."""

import torch
import torch.nn.functional as F
from models import GPT, batch
from torch.utils.checkpoint import checkpoint

ones = torch.ones(100, device="cuda")


def draw() -> list[torch.Tensor]:
    return [
        torch.rand(5, device="cuda"),
        torch.randn(5, device="cuda"),
        torch.randint(0, 100, (5,), device="cuda"),
        torch.randperm(9, device="cuda"),
        torch.bernoulli(ones * 0.5),
        torch.multinomial(ones, 5),
        torch.empty(5, device="cuda").exponential_(),
        torch.normal(ones, ones),
        F.dropout(ones, 0.5),
        F.rrelu(-ones, training=True),
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


torch.manual_seed(3)
first = draw()
state = torch.cuda.get_rng_state()
second = draw()
host = torch.random.get_rng_state()
assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "the state must move on"
torch.cuda.set_rng_state(state)
assert same(second, draw())
torch.manual_seed(3)
host_at_seed = torch.random.get_rng_state()
assert same(first, draw())
assert torch.equal(host_at_seed, torch.random.get_rng_state()), "the host's generator must stay as it is"

generator = torch.Generator(device="cuda").manual_seed(7)
numbers = torch.rand(5, device="cuda", generator=generator)
assert torch.equal(numbers, torch.rand(5, device="cuda", generator=generator.manual_seed(7)))
assert not torch.equal(numbers, torch.rand(5, device="cuda", generator=generator))
assert 0.3 < (F.dropout(torch.ones(10_000, device="cuda"), 0.5) == 0).float().mean().item() < 0.7


def gradients(recompute: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(dropout=0.3).cuda()
    inputs, targets = (tensor.cuda() for tensor in batch("gpt", torch.Generator().manual_seed(1)))
    loss = checkpoint(model, inputs, targets, use_reentrant=False) if recompute else model(inputs, targets)
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


assert same(gradients(recompute=False), gradients(recompute=True))
