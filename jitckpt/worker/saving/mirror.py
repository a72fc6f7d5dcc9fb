"""Copies in host memory of what a training changes outside of its optimizer steps, as each minibatch began.

Sharpness-aware steps, adversarial perturbation and closures that are called again and again leave a device
whose values are those of no minibatch when a failure comes. So what they change is copied before, in the
order of the stream, into two sets of page-locked buffers in turn: while one is written the other is whole. A
word that the device writes behind its copies tells which.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; no element is wider
KEPT_STEPS = 128  # the host is never so far ahead of the device


class Mirror:
    """Filled by the training thread, read by the saver while the device rests."""

    def __init__(self, write_word: Callable[[int, int, int], None], stream: Callable[[], int]) -> None:
        """write_word(address, value, stream): have the device write 8 bytes in the order of the stream."""
        self._write_word, self._stream = write_word, stream
        self._words: Tensor | None = None  # of each set, the step whose copies are there, and one more
        self._sets = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._copies: dict[int, dict[str, Tensor]] = {}  # by step: the host may be many ahead of the device

    def take(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Enqueue copies of these tensors, which are as they are after `step`; never waits for the device."""
        if self._words is None:
            self._words = torch.zeros(2, dtype=torch.int64, pin_memory=True, device="cpu")
        turn = step % 2
        size = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        if (
            tensors and self._sets[turn].numel() != size
        ):  # the old one stays as long as copies of steps in it are known
            self._sets[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=size > 0, device="cpu")
        address = self._words.data_ptr() + turn * self._words.element_size()
        self._write_word(address, 0, self._stream())  # what was there is whole no longer
        copies: dict[str, Tensor] = {}
        offset = 0
        with torch.no_grad():
            for name, tensor in tensors.items():
                place = self._sets[turn][offset : offset + tensor.nbytes]
                copies[name] = place.view(tensor.dtype).view(tensor.shape)
                copies[name].copy_(tensor, non_blocking=True)
                offset += _aligned(tensor.nbytes)
        self._copies[step] = copies
        self._copies.pop(step - KEPT_STEPS, None)
        self._write_word(address, step + 1, self._stream())

    def of(self, step: int) -> dict[str, Tensor] | None:
        """Return the copies as of `step`, if the device has made them all and none of the next but one."""
        is_there = self._words is not None and int(self._words[step % 2]) == step + 1
        return self._copies.get(step) if is_there else None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
