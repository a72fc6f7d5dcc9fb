"""How this host sends snapshots: as fast as it goes, at a constant rate, or in the network's idle spans.

Where it does not go as fast as it can, it makes way while a collective of this host's ranks is under way.

Nothing is known of a start's steps at first: then it goes as fast as it can, which says how fast that is.
After that it is a constant rate, just enough. Once the ranks have told when the network is idle (GEMINI's
Algorithm 2), it is those spans, if they have room.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from jitckpt._memory_tier import Pace
from jitckpt.agent.pacer import Pacer
from jitckpt.console import say, show_size
from jitckpt.decisions import idle_time
from jitckpt.decisions.idle_time import Idle, Slots
from jitckpt.events import EventLog
from jitckpt.tiers import chunks, host_memory
from jitckpt.tiers import idle as idle_profile
from jitckpt.tiers.host_memory import AWAITED, MINIBATCH, NETWORK_USED, PAGE, SENDING, STEP_TIME, WAITED

COPY_DIFFERS = 0.05  # of a minibatch: planned anew where a snapshot is in memory so much earlier or later
MOST_WAITS = 3  # one after the other: then the spans are not what they seem to be


@dataclass(frozen=True)
class MemorySnapshot:
    """Of one rank of this host: its memfd, its bytes, and how long it took to be there."""

    memory: int
    size: int
    copied: float

    @property
    def step_seconds(self) -> float:
        return host_memory.word(self.memory, STEP_TIME) / 1e6


class Sending:
    """For one start of the workers."""

    def __init__(self, pace: Pace, memories: Sequence[int], log: EventLog) -> None:
        """memories: memfds of this host's ranks."""
        self._pace, self._log, self._memories = pace, log, tuple(memories)
        self._counting = threading.Lock()
        self._under_way = 0  # shards
        self._profiles: tuple[int, ...] = ()  # the ranks' numbers of what is planned for
        self._idle: Idle | None = None
        self._planned: tuple[int, int, int] | None = None
        self._waited, self._waits = 0.0, 0
        self.is_as_fast_as_it_goes = True
        # How many minibatches' idle time carries a snapshot, 0 for no number, and why, a clause.
        self.carried: tuple[int, str] | None = None
        self._sent: tuple[int, float, float, int] = (0, inf, 0.0, 0)  # of a step: from when to when, bytes
        self._text = ""
        pace.set_rate(inf)
        pace.set_schedule((), 0.0, 0.0)
        words = [chunks.window(memory, 0, PAGE) for memory in memories]
        pace.listen(words, MINIBATCH, AWAITED, NETWORK_USED)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A shard is sent: the ranks say meanwhile when they use the network themselves."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._counting:
            self._under_way += more
            for memory in self._memories:
                host_memory.put_word(memory, SENDING, int(self._under_way > 0))

    def sent(self, step: int, begun: float, ended: float, size: int) -> None:
        """A rank's snapshot has been sent: while nothing slows that down, it says how fast the network is."""
        if not self.is_as_fast_as_it_goes:
            return
        known, first, last, before = self._sent
        if known != step:
            first, last, before = inf, 0.0, 0
        self._sent = step, min(first, begun), max(last, ended), before + size

    def plan(self, ranks: Sequence[MemorySnapshot], every: int, copies: int, pacer: Pacer) -> None:
        """Say how the next snapshot is sent. copies: to how many hosts each goes."""
        known = [one for one in ranks if one.step_seconds]
        if not known or not every:
            return
        between = every * min(one.step_seconds for one in known)
        waited = max(host_memory.word(one.memory, WAITED) for one in known) / 1e6
        size = sum(one.size for one in known) * copies
        copied = max(one.copied for one in known)
        late = waited - self._waited > pacer.noticed(between)
        self._waits = self._waits + 1 if late else 0
        self._waited = waited
        self._pace.set_rate(pacer.rate(size, copied, between, waited), pacer.spare(between))
        self.is_as_fast_as_it_goes = False
        self._use_idle_spans(known, size, every, copied)

    def _use_idle_spans(self, ranks: Sequence[MemorySnapshot], size: int, every: int, copied: float) -> None:
        profiles = [idle_profile.of(one.memory) for one in ranks]
        whole = [one for one in profiles if one is not None]
        if len(whole) < len(ranks) or not size:  # or nothing goes to other hosts
            return
        numbers = tuple(number for number, _ in whole)
        if numbers != self._profiles:
            self._profiles, self._waits, self._planned = numbers, 0, None
            self._idle = idle_time.common([one for _, one in whole])
        if self._idle is None:
            return
        planned = size, every, round(copied / (COPY_DIFFERS * self._idle.seconds))
        if self._waits < MOST_WAITS and planned == self._planned:
            return
        self._planned = planned
        slots = idle_time.plan(self._idle, size, every, copied, self._bytes_per_second)
        if self._waits >= MOST_WAITS:  # until they are profiled anew
            self._idle, slots = None, None
            why = "the training had to wait, although it was sent in the idle spans"
        elif slots is None:
            why = "the idle spans have no room for it"
        else:
            why = ""
        self.carried = self._carried(size, copied)
        self._set(slots, why, size / every)

    def _carried(self, size: int, copied: float) -> tuple[int, str]:
        every = None
        if self._idle is not None:
            every = idle_time.least_every(self._idle, size, copied, self._bytes_per_second)
        if self._idle is None or every is None:
            return 0, "the network's idle spans do not carry it"
        seconds, idle = self._idle.seconds, self._idle.idle_seconds
        return every, (
            f"the network is idle for {idle:.3g} s of a minibatch of {seconds:.3g} s, so {every} of them "
            f"carry the {show_size(size)} of one at {show_size(int(self._bytes_per_second))}/s"
        )

    @property
    def _bytes_per_second(self) -> float:
        _, first, last, size = self._sent
        return size / (last - first) if last > first else 0.0

    def _set(self, slots: Slots | None, why: str, size: float) -> None:
        found = () if slots is None else slots.slots
        minibatch = 0.0 if self._idle is None else self._idle.seconds
        self._pace.set_schedule(found, minibatch, self._bytes_per_second)
        how = f"at a constant rate, since {why}" if slots is None else "in the network's idle spans"
        if not self._log.leading or how == self._text:
            return
        self._text = how
        text = f"snapshots are sent {how}"
        if self._idle is not None:
            spans, seconds = len(self._idle.spans), self._idle.idle_seconds
            text += (
                f": in a minibatch of {minibatch:.3g} s the network is idle for {seconds:.3g} s, in {spans} "
                f"span{'s' if spans != 1 else ''}, and {show_size(int(size))} a minibatch are to be sent at "
                f"{show_size(int(self._bytes_per_second))}/s"
            )
        chosen = 0.0 if slots is None else slots.seconds
        idle = 0.0 if self._idle is None else self._idle.idle_seconds
        self._log.write(
            "memory_pace", slots=len(found), used=chosen, idle=idle, minibatch=minibatch, text=text
        )
        say(f"memory tier: {text}.")
