"""The state of all random number generators of a process: Python's, numpy's, torch's and the device's.

Taken several times in every minibatch, so it is made of bytes rather than of lists of numbers.
"""

import ctypes
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from jitckpt import tree_codec
from jitckpt.tree_codec import Encoded

_PYTHON = struct.Struct("625I")
_NUMPY_BYTES = 625 * 4  # of the Mersenne Twister's state in memory


class RandomState:
    """Takes and puts back the state; `device`: the CUDA device, if there is one."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._numpy_memory = b""
        self._numpy = Encoded(None, {})
        self._numpy_has_gauss = True

    def capture(self) -> Encoded:
        """Return the state now, under the name "random"."""
        version, numbers, gauss = random.getstate()
        raw = [_PYTHON.pack(*numbers), torch.get_rng_state().numpy().tobytes()]
        if self._device is not None:
            raw.append(torch.cuda.get_rng_state(self._device).numpy().tobytes())
        from_numpy = self._capture_numpy()
        tree = {
            "python": [version, tree_codec.encode(gauss, "random.gauss").tree],
            "sizes": [len(part) for part in raw],
            "raw": {"$tensor": "random.raw"},
            "numpy": from_numpy.tree,
        }
        data = torch.frombuffer(bytearray(b"".join(raw)), dtype=torch.uint8)
        return Encoded(tree, {"random.raw": data, **from_numpy.tensors})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `capture` returned, decoded."""
        parts: list[Tensor] = list(state["raw"].split(state["sizes"]))
        version, gauss = state["python"]
        random.setstate((version, _PYTHON.unpack(parts[0].numpy().tobytes()), gauss))
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(parts[1].clone())
        if self._device is not None and len(parts) > 2:
            torch.cuda.set_rng_state(parts[2].clone(), self._device)

    def _capture_numpy(self) -> Encoded:
        """Numpy takes 50 us to tell its state, so it is asked only if the state in memory has changed.

        A second normal number, kept for later, is not seen there: with one kept, it is asked in any case.
        """
        generator = numpy.random.mtrand._rand._bit_generator
        memory = b""
        if type(generator) is numpy.random.MT19937:
            memory = ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)
        if not memory or memory != self._numpy_memory or self._numpy_has_gauss:
            state: Any = numpy.random.get_state(legacy=False)
            self._numpy = tree_codec.encode(state, "random.numpy")
            self._numpy_memory, self._numpy_has_gauss = memory, bool(state["has_gauss"])
        return self._numpy
