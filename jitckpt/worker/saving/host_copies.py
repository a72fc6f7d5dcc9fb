"""Copies tensors off the device beside the training: no thread waits, and no kernel of the training for long.

The copies are made on a stream of their own; the training's stream waits for them before it changes what they
read, and not earlier. The device tells by a word that they are there, so whoever reads them makes no device
call.
"""

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from jitckpt.worker.saving.in_spans import CopiesInSpans

ALIGNMENT = 16  # bytes; no element is wider


class HostCopies:
    """Page-locked host memory for one set of copies at a time; called by the training thread."""

    def __init__(
        self,
        device: torch.device | None,
        write_word: Callable[[int, int, int], None],
        room: Callable[[int], Tensor] | None = None,
        *,
        measures: bool = False,
        spans: CopiesInSpans | None = None,
    ) -> None:
        """write_word(address, value, stream): have the device write 8 bytes in the order of the stream.

        room: gives the page-locked memory, of at least so many bytes, for the next set of copies. measures:
        how long the training's stream waits. spans: of the minibatch, to which copies are put off where they
        are known.
        """
        self._device, self._write_word = device, write_word
        self._room = room
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._number = 0
        self._done: Tensor | None = None  # the number of the newest set that is there
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._is_awaited = True  # by the training's stream: what was begun last
        self._measures, self._waited, self._spans = measures, 0.0, spans
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(
        self, first: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> tuple[int, dict[str, Tensor]]:
        """Enqueue copies of both; the first ones (buffers) are the first to change again.

        Returns the number of the set and the copies, which are there once `are_there` says so. These are laid
        out as the tensors are: to lay them out anew takes memory of the device.
        """
        size = sum(_aligned(tensor.nbytes) for tensor in (*first.values(), *others.values()))
        if self._room is not None:
            self._staging = self._room(size)
        elif self._staging.numel() != size:
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        if self._stream is None or self._done is None:
            self._done = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        copies: dict[str, Tensor] = {}
        offset = 0
        for name, tensor in (*first.items(), *others.items()):
            place = self._staging[offset : offset + tensor.nbytes].view(tensor.dtype)
            copies[name] = _laid_out_as(place, tensor)
            offset += _aligned(tensor.nbytes)
        # Of each set another number: in transparent mode the device may write that of the last one again.
        self._number += 1
        self._is_awaited = False
        with torch.cuda.stream(self._stream), torch.no_grad():
            _copy(copies, first)
            if self._spans is not None:
                self._copy_in_spans(self._spans, copies, first, others)
                return self._number, copies
            if first:
                current.wait_event(self._stream.record_event())
            _copy(copies, others)
            self._copied = self._stream.record_event()
        self._write_word(self._done.data_ptr(), self._number, self._stream.cuda_stream)
        return self._number, copies

    def _copy_in_spans(
        self,
        spans: CopiesInSpans,
        copies: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
    ) -> None:
        """Have the others copied in spans of the minibatch, if these are known; else at once."""
        assert self._stream is not None
        assert self._done is not None
        done = self._done.data_ptr(), self._number
        if first:
            spans.wait(torch.cuda.current_stream(self._device), self._stream)
        size = sum(tensor.nbytes for tensor in (*first.values(), *others.values()))
        pairs = [(copies[name], tensor) for name, tensor in others.items() if _is_plain(copies[name], tensor)]
        parts = spans.choose([tensor for _, tensor in pairs])
        if not parts:
            with spans.measured(size):
                _copy(copies, others)
            self._write_word(*done, self._stream.cuda_stream)
            return
        put_off = {id(pairs[part.number][1]) for part in parts}
        _copy(copies, {name: tensor for name, tensor in others.items() if id(tensor) not in put_off})
        at_once = size - sum(part.end - part.begin for part in parts)
        spans.begin(pairs, parts, at_once, done, self._stream)

    def step_begins(self) -> None:
        """Let the current stream wait for the copies: what it does next changes what they read."""
        if self._is_awaited or self._stream is None:
            return
        self._is_awaited = True
        self.put_rest()
        current = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self._measures:
            current.record_event(before)
        if self._spans is not None:
            self._spans.wait(current, self._stream)
        elif self._copied is not None:
            current.wait_event(self._copied)
        if self._measures:
            current.record_event(after)
            self._waits.append((before, after))

    def put_rest(self) -> None:
        """Put off nothing any more."""
        if self._spans is not None:
            self._spans.rest()

    def drop(self) -> None:
        """Make no copy that was put off."""
        if self._spans is not None:
            self._spans.drop()

    def hurry(self) -> None:
        """Put off nothing any more if the training does not go on; on any thread."""
        if self._spans is not None:
            self._spans.hurry()

    def waited(self) -> float:
        """Return how many seconds the training's stream has waited for copies, as far as it has come."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited += before.elapsed_time(after) / 1e3
        return self._waited

    def are_there(self, number: int) -> bool:
        """Return whether this set is the newest that is there; no device call."""
        return self._done is not None and self._done.item() == number


def _laid_out_as(place: Tensor, tensor: Tensor) -> Tensor:
    """Return memory in a tensor's shape, and with its strides if these leave no gaps."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != dense:
            return place.view(tensor.shape)
        dense *= size
    return place.as_strided(tensor.shape, tensor.stride())


def _copy(copies: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        copies[name].copy_(tensor, non_blocking=True)


def _is_plain(copy: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie on the device as those of its copy do on the host."""
    return (
        tensor.is_cuda and copy.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg()
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
