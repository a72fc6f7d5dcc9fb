"""From the device to a file through a few host buffers: one is filled, one hashed and one written at a time.

The buffers are page-locked and made before they are needed: to make them while a device hangs may hang as
well, and copies into other memory are slower and can't run beside the host's work. Nothing is allocated on
the device.
"""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BUFFER_BYTES = 4 << 20
DEFAULT_BYTES = 64 << 20
Sink = Callable[[memoryview], object]


class Staging:
    """Host buffers for one stream of bytes at a time, each of at most BUFFER_BYTES; at least three."""

    def __init__(self, size: int = DEFAULT_BYTES, *, pinned: bool = False) -> None:
        """size: bytes in all. pinned: page-locked, which needs a device that answers, torch's current one."""
        count = max(3, size // BUFFER_BYTES)
        each = max(1, min(BUFFER_BYTES, size // count))
        self.buffers = [
            torch.empty(each, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(count)
        ]
        self.device = torch.device("cuda", torch.cuda.current_device()) if pinned else None
        # After which a buffer is filled from that device. Torch makes an event when it is first recorded.
        self.filled = [torch.cuda.Event() for _ in self.buffers] if pinned else []
        for event in self.filled:
            event.record()


class StagedWriter:
    """Puts tensors' bytes, one after another, into `sink`, which is called on a thread of its own.

    Leave the `with` statement to wait for the rest. What `sink` raises is raised by `add`, or on leaving.
    """

    def __init__(self, sink: Sink, staging: Staging, show: Sink = lambda piece: None) -> None:
        """show: is given every piece before, on the caller's thread, while the next one is on its way."""
        self._sink, self._staging, self._show = sink, staging, show
        self._free: queue.LifoQueue[int] = queue.LifoQueue()  # buffers by their numbers, the warmest first
        for number in range(len(staging.buffers)):
            self._free.put(number)
        self._full: queue.SimpleQueue[tuple[int, memoryview] | None] = queue.SimpleQueue()
        self._current, self._used = self._free.get(), 0
        self._on_its_way = False  # what some of the current buffer will hold
        self._newest: _Full | None = None  # neither shown nor given to the thread yet
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="jitckpt-writer", daemon=True)

    def __enter__(self) -> "StagedWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._hand_over()
                self._pass_on()
        finally:
            self._full.put(None)
            self._thread.join()
        if kind is None:
            self._raise()

    def add(self, data: Tensor) -> None:
        """Append the bytes of a contiguous one-dimensional tensor of uint8, on the host or a device.

        A device tensor must not change until the `with` statement has been left.
        """
        begin = 0
        while begin < data.numel():
            buffer = self._staging.buffers[self._current]
            count = min(data.numel() - begin, buffer.numel() - self._used)
            piece = buffer[self._used : self._used + count]
            later = data.device == self._staging.device
            piece.copy_(data[begin : begin + count], non_blocking=later)
            self._on_its_way |= later
            begin, self._used = begin + count, self._used + count
            if self._used == buffer.numel():
                self._hand_over()
                self._raise()

    def _hand_over(self) -> None:
        if self._used == 0:
            return
        filled = None
        if self._on_its_way:
            filled = self._staging.filled[self._current]
            filled.record(torch.cuda.current_stream(self._staging.device))
        self._pass_on()
        self._newest = _Full(self._current, self._used, filled)
        self._current, self._used, self._on_its_way = self._free.get(), 0, False

    def _pass_on(self) -> None:
        if self._newest is None:
            return
        if self._newest.filled is not None:
            self._newest.filled.synchronize()
        piece = self._staging.buffers[self._newest.number][: self._newest.used].numpy().data
        self._show(piece)
        self._full.put((self._newest.number, piece))
        self._newest = None

    def _write(self) -> None:
        while (full := self._full.get()) is not None:
            number, piece = full
            if self._error is None:
                try:
                    self._sink(piece)
                except BaseException as error:
                    self._error = error  # raised where the caller can see it
            self._free.put(number)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class _Full(NamedTuple):
    number: int
    used: int
    filled: torch.cuda.Event | None
