"""The state of all random number generators of a process: Python's, numpy's, torch's and the device's.

Taken several times in every minibatch, so it is made of bytes rather than of lists of numbers, and what has
not changed is not made anew.

Python's and numpy's generators are Mersenne Twisters: 624 numbers, and the index of the next to be drawn.
Every draw moves the index; after the last all numbers are made anew, and a seed makes all of them anew, too.
So the index and the first numbers tell whether anything has changed, and the other 2.4 kB, which are no
longer in the processor's caches, need not be read.
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
_NUMBER = 4  # bytes
_PEEKED = 16 * _NUMBER  # at the beginning of the state; the first number is the same for all seeds
_NUMPY_INDEX = 624 * _NUMBER  # where in the state it lies; in Python's it is the first


class RandomState:
    """Takes and puts back the state; `device`: the CUDA device, if there is one."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._python = _PythonState()
        self._numpy_generator: object = None
        self._numpy_address = 0  # of its state, if that is a Mersenne Twister's
        self._numpy_memory = b""
        self._numpy = Encoded(None, {})
        self._numpy_has_gauss = True
        # What the last capture returned, and of what it was made:
        self._captured = Encoded(None, {})
        self._raw: list[bytes] = []
        self._gauss: float | None = None
        self._from_numpy = self._captured

    def capture(self) -> Encoded:
        """Return the state now, under the name "random"; the same object while no generator is used."""
        version, numbers, gauss = self._python.capture()
        raw = [numbers, _bytes_of(torch.default_generator.get_state())]
        if self._device is not None:
            raw.append(_bytes_of(_generator_of(self._device).get_state()))
        from_numpy = self._capture_numpy()
        same_tree = (
            gauss is self._gauss
            and from_numpy is self._from_numpy
            and list(map(len, raw)) == list(map(len, self._raw))
        )
        if same_tree and raw == self._raw:
            return self._captured
        tree = self._captured.tree  # the same object as long as it says the same
        if not same_tree:
            tree = {
                "python": [version, tree_codec.encode(gauss, "random.gauss").tree],
                "sizes": [len(part) for part in raw],
                "raw": {"$tensor": "random.raw"},
                "numpy": from_numpy.tree,
            }
        data = torch.frombuffer(bytearray(b"".join(raw)), dtype=torch.uint8)
        self._captured = Encoded(tree, {"random.raw": data, **from_numpy.tensors})
        self._raw, self._gauss, self._from_numpy = raw, gauss, from_numpy
        return self._captured

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
        if generator is not self._numpy_generator:
            self._numpy_generator, self._numpy_address = generator, 0
            if type(generator) is numpy.random.MT19937:
                self._numpy_address = generator.ctypes.state_address
        memory = b""
        if self._numpy_address:
            memory = ctypes.string_at(self._numpy_address, _PEEKED)
            memory += ctypes.string_at(self._numpy_address + _NUMPY_INDEX, _NUMBER)
        if not memory or memory != self._numpy_memory or self._numpy_has_gauss:
            state: Any = numpy.random.get_state(legacy=False)
            self._numpy = tree_codec.encode(state, "random.numpy")
            self._numpy_memory, self._numpy_has_gauss = memory, bool(state["has_gauss"])
        return self._numpy


class _PythonState:
    """Python takes 20 us to tell its state, so it is asked only if the state in memory has changed."""

    def __init__(self) -> None:
        self._generator = getattr(random.getstate, "__self__", None)
        self._address = id(self._generator) + object.__basicsize__
        self._memory = b""
        self._numbers = b""
        self._version = 0
        # CPython keeps the next number's index and then the 624 numbers right behind the object's head.
        numbers = random.getstate()[1]
        self._readable = isinstance(self._generator, random.Random) and (
            type(self._generator).__basicsize__ > object.__basicsize__ + _PYTHON.size
            and self._read(_PYTHON.size) == _PYTHON.pack(numbers[-1], *numbers[:-1])
        )

    def capture(self) -> tuple[int, bytes, float | None]:
        """Return the version of its format, all numbers, and a normal number that is kept for later."""
        gauss = getattr(self._generator, "gauss_next", None)
        memory = self._read(_PEEKED) if self._readable else b""
        if not memory or memory != self._memory:
            self._version, numbers, gauss = random.getstate()
            self._numbers, self._memory = _PYTHON.pack(*numbers), memory
        return self._version, self._numbers, gauss

    def _read(self, size: int) -> bytes:
        return ctypes.string_at(self._address, size)


def _bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _generator_of(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
