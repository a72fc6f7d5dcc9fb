"""From the device to a file through a few host buffers: one is filled while others are hashed and written.

The buffers are page-locked and made before they are needed: to make them while a device hangs may hang as
well, and copies into other memory are slower and can't run beside the host's work. Nothing is allocated on
the device.
"""

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20
DEFAULT_BYTES = 64 << 20
Sink = Callable[[memoryview], object]


class Staging:
    """Host buffers for one stream of bytes at a time, each of at most BUFFER_BYTES; at least two."""

    def __init__(self, size: int = DEFAULT_BYTES, *, pinned: bool = False) -> None:
        """size: bytes in all. pinned: page-locked, which needs a device that answers."""
        count = max(2, size // BUFFER_BYTES)
        each = max(1, min(BUFFER_BYTES, size // count))
        self.pinned = pinned
        self.buffers = [torch.empty(each, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]


class StagedWriter:
    """Puts tensors' bytes, one after another, into `sink`, which is called on a thread of its own.

    Leave the `with` statement to wait for the rest. What `sink` raises is raised by `add`, or on leaving.
    """

    def __init__(self, sink: Sink, staging: Staging) -> None:
        self._sink, self._staging = sink, staging
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in staging.buffers:
            self._free.put(buffer)
        self._full: queue.SimpleQueue[tuple[Tensor, int] | None] = queue.SimpleQueue()
        self._current, self._used = self._free.get(), 0
        self._device: torch.device | None = None  # from which some of the current buffer is still on its way
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="jitckpt-writer", daemon=True)

    def __enter__(self) -> "StagedWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self._hand_over()
        self._full.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def add(self, data: Tensor) -> None:
        """Append the bytes of a contiguous one-dimensional tensor of uint8, on the host or a device."""
        on_device = data.device.type != "cpu"
        begin = 0
        while begin < data.numel():
            count = min(data.numel() - begin, self._current.numel() - self._used)
            if on_device:
                self._device = data.device
            piece = self._current[self._used : self._used + count]
            piece.copy_(data[begin : begin + count], non_blocking=self._staging.pinned)
            begin, self._used = begin + count, self._used + count
            if self._used == self._current.numel():
                self._hand_over()
                self._raise()

    def _hand_over(self) -> None:
        if self._used == 0:
            return
        if self._device is not None and self._staging.pinned:
            torch.cuda.current_stream(self._device).synchronize()
        self._full.put((self._current, self._used))
        self._current, self._used, self._device = self._free.get(), 0, None

    def _write(self) -> None:
        while (full := self._full.get()) is not None:
            buffer, used = full
            if self._error is None:
                try:
                    self._sink(buffer[:used].numpy().data)
                except BaseException as error:
                    self._error = error  # raised where the caller can see it
            self._free.put(buffer)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
