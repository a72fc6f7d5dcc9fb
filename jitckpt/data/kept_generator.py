"""The state of a generator of random numbers that the script has made itself, taken in every minibatch."""

import random
from typing import Any

import numpy
import torch
from torch import Tensor

from jitckpt.data.random_state import PythonState, TorchState, peeked
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, Json

GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


class KeptGenerator:
    """Of Python's, numpy's or torch's."""

    def __init__(self, generator: Any, name: str) -> None:
        """name: begins the names of its tensors."""
        self.generator, self._name = generator, name
        self._fast: PythonState | TorchState | None = None
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            self._fast = TorchState(generator)
        elif type(generator) is random.Random:
            self._fast = PythonState(generator)
        self._peeked = peeked(
            generator._bit_generator
            if isinstance(generator, numpy.random.RandomState)
            else getattr(generator, "bit_generator", None)
        )
        self._told: object = None
        self._has_gauss = False
        self._encoded = Encoded(None, {})

    def capture(self) -> Encoded:
        """Return the state now; the same object while the generator is not used."""
        told: object = self._fast.capture() if self._fast is not None else b"".join(self._peeked)
        is_told = (self._fast is not None or told) and not self._has_gauss
        if is_told and told == self._told:
            return self._encoded
        self._told = told
        now = self._of_bytes(told) if self._fast is not None else self._of_state()
        if not _are_same(now, self._encoded):
            self._encoded = now
        return self._encoded

    def _of_bytes(self, told: Any) -> Encoded:
        if isinstance(told, bytes):
            return Encoded({"$tensor": self._name}, {self._name: _tensor_of(told)})
        version, numbers, gauss = told
        tree: Json = {"version": version, "numbers": {"$tensor": self._name}}
        tree["gauss"] = tree_codec.encode(gauss, self._name).tree
        return Encoded(tree, {self._name: _tensor_of(numbers)})

    def _of_state(self) -> Encoded:
        state = state_of(self.generator)
        # A normal number that is kept for later may be used with no draw.
        self._has_gauss = isinstance(state, dict) and bool(state.get("has_gauss"))
        return tree_codec.encode(state, self._name)

    def restore(self, saved: Any) -> None:
        """Put back what `capture` returned, decoded."""
        if isinstance(saved, dict) and "numbers" in saved:  # of Python's
            numbers = memoryview(saved["numbers"].numpy().tobytes()).cast("I")
            saved = saved["version"], (*numbers,), saved["gauss"]
        put_state(self.generator, saved)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _are_same(one: Encoded, other: Encoded) -> bool:
    return one.tree == other.tree and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


def state_of(generator: Any) -> Any:
    """Return the state of a generator of Python's, numpy's or torch's."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def put_state(generator: Any, saved: Any) -> None:
    """Put back what `state_of` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(saved)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = saved
    else:
        generator.set_state(saved)
