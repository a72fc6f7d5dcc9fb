"""Buffers come off the device as they are after each step, however they lie there."""

import ctypes
import os

import torch
from torch import Tensor, nn

from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves.layout import Identity
from jitckpt.state.model_state import ModelState

TO_HOST = 2  # cudaMemcpyDeviceToHost


def write_area(area: tuple[int, int], value: int, source: tuple[int, int], stream: int) -> None:
    torch.cuda.synchronize()
    copy, (words, target), (start, size) = ctypes.CDLL(None).cudaMemcpy, area, source
    assert copy(ctypes.c_void_p(target), ctypes.c_void_p(start), ctypes.c_size_t(size), TO_HOST) == 0
    (ctypes.c_uint64 * 2).from_address(words)[:] = [value, value]


def model_with(buffers: dict[str, Tensor]) -> nn.Module:
    model = nn.Module()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def kept(memory: int) -> dict[str, Tensor]:
    return local_state.read(memory)[0].tensors


def check(buffers: dict[str, Tensor]) -> None:
    model = model_with(buffers)
    state, memory = ModelState(model), local_state.create()
    recorder = Recorder(Ring(memory, Identity("j", "f", 1, 0, 0, 1), 4, 2 << 20), write_area, print)

    def write(step: int) -> None:
        recorder.write(step, final=True, parts={"buffers": state.capture_buffers()})
        for name, buffer in model.named_buffers():
            assert torch.equal(kept(memory)[f"buffers.{name}"], buffer.cpu()), (step, name)

    for step in range(1, 7):
        for buffer in model.buffers():
            buffer.add_(step)
        write(step)
    same = state.capture_buffers()
    assert state.capture_buffers() is same
    first, value = next(iter(model.named_buffers()))
    setattr(model, first, value.clone() * 2)  # another tensor under the same name
    assert state.capture_buffers() is not same
    write(7)
    value.data = torch.ones(4, dtype=value.dtype, device="cuda")
    setattr(model, first, value)  # the same object, and other memory
    write(8)
    value.fill_(5)
    write(9)
    os.close(memory)


def main() -> None:
    check({"one": torch.arange(6.0, device="cuda")})
    check({"turned": torch.arange(6.0, device="cuda").view(2, 3).t()})
    check(
        {"narrow": torch.ones(3, dtype=torch.float16, device="cuda"), "count": torch.tensor(3, device="cuda")}
    )
    turned = torch.ones(2, 2, dtype=torch.complex64, device="cuda")
    check({"conjugate": (turned * 1j).conj(), "plain": turned})


main()
