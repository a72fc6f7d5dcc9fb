"""What training scripts use beside operators: loaders, events, statistics, profilers, generators."""

import torch
from models import GPT, batch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def loaded(workers: int, pin: bool) -> list[Tensor]:
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24))
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(data, 4, shuffle=True, generator=order, num_workers=workers, pin_memory=pin)
    moved = []
    for part in loader:
        assert all(tensor.is_pinned() == pin for tensor in part)
        moved += [tensor.cuda(non_blocking=True) for tensor in part]
    return [tensor.cpu() for tensor in moved]


for one, other in zip(loaded(0, pin=False), loaded(2, pin=True), strict=True):
    assert torch.equal(one, other)

# Events tell how long the stream took between them, in milliseconds.
x = torch.randn(200, 200, device="cuda")
first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
first.record()
for _ in range(3):
    y = x @ x
middle.record()
for _ in range(30):
    y = y @ x / 200
last.record()
last.synchronize()
assert 0 < first.elapsed_time(middle) < first.elapsed_time(last)
parts = first.elapsed_time(middle) + middle.elapsed_time(last)
assert abs(parts - first.elapsed_time(last)) < 0.01

# The allocator's statistics.
before = torch.cuda.memory_allocated()
large = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() - before == 4 << 20
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
assert "Allocated memory" in torch.cuda.memory_summary()
del large
assert torch.cuda.memory_allocated() == before

# Profilers see the operators, with CUDA's activities asked for or not.
for activities in ([ProfilerActivity.CPU], [ProfilerActivity.CPU, ProfilerActivity.CUDA]):
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profile:
        (x @ x).sum()
        torch.cuda.synchronize()
    assert {"aten::mm", "aten::sum"} <= {event.key for event in profile.key_averages()}
    assert "aten::mm" in profile.key_averages().table()
with torch.autograd.profiler.profile(use_device="cuda"):
    (x @ x).sum().item()
torch.cuda.nvtx.range_push("named")
torch.cuda.nvtx.range_pop()


# Recomputation draws the numbers of the first run, and leaves the generator where that left it.
def train(recompute: bool, reentrant: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = GPT(dropout=0.3).cuda()
    inputs, targets = (tensor.cuda() for tensor in batch("gpt", torch.Generator().manual_seed(1)))
    if recompute:
        embedded = torch.zeros((), device="cuda", requires_grad=True)  # what reentrant checkpoints go by
        loss = checkpoint(
            lambda _: model(inputs, targets), embedded, use_reentrant=reentrant, preserve_rng_state=True
        )
    else:
        loss = model(inputs, targets)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, torch.rand(3, device="cuda"), torch.cuda.get_rng_state()]


plain = train(recompute=False)
for reentrant in (False, True):
    recomputed = train(recompute=True, reentrant=reentrant)
    assert len(recomputed) == len(plain) > 10
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))

# Each device has a generator; the state of one is that of all of its copies.
torch.cuda.manual_seed_all(5)
assert torch.equal(torch.rand(4, device="cuda:0").cpu(), torch.rand(4, device="cuda:1").cpu())
states = torch.cuda.get_rng_state_all()
drawn = [torch.rand(4, device=f"cuda:{device}").cpu() for device in range(2)]
torch.cuda.set_rng_state_all(states)
assert all(torch.equal(torch.rand(4, device=f"cuda:{d}").cpu(), drawn[d]) for d in range(2))
generator = torch.Generator(device="cuda").manual_seed(9)
state = generator.get_state()
numbers = torch.randn(6, generator=generator, device="cuda")
assert torch.equal(numbers, torch.randn(6, generator=generator.set_state(state), device="cuda"))
