"""Operators whose CUDA side is special give what the CPU gives."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

host = torch.Generator().manual_seed(0)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=host).to(dtype)


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


# Attention: causal, masked, grouped; every backend that the host has.
def attention(device: str, masked: bool, is_causal: bool, scale: float | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 16, 12)] * 3
    query, key, value = (
        torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes
    )
    mask = (torch.rand(16, 16, generator=generator) > 0.3).to(device) if masked else None
    result = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    result.square().sum().backward()
    return [result, *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)]


for options in ((False, False, None), (False, True, None), (True, False, None), (False, False, 0.3)):
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            for actual, wanted in zip(attention("cuda", *options), attention("cpu", *options), strict=True):
                check(actual, wanted)
query = values(1, 2, 8, 16)
named = torch.ops.aten._scaled_dot_product_flash_attention(query.cuda(), query.cuda(), query.cuda())[0]
check(named, F.scaled_dot_product_attention(query, query, query))

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
