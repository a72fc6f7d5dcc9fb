"""How a recovery is agreed on: a coordinator and a participant for each rank, as pure state machines.

Nothing is assumed of the messages between them: each may be lost, come late, twice or out of order. So both
sides say what follows from their state, again and again (`says`), until the other's answer changes that
state. Every recovery has a number; what belongs to an older one is ignored, and a newer one ends whatever is
under way. A coordinator keeps nothing that the reports of the ranks don't say again, so if it dies another
takes over with a recovery of a higher number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jitckpt.decisions.transparent.decision import FallBack, RecoveryPlan, decide
from jitckpt.decisions.transparent.orders import Order
from jitckpt.decisions.transparent.report import Report
from jitckpt.wire.communicators import RecoveryNumber

# Recoveries in a row that may lead to the same state, before the failures are taken for lasting.
MOST_ATTEMPTS = 10


@dataclass(frozen=True)
class RankAlarmed:
    """Something has failed at `rank`, whose last recovery was this one."""

    rank: int
    recovery: RecoveryNumber


@dataclass(frozen=True)
class RankHeld:
    """The rank's application makes no more calls, and nothing that its device still does counts."""

    rank: int
    recovery: RecoveryNumber


@dataclass(frozen=True)
class RankStopped:
    """The rank is at rest, and stays so for this recovery."""

    rank: int
    recovery: RecoveryNumber
    report: Report


@dataclass(frozen=True)
class RankDone:
    """The rank has carried out all that this recovery asked of it."""

    rank: int
    recovery: RecoveryNumber


@dataclass(frozen=True)
class GivenUp:
    """The rank was told to give up: by this coordinator, or by one before it."""

    rank: int
    recovery: RecoveryNumber
    decided: FallBack


@dataclass(frozen=True)
class HoldRanks:
    """Hold the application, whatever it does."""

    recovery: RecoveryNumber


@dataclass(frozen=True)
class RestRanks:
    """All ranks are held: come to rest and report.

    Not before: communicators end one after the other, and what a device makes of the first of them it may
    send through the others, to ranks that would take it for what is right.
    """

    recovery: RecoveryNumber


@dataclass(frozen=True)
class CarryOut:
    """Do this, one after the other."""

    recovery: RecoveryNumber
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class GiveUpRecovery:
    """There will be no transparent recovery any more."""

    recovery: RecoveryNumber
    decided: FallBack


FromRank = RankAlarmed | RankHeld | RankStopped | RankDone | GivenUp
ToRank = HoldRanks | RestRanks | CarryOut | GiveUpRecovery


@dataclass(frozen=True)
class Coordinator:
    """One coordinates the job. held: the ranks that have stopped for this recovery. decided: what to do about
    the reports; None before all have come.

    restorable: the script has registered how to save and restore. last_state, attempts: what the last
    recoveries led to, and how many of them in a row. servers_stay: False once nobody knows which server is at
    fault, until a recovery is over. superseded: there is a newer coordinator.
    """

    ranks: tuple[int, ...]
    recovery: RecoveryNumber = (0, 0)
    restorable: bool = False
    phase: Literal["watching", "holding", "collecting", "ordering", "giving up", "superseded"] = "watching"
    held: frozenset[int] = frozenset()
    reports: Mapping[int, Report] = field(default_factory=dict)
    decided: RecoveryPlan | FallBack | None = None
    done: frozenset[int] = frozenset()
    last_state: int = -1
    attempts: int = 0
    servers_stay: bool = True

    @property
    def over(self) -> bool:
        """Whether nothing is to be said any more."""
        return not self.says() and self.phase not in ("holding", "collecting")

    def hear(self, message: FromRank) -> "Coordinator":
        """Return what the coordinator is after a message."""
        if message.recovery != self.recovery:
            newer = message.recovery > self.recovery
            return replace(self, phase="superseded", decided=None) if newer else self
        match message:
            case RankAlarmed() if self.phase in ("watching", "ordering"):
                return self._hold()
            case RankHeld() | RankStopped():
                return self._hear_of_stop(message)
            case RankDone(rank) if self.phase == "ordering":
                heard = replace(self, done=self.done | {rank})
                over = len(heard.done) == len(self.ranks)
                return replace(heard, phase="watching", servers_stay=True) if over else heard
            case GivenUp(rank, _, decided):
                giving_up = self if self.phase == "giving up" else self._give_up(decided)
                return replace(giving_up, done=giving_up.done | {rank})
        return self

    def _hear_of_stop(self, message: RankHeld | RankStopped) -> "Coordinator":
        match message:
            case RankHeld(rank) if self.phase == "holding":
                heard = replace(self, held=self.held | {rank})
                return replace(heard, phase="collecting") if len(heard.held) == len(self.ranks) else heard
            case RankStopped(rank, _, report) if self.phase == "collecting":
                heard = replace(self, reports={**self.reports, rank: report})
                return heard._decide() if len(heard.reports) == len(self.ranks) else heard
        return self

    def lose(self, rank: int, why: str) -> "Coordinator":
        """Return what it is once a rank can't take part any more: its worker or its node is gone."""
        if self.phase == "superseded":
            return self
        giving_up = self if self.phase == "giving up" else self.give_up(f"rank {rank} is gone: {why}")
        return replace(giving_up, done=giving_up.done | {rank})

    def give_up(self, why: str) -> "Coordinator":
        """Return what it is once no recovery is possible any more; `why` is a clause."""
        return self._give_up(FallBack(self.restorable, f"A transparent recovery is impossible: {why}."))

    def switch_off(self, text: str) -> "Coordinator":
        """Return what it is once recoveries would not be right; `text` says so."""
        return self._give_up(FallBack(self.restorable, text))

    def begin(self) -> "Coordinator":
        """Return what it is once a recovery is wanted, though nothing has failed, and all has gone well."""
        return replace(self, last_state=-1, attempts=0)._hold()

    def says(self) -> dict[int, ToRank]:
        """Return what each rank has still to hear."""
        match self.decided:
            case None if self.phase == "holding":
                return {rank: HoldRanks(self.recovery) for rank in self.ranks if rank not in self.held}
            case None if self.phase == "collecting":
                return {rank: RestRanks(self.recovery) for rank in self.ranks if rank not in self.reports}
            case RecoveryPlan(orders=orders) if self.phase == "ordering":
                waiting = (rank for rank in self.ranks if rank not in self.done)
                return {rank: CarryOut(self.recovery, orders[rank]) for rank in waiting}
            case FallBack() as decided if self.phase == "giving up":
                return {
                    rank: GiveUpRecovery(self.recovery, decided)
                    for rank in self.ranks
                    if rank not in self.done
                }
        return {}

    def _hold(self) -> "Coordinator":
        term, number = self.recovery
        return replace(
            self,
            recovery=(term, number + 1),
            phase="holding",
            held=frozenset(),
            reports={},
            decided=None,
            done=frozenset(),
        )

    def _give_up(self, decided: FallBack) -> "Coordinator":
        # With a new number: whatever the ranks do for the old one is over.
        return replace(self._hold(), phase="giving up", decided=decided)

    def _decide(self) -> "Coordinator":
        reports = [self.reports[rank] for rank in self.ranks]
        decided = decide(reports, self.restorable, self.servers_stay)
        if isinstance(decided, FallBack):
            return self._give_up(decided)
        attempts = self.attempts + 1 if decided.state <= self.last_state else 1
        if attempts > 1 and self.servers_stay:
            return replace(self, servers_stay=False)._decide()  # that they stayed has not helped
        if attempts > MOST_ATTEMPTS:
            why = f"{MOST_ATTEMPTS} recoveries in a row to the state after step {decided.state} have failed"
            return self._give_up(FallBack(self.restorable, f"Transparent recovery is given up: {why}."))
        return replace(self, phase="ordering", decided=decided, attempts=attempts, last_state=decided.state)


