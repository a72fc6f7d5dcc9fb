"""What is kept of a start of the workers on other hosts, and how often: as asked, or as `auto` chooses.

Of `auto` all hosts tell the first one what decides. Once the first snapshots are there: copies or parity;
before that nothing is sent. Once it is known how long a snapshot takes: whole states or gradients, which are
given up where they turn out not to fit.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.optimizer_steps import GradientSending
from jitckpt.agent.pacer import Pacer
from jitckpt.console import say
from jitckpt.decisions import memory_method
from jitckpt.decisions.memory_method import ByTraffic, HostStates
from jitckpt.decisions.memory_wanted import AUTO, AUTOMATIC, OPTIMIZER, PARITY, PEER
from jitckpt.decisions.pace import packed
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import (
    COPY_WAITED,
    COUNT_GRADIENTS,
    GRADIENTS,
    NO_GRADIENTS,
    READY,
    RULE,
    SEND_GRADIENTS,
    STEP_BYTES,
    STEP_TIME,
    WAITED,
)
from jitckpt.tiers.remade_peers import PeerOptimizer
from jitckpt.tiers.shard import CHUNK
from jitckpt.tiers.tier import Shard
from jitckpt.wire import agents

LOOKED_AT = 8  # steps of which gradients went, and for which the training may have waited
FIRST = 2  # before them, of which whole copies went


class ChosenMethod:
    """One host's part, in one start. is_decided: whether it is known that it is copies, or parity."""

    def __init__(
        self,
        tier: MemoryTier,
        ranks: Mapping[int, int],
        hosts: Hosts | None,
        log: EventLog,
        *,
        warn: Callable[[str], None],
        place: Callable[[], None],
    ) -> None:
        """ranks: this host's, with their memfds. place: called when it is parity, in the place of copies."""
        self._tier, self._ranks, self._hosts, self._log, self._place = tier, ranks, hosts, log, place
        self._chooses = hosts is not None and tier.wanted.mode == AUTOMATIC
        self._may_be_gradients = self._chooses and tier.wanted.steps == AUTO
        self.is_decided = not self._chooses
        self._steps: GradientSending | None = None
        if tier.wanted.optimizer or self._may_be_gradients:
            begins_with = SEND_GRADIENTS if tier.wanted.optimizer else COUNT_GRADIENTS
            self._steps = GradientSending(tier.memory, ranks, log, warn, begins_with)
        self._told: HostStates | None = None
        self._went: dict[int, int] = {}  # bytes of a rank's whole state that go to another host
        self._has_chosen_gradients = False
        self._waited: deque[tuple[int, float]] = deque(maxlen=LOOKED_AT + 1)  # by step
        self._looks_in = 0  # safe steps
        self._known: dict[int, HostStates] = {}  # at the first host
        self._carried: tuple[int, str] | None = None  # as it was told

    def put_gradients(self, host: int, one: Shard, patience: float, stop: int) -> int | None:
        """Have another host make a rank's step; return the bytes sent, or None if a whole copy is to go."""
        if self._steps is None or self._hosts is None:
            return None
        other = PeerOptimizer(self._hosts, host, patience, pace=self._tier.pace, stop=stop)
        return self._steps.put(other, self._hosts.name(host), one)

    def went(self, rank: int, size: int) -> None:
        """A rank's whole state has gone to another host: so many bytes, where it had some already."""
        self._went[rank] = max(1, size)

    def news(
        self, safe: int, carried: tuple[int, str] | None
    ) -> Iterator[agents.States | agents.NoGradients | agents.IdleCarries]:
        """Yield what the first host is to hear. safe: the newest step that is whole everywhere.

        carried: as Sending has it.
        """
        if carried != self._carried and self._tier.wanted.steps == AUTO:
            self._carried = carried
            yield agents.IdleCarries(*(carried or (0, "")))
        is_all_told = self._told is not None and (bool(self._told.sent) or not self._may_be_gradients)
        found = None if is_all_told or not self._chooses else self._states()
        if found is not None and found != self._told:
            self._told = found
            states, sent, chunks, went = map(list, (found.states, found.sent, found.chunks, found.went))
            yield agents.States(states, sent, chunks, went, int(found.memory))
        if self._has_chosen_gradients and (problem := self._why_no_more(safe)):
            self._has_chosen_gradients = False
            yield agents.NoGradients(problem)

    def _states(self) -> HostStates | None:
        """Return what this host's ranks have; None as long as some have no snapshot."""
        if self._told is None:
            seals = [
                next((seal for _, seal in host_memory.found(memory)), None)
                for memory in self._ranks.values()
                if host_memory.word(memory, READY)
            ]
            there = [seal for seal in seals if seal is not None]
            if len(there) < len(self._ranks):
                return None
            chunks = [max(1, -(-seal.data_bytes // CHUNK)) for seal in there]
            return HostStates([seal.size for seal in there], self._tier.limit, chunks=chunks)
        sent = [host_memory.word(memory, STEP_BYTES) for memory in self._ranks.values()]
        if not all(sent) or len(self._went) < len(self._ranks):
            return self._told
        told, went = self._told, [self._went[rank] for rank in self._ranks]
        return HostStates(told.states, told.memory, sent, told.chunks, went)

    def _why_no_more(self, safe: int) -> str:
        """Return why gradients fit no more; "" if they do."""
        for rank, memory in self._ranks.items():
            if host_memory.word(memory, GRADIENTS) == NO_GRADIENTS:
                return f"rank {rank}'s optimizer steps are not made again on another host"
        if self._waited and self._waited[-1][0] == safe:
            return ""
        waited = max(
            host_memory.word(memory, WAITED) + host_memory.word(memory, COPY_WAITED)
            for memory in self._ranks.values()
        )
        self._waited.append((safe, waited / 1e6))
        self._looks_in -= 1
        step_seconds = max(host_memory.word(memory, STEP_TIME) for memory in self._ranks.values()) / 1e6
        if self._looks_in > 0 or not memory_method.waits_too_long(self._waited, step_seconds):
            return ""
        (first, before), (last, after) = self._waited[0], self._waited[-1]
        return f"the training waits {(after - before) / (last - first):.3g} s a step for gradients"

    def change_pace(self, pace: Pacer, said: agents.Safe) -> None:
        """All ranks read of it before they read that a step is settled, and so before they come to that."""
        pace.rule, pace.gradients = (said.every, said.since), said.gradients
        if self._chooses:
            self._may_be_gradients, self._has_chosen_gradients = False, said.gradients
            self._looks_in = FIRST + LOOKED_AT + 1
            for memory in self._ranks.values():
                host_memory.put_word(memory, GRADIENTS, SEND_GRADIENTS if said.gradients else NO_GRADIENTS)
        for memory in self._ranks.values():
            host_memory.put_word(memory, RULE, packed(said.every, said.since))
        if self._log.leading:
            self._log.write("memory_every", steps=said.every, since=said.since, text=said.why)
            if self._chooses:
                self._tell(said.why, gradients=said.gradients)
            else:
                say(f"memory tier: {said.why} (--memory-every auto).")

    def _tell(self, why: str, *, gradients: bool = False, is_said: bool = True) -> None:
        method = (PEER if self._tier.parity is None else PARITY) + OPTIMIZER * gradients
        self._log.write("memory_method", method=method, text=why)
        if is_said:
            say(f"memory tier: {why} (--memory-tier auto).")

    def hear(
        self, host: int, said: agents.OfMethod, pace: Pacer, safe: int, settled: int
    ) -> Iterator[agents.MethodChosen | agents.Safe]:
        """Yield what the first host is to tell all. safe, settled: steps."""
        if isinstance(said, agents.IdleCarries):
            pace.idle_carries(host, said.every, said.why)
            return
        if not self._chooses:  # this host was started with another option
            if isinstance(said, agents.States):
                yield agents.MethodChosen(False, "")
            return
        match said:
            case agents.States():
                self._known[host] = HostStates(said.states, said.memory, said.sent, said.chunks, said.went)
                of_all = self._of_all()
                if of_all and not self.is_decided:
                    chosen = memory_method.by_memory(of_all, self._placed())
                    yield agents.MethodChosen(chosen.parity, chosen.text)
            case agents.MethodChosen(parity, why):
                if parity:
                    self._tier.use_parity()
                    self._place()
                self.is_decided = True
                if self._log.leading:
                    self._tell(why or "copies on other hosts, which have room for them", is_said=bool(why))
            case agents.NoGradients(why) if pace.gradients:
                # A rank may have begun the snapshot behind the settled one.
                yield agents.Safe(safe, settled, **pace.without_gradients(settled + 1, why))

    # At the first host.

    def left_out(self) -> Iterator[agents.MethodChosen]:
        """A snapshot was left out, which nobody is to wait for again; yield what all are to be told."""
        if not self.is_decided:
            yield agents.MethodChosen(False, "copies, since not all hosts tell what they have in memory")

    def by_traffic(self, snapshot_seconds: float, step_seconds: float) -> ByTraffic:
        """Return how often there is a snapshot, and of what that is sent."""
        of_all = self._of_all() if self._may_be_gradients and self._tier.parity is None else []
        placed = self._placed() if of_all else ()
        return memory_method.by_traffic(
            snapshot_seconds, step_seconds, of_all, placed, may_be_gradients=bool(of_all)
        )

    def _of_all(self) -> list[HostStates]:
        """Return what all hosts have told; nothing as long as some have not."""
        count = 0 if self._hosts is None else len(self._hosts.all)
        return [self._known[host] for host in range(count)] if len(self._known) == count else []

    def _placed(self) -> tuple[tuple[int, ...], ...]:
        assert self._hosts is not None
        return self._tier.placement(self._hosts).holders
