"""The state of all random number generators of a process: Python's, numpy's, torch's and the device's.

Taken several times in every minibatch, so it is made of bytes rather than of lists of numbers, and what has
not changed is not made anew.

Python's, numpy's and torch's generators are Mersenne Twisters: 624 numbers, and the index of the next to be
drawn. Every draw moves the index; after the last all numbers are made anew, and a seed makes all of them
anew, too. So the index and the first numbers tell whether anything has changed, and the other 2.4 kB, which
are no longer in the processor's caches, need not be read.
"""

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from jitckpt._seen import Seen
from jitckpt.bindings import memory
from jitckpt.bindings.memory import Memory
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded

_PYTHON = struct.Struct("625I")
_NUMBER = 4  # bytes
_PEEKED = 16 * _NUMBER  # at the beginning of the state; the first number is the same for all seeds
_NUMPY_INDEX = 624 * _NUMBER  # where in the state it lies; in Python's it is the first
# What torch's generator tells: seed, numbers left, whether seeded, the index, all numbers, and five words of
# normal numbers kept for later.
_TORCH_KEPT = 5
_TORCH_KEPT_BYTES = 8 * _TORCH_KEPT
_TORCH = struct.Struct(f"=QiiQ624Q{_TORCH_KEPT}Q")
# In its memory: seed, numbers left, whether seeded (a byte of four), the index, the numbers, and a float and
# a double that are kept, each with whether it is.
_TORCH_HEAD = struct.Struct("=Qi")
_INDEX = struct.Struct("I")
_TORCH_BEFORE = 20
_TORCH_BEHIND = 24
_TORCH_SEARCHED = 624 * _NUMBER + 128  # no more than the object has
_COUNTER = struct.Struct("=QQ")  # what a device's generator tells
_ON_DEVICE = "random.device"


# Returns what returns a generator's seed and how far it has come, as _COUNTER has it, if it can be read so.
CounterOf = Callable[[torch.Generator], Callable[[], bytes] | None]


