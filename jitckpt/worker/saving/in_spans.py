"""Has a snapshot's copies begin in spans of the minibatch (decisions/snapshot_spans.py), and counts them.

The preloaded library puts each on its stream as the host comes to the span's point, behind an event of the
training's stream: so the device begins it there by itself. The training waits for nothing but what is left as
its next optimizer step begins.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.interpose import Native
from jitckpt.decisions import pace, snapshot_spans
from jitckpt.decisions.snapshot_spans import AT_ONCE, CARRIED, LATE, MOST_TENSORS, WHERE, CopyPart, Timeline
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import COPIED, STEP_TIMES
from jitckpt.wire import environment

LATE_IN_A_ROW = 3  # snapshots of which something came late, after which nothing is known any more
KEPT_TIMES = 32  # minibatches
FIRST_MINIBATCHES = 3  # which take longer than the others
HURRY = 3.0  # times a minibatch, or seconds if that is more: then no point is waited for any more


def wanted(
    native: Native,
    memory: int,
    device: torch.device | None,
    sends: bool,
    warn: Callable[[str], None],
) -> "CopiesInSpans | None":
    """Return what copies in spans, unless the environment or a device proxy is against it."""
    spans = environment.SNAPSHOT_SPANS.get()
    if spans == "0" or behind_proxy.is_there():
        return None
    shortest = snapshot_spans.SHORTEST_SECONDS if spans == "auto" else 0.0
    return CopiesInSpans(native, memory, MinibatchTimes(device), sends=sends, warn=warn, shortest=shortest)


class MinibatchTimes:
    """How long minibatches take on the device, by what they carry; called by the training thread."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._begun: deque[tuple[torch.cuda.Event, list[str]]] = deque()
        self._skipped = 0
        self.seconds: dict[str, deque[float]] = {carried: deque(maxlen=KEPT_TIMES) for carried in CARRIED}

    def begins(self) -> None:
        """A step has ended, so the next minibatch begins."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._begun.append((event, [CARRIED[0]]))
        while len(self._begun) > 1 and self._begun[1][0].query():
            before, (carried,) = self._begun.popleft()
            self._skipped += 1
            if self._skipped > FIRST_MINIBATCHES:
                self.seconds[carried].append(before.elapsed_time(self._begun[0][0]) / 1e3)

    def carries(self, carried: str) -> None:
        """The newest minibatch does."""
        if self._begun:
            self._begun[-1][1][0] = carried


@dataclass(frozen=True)
class _UnderWay:
    """The parts of a snapshot's copies, in their order, and when they are waited for no more.

    held: what is copied; its memory has to stay as long as any of it is still to come.
    """

    sizes: Sequence[tuple[str, int]]
    held: Sequence[tuple[Tensor, Tensor]]
    until: float


class CopiesInSpans:
    """One snapshot's copies at a time, called by the training thread, but where it is said otherwise."""

    def __init__(
        self,
        native: Native,
        memory: int,
        times: MinibatchTimes,
        *,
        sends: bool,
        warn: Callable[[str], None],
        shortest: float = snapshot_spans.SHORTEST_SECONDS,
    ) -> None:
        """memory: the descriptor that tells the agent. sends: to other hosts, which takes time, too.

        shortest: a minibatch that takes fewer seconds has no copies in spans.
        """
        self._native, self._memory, self.times, self._warn = native, memory, times, warn
        self._shortest = shortest
        # What is copied later is sent later: so it begins as without spans, and grows while nobody waits.
        self.sends = sends
        self._share = pace.LEAST_SHARE if sends else pace.SHARE
        self._waited = 0.0
        self._timeline: Timeline | None = None
        self._measured: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        self._bytes_per_second = 0.0
        # Every other snapshot is copied at once, until it is known which way is faster.
        self._compares, self._has_begun = True, False
        self._number = 0
        self._late = 0
        self._lock = threading.Lock()
        self._under_way: _UnderWay | None = None
        self._copied: Counter[str] = Counter()
        self._off = False

    def found(self, timeline: Timeline | None) -> None:
        """A minibatch is like this from now on, or nobody knows; on any thread."""
        self._timeline = timeline if timeline is None or timeline.seconds >= self._shortest else None
        self._late = 0

    def waited(self, seconds: float, between: float) -> None:
        """The training has waited so long for snapshots; one comes every `between` seconds."""
        if between > 0:
            self._share = pace.next_share(self._share, seconds - self._waited, between)
        self._waited = seconds

    def choose(self, tensors: Sequence[Tensor]) -> list[CopyPart]:
        """Return which parts of these are copied in spans; none if all are at once."""
        self._number += 1
        timeline = self._timeline
        if timeline is None or self._off or not self._rate():
            return []
        if not self._has_begun:
            self._has_begun = True
            for seconds in self.times.seconds.values():
                seconds.clear()  # minibatches of the beginning, and those that were profiled
        if snapshot_spans.is_at_once(self._number, self._compares):
            return []
        largest = sorted(range(len(tensors)), key=lambda number: -tensors[number].nbytes)[:MOST_TENSORS]
        chosen = sorted(largest)
        sizes = [tensors[number].nbytes for number in chosen]
        try:
            parts = snapshot_spans.plan(timeline, sizes, self._bytes_per_second, self._share)
        except Exception as error:  # whatever it is: a snapshot can do without spans
            self._end(f"where they are to go could not be planned ({error!r})")
            return []
        if all(part.beside is None for part in parts):
            return []
        return [CopyPart(chosen[one.number], one.begin, one.end, one.point, one.beside) for one in parts]

    def begin(
        self,
        copies: Sequence[tuple[Tensor, Tensor]],
        parts: Sequence[CopyPart],
        others: int,
        done: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        """Have parts of these (host memory, and what is copied there) copied, then a word written.

        done: its address and value. others: bytes that are copied at once.
        """
        pieces = [
            (
                part.point,
                copies[part.number][0].data_ptr() + part.begin,
                copies[part.number][1].data_ptr() + part.begin,
                part.end - part.begin,
            )
            for part in parts
        ]
        timeline = self._timeline
        patience = HURRY * max(1.0, 0.0 if timeline is None else timeline.seconds)
        sizes = [(part.beside or AT_ONCE, part.end - part.begin) for part in parts]
        with self._lock:
            self._under_way = _UnderWay(sizes, copies, time.monotonic() + patience)
        self._native.copy_in_turn(pieces, done, stream.cuda_stream)
        self.times.carries(CARRIED[2])
        self._count({AT_ONCE: others})

    @contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """All that is put on the current stream in this block is copied at once: see how long it takes."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._measured = before, after, size
        self.times.carries(CARRIED[1])
        self._count({AT_ONCE: size})

    def rest(self) -> None:
        """Put what is still to come on the stream now; on any thread."""
        with self._lock:
            under_way, self._under_way = self._under_way, None
            if under_way is None:
                return
            left = self._native.copy_rest()
        came = len(under_way.sizes) - left
        sizes: Counter[str] = Counter()
        for number, (beside, size) in enumerate(under_way.sizes):
            sizes[beside if number < came else LATE] += size
        self._late = self._late + 1 if left else 0
        if self._late == LATE_IN_A_ROW:
            self._timeline = None  # until it is measured again
        self._count(sizes)

    def hurry(self) -> None:
        """Wait no more for points that don't come: the training evaluates, say. On any thread."""
        under_way = self._under_way
        if under_way is not None and time.monotonic() > under_way.until:
            self.rest()

    def drop(self) -> None:
        with self._lock:
            self._under_way = None
            self._native.copy_no_more()

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Have a stream wait for what is on another one now, which is no point of the minibatch."""
        self._native.stream_waits(stream.cuda_stream, other.cuda_stream)

    def compare(self) -> None:
        """See whether spans have slowed the training down, and tell the agent how long minibatches take."""
        seconds = self.times.seconds
        for word, carried in zip(STEP_TIMES, CARRIED, strict=True):
            if seconds[carried]:
                host_memory.put_word(self._memory, word, int(median(seconds[carried]) * 1e6))
        if self._off or not self._has_begun:
            return
        slower = snapshot_spans.is_slower(seconds[CARRIED[2]], seconds[CARRIED[1]])
        if slower is not None:
            self._compares = False
        if slower:
            spans, at_once = (median(seconds[carried]) for carried in (CARRIED[2], CARRIED[1]))
            self._end(f"minibatches took {spans:.4g} s with them and {at_once:.4g} s without")

    def _end(self, reason: str) -> None:
        self._off = True
        self._warn(
            f"Snapshots leave the device at once from now on, and in no spans of a minibatch: {reason}."
        )

    def _rate(self) -> float:
        """Return the bytes per second that copies take, by what was copied at once."""
        if self._measured is not None and self._measured[1].query():
            before, after, size = self._measured
            seconds = before.elapsed_time(after) / 1e3
            if size and seconds > 0:
                self._bytes_per_second = size / seconds
            self._measured = None
        return self._bytes_per_second

    def _count(self, sizes: dict[str, int] | Counter[str]) -> None:
        with self._lock:
            self._copied.update(sizes)
            for word, where in zip(COPIED, WHERE, strict=True):
                host_memory.put_word(self._memory, word, self._copied[where])
