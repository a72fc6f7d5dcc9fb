"""Operators whose CUDA side is special give what the CPU gives."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

host = torch.Generator().manual_seed(0)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Tensor:
    """New ones at each call, or always the same for a seed."""
    generator = host if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.is_cuda
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.detach().cpu(), expected.detach())
    assert actual.stride() == expected.stride() or actual.numel() < 2


x = values(4, 6)
d = x.cuda()

# Copies: any strides, types and devices.
check(d.t().contiguous(), x.t().contiguous())
check(d.to(torch.float16), x.to(torch.float16))
target = torch.zeros(6, 4, device="cuda")
target.t().copy_(x)
check(target, x.t().contiguous())
strided = torch.zeros(4, 12, device="cuda:1")
strided[:, ::2].copy_(d)
assert torch.equal(strided[:, ::2].cpu(), x)
check(d.to("cuda:1", torch.float64), x.double())
pinned = x.pin_memory()
check(pinned.to("cuda", non_blocking=True), x)
back = torch.empty(4, 6).pin_memory()
back.copy_(d, non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(back, x)
assert torch.equal(d[:, 1].to("cpu", torch.float64), x[:, 1].double())
targets = [torch.empty(3, device="cuda"), torch.empty(3, device="cuda")]
torch._foreach_copy_(targets, [torch.ones(3), torch.full((3,), 2.0, device="cuda")])
assert [tensor.sum().item() for tensor in targets] == [3, 6]
pairs = (torch.view_as_complex(tensor.view(4, 3, 2)) for tensor in (d, x))
check(*(pair.conj().clone() for pair in pairs))

# Aliases stay aliases.
view = d[1]
view.mul_(2)
assert torch.equal(d[1].cpu(), x[1] * 2)
view.mul_(0.5)
d.add_(d)
assert torch.equal(d.cpu(), x + x)
d.copy_(x)

# Argument lists of all lengths: a record may be longer than a kernel's parameters.
for count in (1, 30, 120, 400, 2000):
    many = [torch.full((2,), float(number), device="cuda") for number in range(count)]
    torch._foreach_add_(many, [float(number) for number in range(count)])
    assert torch.equal(torch.stack(many).cpu(), 2 * torch.arange(count).float()[:, None].expand(count, 2))

# Indices from the host, masks, shapes that depend on data.
check(d[torch.tensor([2, 0])], x[[2, 0]])
check(d[d > 0], x[x > 0])
masked = d.clone()
masked[d > 0] = torch.arange(int((x > 0).sum()), device="cuda", dtype=torch.float32)
expected = x.clone()
expected[x > 0] = torch.arange(int((x > 0).sum()), dtype=torch.float32)
check(masked, expected)
check(torch.nonzero(d > 0), torch.nonzero(x > 0))
repeated = torch.tensor([3, 1, 3, 2], device="cuda")
for actual, wanted in zip(
    torch.unique(repeated, return_counts=True), torch.unique(repeated.cpu(), return_counts=True), strict=True
):
    check(actual, wanted)
check(torch._unique(repeated)[0], torch._unique(repeated.cpu())[0])
matrix = values(3, 3)
factors, pivots = torch.linalg.lu_factor(matrix.cuda())
check(
    torch.linalg.lu_solve(factors, pivots, d[:3]),
    torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), x[:3]),
)
tall = values(4, 3)  # the solution's strides have holes
solution = torch.linalg.lstsq(tall, x[:, :2], driver="gels").solution
check(torch.linalg.lstsq(tall.cuda(), d[:, :2], driver="gels").solution, solution)
check(torch.bincount(repeated), torch.bincount(repeated.cpu()))
check(torch.masked_select(d, d > 0), torch.masked_select(x, x > 0))
assert torch.equal(d, d)
assert not torch.equal(d, d + 1)

# out= arguments are resized on the device.
check(torch.arange(2, 9, 3, device="cuda"), torch.arange(2, 9, 3))
out = torch.empty(0, device="cuda")
torch.add(d, 1, out=out)
check(out, x + 1)
found = torch.empty(0, dtype=torch.int64, device="cuda")
torch.nonzero(d > 0, out=found)
check(found, torch.nonzero(x > 0))

modes = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
torch.mode(d, out=modes)
check(modes[0], torch.mode(x)[0])

# A kernel may return a conjugate that it has not computed.
first, second = torch.view_as_complex(values(5, 2)), torch.view_as_complex(values(5, 2))
check(torch.vdot(first.cuda(), second.cuda().conj()), torch.vdot(first, second.conj()).resolve_conj())

# CUDA's own ways of half precision.
half = values(5, 7, dtype=torch.float16)
on_device, on_host = half.cuda().requires_grad_(), half.clone().requires_grad_()
weights = values(5, 7)
(F.softmax(on_device, -1, dtype=torch.float32) * weights.cuda()).sum().backward()
(F.softmax(on_host.float(), -1) * weights).sum().backward()
assert on_device.grad is not None
assert on_host.grad is not None
check(on_device.grad, on_host.grad)
check(torch.mm(half.cuda(), half.cuda().t(), out_dtype=torch.float32), half.float() @ half.float().t())


# Where torch composes an operator or its gradient differently on CUDA, the CPU's way is taken.
def losses(device: str) -> list[Tensor]:
    inputs = values(6, 2, 5, seed=2).to(device).requires_grad_()
    labels = torch.tensor([[1, 2, 3], [4, 1, 1]], device=device)
    lengths = torch.tensor([6, 5]), torch.tensor([3, 2])
    loss = F.ctc_loss(inputs.log_softmax(-1), labels, *lengths)
    (loss + torch.renorm(inputs, 2, 1, 0.5).square().sum()).backward()
    assert inputs.grad is not None
    return [loss, inputs.grad]


for actual, expected in zip(losses("cuda"), losses("cpu"), strict=True):
    check(actual, expected)
grown = d.clone().requires_grad_()
(slope,) = torch.autograd.grad(torch.renorm(grown, 2, 1, 0.5).sum(), grown)
assert not slope.requires_grad
try:
    torch.autograd.grad(torch.renorm(grown, 2, 1, 0.5).sum(), grown, create_graph=True)
except NotImplementedError as error:
    assert "softgpu has no gradient of the gradient of aten::renorm" in str(error)  # noqa: PT017
else:
    raise AssertionError("a second gradient would be wrong in silence")


# Attention: causal, masked; every backend, of which the host has one and the unfused way.
FUSED = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
HOSTS = dict.fromkeys(FUSED, SDPBackend.FLASH_ATTENTION) | {SDPBackend.MATH: SDPBackend.MATH}


def attention(
    device: str, backend: SDPBackend, masked: bool, is_causal: bool, scale: float | None
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 16, 12)] * 3
    query, key, value = (
        torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes
    )
    mask = (torch.rand(16, 16, generator=generator) > 0.3).to(device) if masked else None
    with sdpa_kernel(backend):
        result = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    result.square().sum().backward()
    return [result, *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)]


for options in ((False, False, None), (False, True, None), (True, False, None), (False, False, 0.3)):
    for backend, hosts in HOSTS.items():
        given, wanted_there = attention("cuda", backend, *options), attention("cpu", hosts, *options)
        for actual, expected in zip(given, wanted_there, strict=True):
            check(actual, expected)
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # also with dropout
    one = torch.ones(1, 1, 8, 8, device="cuda")
    dropped = F.scaled_dot_product_attention(one, one, one, dropout_p=0.5)
assert dropped.unique().numel() > 1


# The same by the operators' own names.
def named_attention(name: str, *arguments: object) -> list[Tensor]:
    query, key, value = (values(1, 2, 8, 16, seed=seed).cuda().requires_grad_() for seed in range(3))
    result = getattr(torch.ops.aten, name)(query, key, value, *arguments)[0]
    result.square().sum().backward()
    return [result, *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)]


fused = named_attention("_scaled_dot_product_flash_attention")
query, key, value = (values(1, 2, 8, 16, seed=seed) for seed in range(3))
check(fused[0], F.scaled_dot_product_attention(query, key, value))
for name, arguments in {
    "_scaled_dot_product_efficient_attention": (None, True),
    "_scaled_dot_product_cudnn_attention": (None, True),
    "_scaled_dot_product_fused_attention_overrideable": (),
}.items():
    for actual, wanted in zip(named_attention(name, *arguments), fused, strict=True):
        check(actual, wanted.detach().cpu())

# A program may switch cuDNN on.
torch.backends.cudnn.enabled = True
norm, images = torch.nn.BatchNorm2d(3), values(2, 3, 4, 4)
device_norm = torch.nn.BatchNorm2d(3).cuda()
norm(images).square().sum().backward()
device_norm(images.cuda()).square().sum().backward()
assert norm.weight.grad is not None
assert device_norm.weight.grad is not None
check(device_norm.weight.grad, norm.weight.grad)
assert device_norm.running_var is not None
assert norm.running_var is not None
check(device_norm.running_var, norm.running_var)
lstm = torch.nn.LSTM(6, 5)
steps = values(3, 2, 6)
check(torch.nn.LSTM(6, 5).cuda().requires_grad_(False)(steps.cuda())[0] * 0, lstm(steps)[0] * 0)
dropping = torch.nn.LSTM(6, 5, num_layers=2, dropout=0.5).cuda()
dropping(steps.cuda())[0].sum().backward()
assert all(parameter.grad is not None for parameter in dropping.parameters())
torch.backends.cudnn.enabled = False

# What is written to lists is counted, as CUDA's kernels do it.
lists = [torch.ones(3, device="cuda") for _ in range(2)]
writes: list[Callable[[], object]] = [
    lambda: torch._foreach_add_(lists, 1),
    lambda: torch._foreach_lerp_(lists, lists[::-1], 0.5),
    lambda: torch._foreach_copy_(lists, lists[::-1]),
    lambda: torch._foreach_zero_(lists),
]
for count, write in enumerate(writes, start=1):
    write()
    assert [one._version for one in lists] == [count, count]