class RandomState:
    """Takes and puts back the state."""

    def __init__(self, device: torch.device | None, counter_of: CounterOf = lambda generator: None) -> None:
        """device: the CUDA device, if there is one. counter_of: asked of that one's generator."""
        self._device = device
        self._on_device = None if device is None else _DeviceState(device, counter_of)
        self._python = PythonState(getattr(random.getstate, "__self__", random))
        self._torch = TorchState(torch.default_generator)
        self._numpy = _NumpyState()
        # What the last capture returned, and of what it was made:
        self._captured = Encoded(None, {})
        self._raw: tuple[bytes, ...] = ()  # of Python's and torch's generators
        self._gauss: float | None = None
        self._from_numpy = self._captured
        self._from_device = b""
        self._seen: Seen | None = None  # tells when a generator on the host is used, where that can be told

    def capture(self) -> Encoded:
        """Return the state now, under the name "random"; the same object while no generator is used."""
        if self._seen is not None and self._seen.is_same():
            from_device = b"" if self._on_device is None else self._on_device.capture()
            if from_device != self._from_device:
                tree, tensors = self._captured
                self._captured = Encoded(tree, tensors | {_ON_DEVICE: _tensor_of(from_device)})
                self._from_device = from_device
            return self._captured
        seen = Seen()
        on_host = (self._python, self._torch, self._numpy)
        for one in on_host:
            one.look(seen)  # before it is asked, as another thread may use it in between
        self._captured = self._capture_all()
        self._seen = seen if all(one.is_told for one in on_host) else None
        return self._captured

    def _capture_all(self) -> Encoded:
        version, numbers, gauss = self._python.capture()
        raw = (numbers, self._torch.capture())
        from_numpy = self._numpy.capture()
        from_device = b"" if self._on_device is None else self._on_device.capture()
        tree, tensors = self._captured.tree, self._captured.tensors
        same_tree = gauss is self._gauss and from_numpy.tree is self._from_numpy.tree and bool(self._raw)
        if same_tree and raw == self._raw and from_numpy is self._from_numpy:
            if from_device == self._from_device:
                return self._captured
            tensors = tensors | {_ON_DEVICE: _tensor_of(from_device)}
        else:
            tensors = {"random.raw": _tensor_of(*raw), **from_numpy.tensors}
            if self._on_device is not None:
                tensors[_ON_DEVICE] = _tensor_of(from_device)
        if not same_tree:  # the same object as long as it says the same
            tree = {
                "python": [version, tree_codec.encode(gauss, "random.gauss").tree],
                "sizes": [len(part) for part in raw],
                "raw": {"$tensor": "random.raw"},
                "numpy": from_numpy.tree,
                "device": None if self._on_device is None else {"$tensor": _ON_DEVICE},
            }
        self._raw, self._gauss, self._from_numpy, self._from_device = raw, gauss, from_numpy, from_device
        return Encoded(tree, tensors)

    def unchanged(self) -> tuple[Seen | None, tuple[str, Callable[[], bytes]] | None]:
        """Return what tells that the generators on the host are as they were last captured, if anything does.

        And the name of the state of the device's, if there is one, and a function that returns its bytes.
        """
        return self._seen, None if self._on_device is None else (_ON_DEVICE, self._on_device.capture)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `capture` returned, decoded."""
        python, of_torch = state["raw"].split(state["sizes"])
        version, gauss = state["python"]
        random.setstate((version, _PYTHON.unpack(python.numpy().tobytes()), gauss))
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(of_torch.clone())
        if self._device is not None and state["device"] is not None:
            torch.cuda.set_rng_state(state["device"].clone(), self._device)


class _NumpyState:
    """Numpy takes 50 us to tell its state, so it is asked only if the state in memory has changed.

    A second normal number, kept for later, is not seen there: with one kept, it is asked in any case.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._peeked: list[Memory] = []  # of its state, if that is a Mersenne Twister's
        self._memory = b""
        self._state = Encoded(None, {})
        self._has_gauss = True

    def look(self, seen: Seen) -> None:
        """Look at what changes with every use of it."""
        seen.entry(vars(numpy.random.mtrand), "_rand")
        seen.attribute(numpy.random.mtrand._rand, "_bit_generator")
        generator = numpy.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator, self._peeked = generator, peeked(generator)
        _look_at(self._peeked, seen)

    @property
    def is_told(self) -> bool:
        """Whether what look() looks at gives any use of it away."""
        return bool(self._peeked) and not self._has_gauss

    def capture(self) -> Encoded:
        """Return the state of the generator that was looked at last."""
        memory = b"".join(self._peeked)
        if not memory or memory != self._memory or self._has_gauss:
            state: Any = numpy.random.get_state(legacy=False)
            self._state = tree_codec.encode(state, "random.numpy")
            self._memory, self._has_gauss = memory, bool(state["has_gauss"])
        return self._state


class PythonState:
    """Python takes 20 us to tell its state, so it is asked only if the state in memory has changed."""

    def __init__(self, generator: Any) -> None:
        """generator: a random.Random, or the module that tells of one."""
        self._generator = generator
        self._memory = b""
        self._numbers = b""
        self._version = 0
        self._peeked: Memory | None = None
        # CPython keeps the next number's index and then the 624 numbers right behind the object's head.
        numbers = self._generator.getstate()[1]
        if isinstance(self._generator, random.Random) and (
            type(self._generator).__basicsize__ > object.__basicsize__ + _PYTHON.size
        ):
            address = id(self._generator) + object.__basicsize__
            if memory.at(address, _PYTHON.size).raw == _PYTHON.pack(numbers[-1], *numbers[:-1]):
                self._peeked = memory.at(address, _PEEKED)

    def look(self, seen: Seen) -> None:
        """Look at what changes with every use of it."""
        if self._peeked is not None:
            seen.attribute(self._generator, "gauss_next")
            _look_at([self._peeked], seen)

    @property
    def is_told(self) -> bool:
        """Whether what look() looks at gives any use of it away."""
        return self._peeked is not None

    def capture(self) -> tuple[int, bytes, float | None]:
        """Return the version of its format, all numbers, and a normal number that is kept for later."""
        gauss = getattr(self._generator, "gauss_next", None)
        memory = self._peeked.raw if self._peeked else b""
        if not memory or memory != self._memory:
            self._version, numbers, gauss = self._generator.getstate()
            self._numbers, self._memory = _PYTHON.pack(*numbers), memory
        return self._version, self._numbers, gauss


