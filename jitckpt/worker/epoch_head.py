"""What a script computes in an epoch outside of its loops: a restart in that epoch computes it again.

By then the parameters are those of the epoch's middle, so a copy of the model for distillation, or weights by
its losses, come out otherwise. What the loop does not change is not kept as a variable; so digests are kept
with the loop's place, and a restart that finds another value says so.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.hooks.gradients_read import GradientsRead
from jitckpt.system.bytecode import place_in
from jitckpt.worker import carried_names
from jitckpt.worker.as_restored import sums
from jitckpt.worker.frames import is_scripts, variables_of
from jitckpt.worker.script_variables import CLOCK_SECONDS, CLOCKS
from jitckpt.worker.value_marks import MOST_BYTES

DEPTH = 2  # of lists and dicts
MOST_PARTS = 1000  # of one of them
PLAIN = (bool, int, float, complex, str, type(None))

OTHERWISE = (
    "What the script computes in an epoch before its batches or steps, or between two loops over such, came "
    "out otherwise than before the failure: {names}. A restart in the middle of an epoch does it again, with "
    "the parameters of the middle. If the training depends on it, this run differs from an undisturbed one "
    "from here on: compute it from the epoch's number alone, or keep it in `extra`."
)
GRADIENTS = (
    "Outside of its loops over batches or steps the script reads gradients that the last minibatch has left "
    "({name}). No save holds them: after a failure there they are None. Read them in the loop, and keep what "
    "the training goes on with in `extra`; or clear them first (optimizer.zero_grad())."
)


class EpochHead:
    """Of one job. Told as the script comes out of its loops, and as it begins one, in the script's frames."""

    def __init__(
        self,
        given: Iterable[object],
        trained: Callable[[], Mapping[str, Tensor]],
        warn: Callable[[str], None],
        loop_begins: Callable[[], None] = lambda: None,
        is_put_back: Callable[[FrameType, str], bool] = lambda frame, name: False,
    ) -> None:
        """given: objects whose state is kept by others. trained: returns the parameters, by name.

        loop_begins: called as the script begins a loop. is_put_back: whether a restart puts this name's value
        back behind what the script computes, so that it does not matter how that comes out.
        """
        self._is_put_back = is_put_back
        self._loop_begins = loop_begins
        self._given, self._trained, self._warn = [*given], trained, warn
        self._gradients = GradientsRead(is_scripts, lambda name: warn(GRADIENTS.format(name=name)))
        self._frame: tuple[int, object] | None = None  # the one with the loop over epochs: its id and code
        self._before: dict[str, int] = {}  # of its variables, the ids of their values as it came out of them

    def epoch_begins(self, frame: FrameType) -> None:
        """An epoch is given to this frame."""
        self._frame = id(frame), frame.f_code

    def begins(self) -> None:
        """The script is in none of its epoch's loops from here on."""
        frame = self._found()
        self._before = {} if frame is None else {name: id(one) for name, one in variables_of(frame).items()}
        self._gradients.begins(self._trained)

    def end(self) -> None:
        """Look no more."""
        self._gradients.ends()

    def digests(self) -> dict[str, str]:
        """Return digests, by name, of what was computed since then: a loop begins."""
        self._loop_begins()
        self._gradients.ends()
        frame, before = self._found(), self._before
        self._before = {}
        if frame is None or not is_scripts(frame):
            return {}
        kept = _memory_of(self._given)
        found = {}
        read = carried_names.read_later(frame.f_code, place_in(frame))
        for name, value in variables_of(frame).items():
            if name in read and before.get(name) != id(value):
                with suppress(Exception):  # what can't be read is not compared, and no harm to the training
                    if parts := [*_parts(value, kept)]:
                        found[name] = xxhash.xxh3_64_hexdigest(repr(parts).encode())
        return found

    def _found(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (id(frame), frame.f_code) != self._frame:
            frame = frame.f_back
        return frame

    def compare(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Say what is another since the failure."""
        names = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
        if (frame := self._found()) is not None:
            names = [name for name in names if not self._is_put_back(frame, name)]
        if names:
            self._warn(OTHERWISE.format(names=", ".join(names[:8]) + (" ..." if names[8:] else "")))


def _parts(value: Any, kept: set[int], depth: int = DEPTH) -> Iterator[object]:
    """Yield what tells a value's content; nothing of one that others keep, or that can't be told."""
    if isinstance(value, PLAIN):
        if not (type(value) is float and any(abs(value - clock()) < CLOCK_SECONDS for clock in CLOCKS)):
            yield value
    elif isinstance(value, nn.Module):
        tensors = enumerate(_tensors_of(value))
        own = {str(number): one.detach() for number, one in tensors if _place(one) not in kept}
        yield from sums(own)
    elif isinstance(value, Tensor):
        if _place(value) not in kept:
            yield value.shape, sums({"": value.detach()})
    elif isinstance(value, numpy.ndarray):
        if not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            yield value.shape, xxhash.xxh3_64_hexdigest(numpy.ascontiguousarray(value).view(numpy.uint8).data)
    elif type(value) in (list, tuple, dict) and depth and len(value) <= MOST_PARTS:
        for one in value.items() if isinstance(value, dict) else value:
            yield from _parts(one, kept, depth - 1 if not isinstance(value, dict) else depth)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    # By torch's class: Megatron's DDP has a list in the place of the method `buffers`.
    return [*nn.Module.parameters(module), *nn.Module.buffers(module)]


def _place(tensor: Tensor) -> int:
    """Return what tensors with the same memory have in common."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # one that has no memory of its own
        return id(tensor)


def _memory_of(given: Iterable[object]) -> set[int]:
    found: set[int] = set()
    for one in given:
        if isinstance(one, nn.Module):
            found |= {_place(tensor) for tensor in _tensors_of(one)}
        if isinstance(one, Optimizer):
            values = [value for state in one.state.values() for value in state.values()]
            found |= {_place(value) for value in values if isinstance(value, Tensor)}
    return found