def succeed(ranks: Sequence[int], term: int, restorable: bool) -> Coordinator:
    """Return a coordinator that takes over from one that has died; `term` is higher than all before.

    It does not know whether a recovery was under way, so it begins one: where nothing has failed it only
    costs a moment.
    """
    return Coordinator(tuple(ranks), (term, 0), restorable)._hold()


@dataclass(frozen=True)
class Participant:
    """One rank's side. Its owner holds it, brings it to rest, carries out `order`, and tells of failures."""

    rank: int
    recovery: RecoveryNumber = (0, 0)
    phase: Literal[
        "running", "failed", "stopping", "held", "resting", "stopped", "carrying out", "given up"
    ] = "running"
    report: Report | None = None
    orders: tuple[Order, ...] = ()
    carried_out: int = 0
    decided: FallBack | None = None

    @property
    def order(self) -> Order | None:
        """What the rank is to do now."""
        return self.orders[self.carried_out] if self.phase == "carrying out" else None

    def hear(self, message: ToRank) -> "Participant":
        """Return what the participant is after a message."""
        if message.recovery < self.recovery or self.phase == "given up":
            return replace(self, recovery=max(message.recovery, self.recovery))
        match message:
            case HoldRanks(number) if number > self.recovery:
                return Participant(self.rank, number, "stopping")
            case RestRanks(number) if number == self.recovery and self.phase == "held":
                return replace(self, phase="resting")
            case CarryOut(number, orders) if number == self.recovery and self.phase == "stopped":
                return replace(self, phase="carrying out", orders=orders)._checked()
            case GiveUpRecovery(number, decided):
                return Participant(self.rank, number, "given up", decided=decided)
        return self

    def held(self) -> "Participant":
        """The rank, which was stopping, is held."""
        if self.phase != "stopping":
            raise ValueError(f"Rank {self.rank} is {self.phase}, not stopping.")
        return replace(self, phase="held")

    def stopped(self, report: Report) -> "Participant":
        """The rank, which was held, is at rest."""
        if self.phase != "resting":
            raise ValueError(f"Rank {self.rank} is {self.phase}, not resting.")
        return replace(self, phase="stopped", report=report)

    def did(self, order: Order) -> "Participant":
        """The rank has carried out its order."""
        if order is not self.order:
            raise ValueError(f"Rank {self.rank} was not to {order}.")
        return replace(self, carried_out=self.carried_out + 1)._checked()

    def failed(self) -> "Participant":
        """Something has failed or takes too long, while the application ran or an order was carried out.

        While the rank stops or is at rest, its report says so, or its first order will fail.
        """
        return replace(self, phase="failed") if self.phase in ("running", "carrying out") else self

    def says(self) -> FromRank | None:
        """Return what the coordinator has still to hear, or to hear again if it has asked again."""
        match self.phase:
            case "failed":
                return RankAlarmed(self.rank, self.recovery)
            case "stopped":
                assert self.report is not None
                return RankStopped(self.rank, self.recovery, self.report)
            case "running" | "held" as phase:
                return (RankDone if phase == "running" else RankHeld)(self.rank, self.recovery)
            case "given up":
                assert self.decided is not None
                return GivenUp(self.rank, self.recovery, self.decided)
        return None

    def _checked(self) -> "Participant":
        return self if self.carried_out < len(self.orders) else replace(self, phase="running")