class TorchState:
    """Torch takes 5 kB to tell its state, so it is asked only if the state in memory has changed.

    A second normal number, kept for later, may be used with no draw: with one kept, it is asked in any case.
    """

    def __init__(self, generator: torch.Generator) -> None:
        """generator: on the host."""
        self._generator = generator
        object_address: int = self._generator._cdata  # type: ignore[attr-defined]
        self._peeked: list[Memory] = []  # what changes with every draw and every seed, if it was found
        self._memory = b""
        self._look()
        if len(self._state) == _TORCH.size:
            seed, left, _, index, *numbers = _TORCH.unpack(self._state)[:-_TORCH_KEPT]
            head = _TORCH_HEAD.pack(seed, left) + b"\1"
            # C++ keeps the same in the generator's object, the numbers in half the space.
            searched = memory.at(object_address, _TORCH_SEARCHED).raw
            place = searched.find(struct.pack("624I", *numbers))
            begin = place - _TORCH_BEFORE
            if (
                begin > 0
                and searched[begin:].startswith(head)
                and _INDEX.unpack_from(searched, place - 4) == (index,)
            ):
                behind = object_address + place + 624 * _NUMBER
                before = memory.at(object_address + begin, _TORCH_BEFORE + _PEEKED)
                self._peeked = [before, memory.at(behind, _TORCH_BEHIND)]

    def look(self, seen: Seen) -> None:
        """Look at what changes with every use of it."""
        _look_at(self._peeked, seen)

    @property
    def is_told(self) -> bool:
        """Whether what look() looks at gives any use of it away."""
        return bool(self._peeked) and not self._keeps_normal

    def capture(self) -> bytes:
        """Return all that the generator's get_state says."""
        memory = b"".join(self._peeked)
        if not memory or memory != self._memory or self._keeps_normal:
            self._memory = memory
            self._look()
        return self._state

    def _look(self) -> None:
        self._state = _bytes_of(self._generator.get_state())
        self._keeps_normal = any(self._state[-_TORCH_KEPT_BYTES:])


class _DeviceState:
    """Of a CUDA device's generator, which counts: its state is a seed and how far it has come since."""

    def __init__(self, device: torch.device, counter_of: CounterOf) -> None:
        self._generator = generator = _generator_of(device)
        self._counted = (generator.initial_seed(), generator.get_offset())
        self._state = _bytes_of(generator.get_state())
        self._is_known = self._state == _COUNTER.pack(*self._counted)
        counter = counter_of(generator)
        # torch's own functions ask the device first whether it is captured, which takes longer than all else.
        self.capture = counter if counter is not None and counter() == self._state else self._ask

    def _ask(self) -> bytes:
        """Return all that the generator's get_state says, which takes three times as long."""
        generator = self._generator
        if not self._is_known:
            return _bytes_of(generator.get_state())
        counted = (generator.initial_seed(), generator.get_offset())
        if counted != self._counted:
            self._counted, self._state = counted, _COUNTER.pack(*counted)
        return self._state


def peeked(generator: Any) -> list[Memory]:
    """Return what changes with every use of one of numpy's bit generators; nothing if that is not known."""
    if type(generator) is not numpy.random.MT19937:
        return []
    address = generator.ctypes.state_address
    return [memory.at(address, _PEEKED), memory.at(address + _NUMPY_INDEX, _NUMBER)]


def _look_at(places: list[Memory], seen: Seen) -> None:
    for one in places:
        seen.memory(memory.address_of(one), len(one))


def _tensor_of(*parts: bytes) -> Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> bytes:
    return memory.bytes_at(tensor.data_ptr(), tensor.nbytes)


def _generator_of(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
