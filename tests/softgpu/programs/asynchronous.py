"""The host runs ahead: a whole training step is launched while the stream is blocked, and still is right."""

import ctypes
import threading

import torch
from models import GPT, batch


def block(stream: torch.cuda.Stream) -> tuple[threading.Event, object]:
    """Blocks the stream until the event is set; the other object must live until then."""
    released = threading.Event()

    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait())
    assert ctypes.CDLL(None).cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), wait, None) == 0
    return released, wait


def make(device: str) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def step(model: GPT, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs, targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


inputs, targets = batch("gpt", torch.Generator().manual_seed(1))
on_host, on_device = make("cpu"), make("cuda")
device_batch = inputs.cuda(), targets.cuda()
released, keep = block(torch.cuda.current_stream())
done = torch.cuda.Event()
for _ in range(2):
    step(*on_device, *device_batch)
done.record()
assert not done.query(), "the stream should still be blocked"
released.set()
torch.cuda.synchronize()
for _ in range(2):
    step(*on_host, inputs, targets)
for expected, actual in zip(on_host[0].parameters(), on_device[0].parameters(), strict=True):
    assert torch.equal(expected, actual.cpu())
