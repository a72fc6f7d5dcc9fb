"""Checkpoint traffic in the idle spans of the training network (GEMINI, Algorithm 2).

The pseudo-code as printed does not do what its text says; put right here:

1. line 18 takes f(remain_size), what is left of the checkpoint, off the span; it must take f(size);
2. line 22 (ckpt_id < m - 1, from 0) sends m checkpoints; m - 1 have to be sent;
3. a span with less than alpha left never ends: size is 0, so remain_span stays as it is;
4. line 2 writes infinity into the caller's list of spans;
5. which span and which checkpoint a chunk belongs to is lost: only sizes come back;
6. with one replica (m = 1) it still sends one;
7. nothing keeps a chunk from a buffer that is still being copied out, so p buffers do not pipeline.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, number, positive, whole

# Of a copy, less than that is what subtracting its chunks has left of it; by so much means of spans that
# follow each other may overlap.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Span:
    """A time in every minibatch in which the training network is idle; deviation over minibatches."""

    start_seconds: float
    length_seconds: float
    deviation_seconds: float = 0.0

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.length_seconds


@dataclass(frozen=True)
class Link:
    """How chunks travel: f(s) = latency + s / bandwidth to the peer's device, then a copy to its host."""

    bytes_per_second: float  # B
    latency_seconds: float  # alpha
    copy_bytes_per_second: float = math.inf  # device to host on the receiving side
    buffer_bytes: float = 128 * 2**20  # R, reserved on the receiving device
    buffers: int = 4  # p

    def __post_init__(self) -> None:
        if self.bytes_per_second != math.inf:
            positive("bytes_per_second", self.bytes_per_second)
        if self.copy_bytes_per_second != math.inf:
            positive("copy_bytes_per_second", self.copy_bytes_per_second)
        number("latency_seconds", self.latency_seconds)
        positive("buffer_bytes", self.buffer_bytes)
        whole("buffers", self.buffers, low=1)

    @property
    def chunk_bytes(self) -> float:
        """The largest chunk, R / p."""
        return self.buffer_bytes / self.buffers

    def send_seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Chunk:
    span: int
    copy: int  # which of the m - 1 remote copies
    offset_bytes: float  # in the checkpoint
    size_bytes: float
    send_start_seconds: float
    send_end_seconds: float
    copied_seconds: float  # when its buffer is free again


@dataclass(frozen=True)
class TrafficSchedule:
    spans: tuple[Span, ...]
    chunks: tuple[Chunk, ...]
    overrun_seconds: float  # by how much the last chunk outlasts the last span: the minibatch grows by it


def schedule_traffic(
    spans: Sequence[Span], checkpoint_bytes: float, replicas: int, link: Link, caution: float = 0.9
) -> TrafficSchedule:
    """Cut `replicas` - 1 remote copies of a checkpoint into chunks, each in an idle span.

    caution is the paper's mu in (0, 1]: the share of a span's mean length that may be used. What fits in no
    span goes to the last, however long that takes.
    """
    number("checkpoint_bytes", checkpoint_bytes)
    whole("replicas", replicas, low=1)
    positive("caution", caution)
    number("caution", caution, high=1.0)
    _check_spans(spans)
    chunks: list[Chunk] = []
    copies = [(copy, checkpoint_bytes) for copy in range(replicas - 1)] if checkpoint_bytes > 0 else []
    offset, free = 0.0, 0.0  # `free`: when the network's last chunk is through
    for index, span in enumerate(spans):
        last = index == len(spans) - 1
        end = math.inf if last else span.start_seconds + caution * span.length_seconds
        free = max(free, span.start_seconds)
        while copies:
            copy, left = copies[0]
            begin = free
            if len(chunks) >= link.buffers:
                begin = max(begin, chunks[-link.buffers].copied_seconds)
            room = math.inf if last else (end - begin - link.latency_seconds) * link.bytes_per_second
            size = min(link.chunk_bytes, left, room)
            # A chunk so small that its bytes vanish beside its start-up is none.
            if not size > 0 or (not last and begin + link.send_seconds(size) <= begin):
                break
            sent = begin + link.send_seconds(size)
            sent = min(sent, end)  # apart by rounding only
            copied = (
                max(sent, chunks[-1].copied_seconds if chunks else 0.0) + size / link.copy_bytes_per_second
            )
            chunks.append(Chunk(index, copy, offset, size, begin, sent, copied))
            free, offset, left = sent, offset + size, left - size
            if left > ROUNDING * checkpoint_bytes:
                copies[0] = (copy, left)
            else:
                copies.pop(0)
                offset = 0.0
    return TrafficSchedule(
        tuple(spans), tuple(chunks), max(0.0, free - spans[-1].end_seconds) if chunks else 0.0
    )


def _check_spans(spans: Sequence[Span]) -> None:
    if not spans:
        raise InvalidInput("spans is empty: give at least one idle span (its length may be 0)")
    before = 0.0
    for index, span in enumerate(spans):
        number(f"start_seconds of span {index}", span.start_seconds, low=before * (1 - ROUNDING))
        number(f"length_seconds of span {index}", span.length_seconds)
        number(f"deviation_seconds of span {index}", span.deviation_seconds)
        before = span.end_seconds


def profile_spans(minibatches: Sequence[Sequence[tuple[float, float]]]) -> tuple[Span, ...]:
    """Mean and deviation of each idle span from its (start, end) seconds in several minibatches."""
    if len({len(minibatch) for minibatch in minibatches}) != 1:
        raise InvalidInput(
            "minibatches have different numbers of idle spans: profile minibatches of one shape"
        )
    spans = []
    for observed in zip(*minibatches, strict=True):
        lengths = [end - start for start, end in observed]
        deviation = statistics.stdev(lengths) if len(lengths) > 1 else 0.0
        spans.append(
            Span(statistics.fmean(start for start, _ in observed), statistics.fmean(lengths), deviation)
        )
    _check_spans(spans)
    return tuple(spans)


def drifted(planned: Sequence[Span], measured: Sequence[Span], samples: int, share: float = 0.1) -> list[int]:
    """Spans whose measured mean left the planned one: by more than `share` of it, and by more than chance.

    Chance: three standard errors of a mean over `samples` minibatches.
    """
    whole("samples", samples, low=1)
    moved = []
    for index, (before, now) in enumerate(zip(planned, measured, strict=True)):
        difference = abs(now.length_seconds - before.length_seconds)
        error = 3 * max(before.deviation_seconds, now.deviation_seconds) / math.sqrt(samples)
        if difference > share * before.length_seconds and difference > error:
            moved.append(index)
    return moved
