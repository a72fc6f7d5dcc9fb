"""A small model of ranks that are told to recover: what each order does, and what it takes to be right.

It knows the contents of a device as "parameters and optimizer state are those of state k", so that a test
can say of every order whether it does the right thing to them. An order that would go wrong fails at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jitckpt.decisions.transparent.communicators import Communicator, Creation
from jitckpt.decisions.transparent.orders import (
    Abort,
    DeliverError,
    FinishStep,
    LetGoOn,
    LoadFromHost,
    MakeCommunicators,
    Order,
    Reset,
    RestartServer,
    RestoreLocalState,
    RunLog,
    SaveToHost,
)
from jitckpt.decisions.transparent.report import Device, FailedCall, Report
from jitckpt.wire.communicators import Membership

Place = Literal["begin", "middle", "ready", "step"]  # of a minibatch

LOG_END = 100


class WrongOrderError(Exception):
    """An order that would give a wrong result, or can't be carried out."""


def require(condition: bool, why: str) -> None:
    if not condition:
        raise WrongOrderError(why)


@dataclass
class Rank:
    """One rank. `state`: of the parameters on its device; None: no state at all, or one half stepped.

    ended: optimizer steps, while the device has a state. local: the state whose rank-local part is on the
    device, untouched; right: whether all on it is as in an undisturbed run. host_ended: the steps whose calls
    are all in the log. images: the states of which the rank's own host has all.
    """

    number: int
    shard: int = 0
    device: Device = "healthy"
    state: int | None = 0
    ended: int = 0
    place: Place = "middle"
    local: int | None = None
    kept_from: int = 0
    kept_to: int = 0
    images: frozenset[int] = frozenset()
    host_copies: frozenset[int] = frozenset()
    communicators_of: int | None = None  # the recovery that made those in use
    right: bool = True
    host_ended: int = 0
    log_end: int = LOG_END
    failure: FailedCall | None = None
    failure_before: FailedCall | None = None
    got_error: bool = False
    resumed: bool = False
    tables: tuple[Communicator, ...] = ()

    def report(self) -> Report:
        begun = self.ended + (self.place == "step")
        return Report(
            self.number,
            self.shard,
            "empty"
            if self.device == "healthy" and self.state is None and self.place != "step"
            else self.device,
            begun=begun,
            ended=self.ended,
            ready=self.ended + (self.place in ("ready", "step")),
            kept_from=self.kept_from,
            kept_to=self.kept_to,
            images=self.images,
            host_copies=self.host_copies,
            host_ended=self.host_ended,
            log_end=self.log_end,
            failure=self.failure,
            failure_before=self.failure_before,
            communicators=tuple(
                Membership(one.key, one.parent, one.split, one.members.index(self.number), len(one.members))
                for one in self.tables
            ),
        )

    def lose(self) -> None:
        """The device is lost with all that is on it."""
        self.device, self.right, self.state, self.local = "lost", False, None, None
        self.communicators_of = None

    def do(self, order: Order, recovery: int) -> None:  # noqa: PLR0912  a case an order
        """Carry out an order in which no other rank takes part, or the own side of one."""
        match order:
            case Abort():
                require(self.device != "lost", "nothing can be aborted on a lost device")
                self.communicators_of = None
            case FinishStep(state):
                require(self.device in ("healthy", "suspect", "changed"), "the device can't run anything")
                require(self.place == "ready" and self.ended == state - 1, "another step is due")
                require(self.right, "what the step starts from is not right")
                require(self.host_ended >= state, "not all calls of the step are in the log")
                self.state, self.ended, self.place, self.local = state, state, "begin", state
                self.device = "healthy" if self.device == "changed" else self.device
            case SaveToHost(state) if state not in self.images:
                if state not in self.host_copies:
                    require(self.device in ("healthy", "suspect"), "the device can't be read")
                    require(self.state == state, "that is not the state on the device")
                self.host_copies = self.host_copies | {state}
            case RestartServer():
                self.device, self.state, self.local, self.right = "empty", None, None, False
                self.place, self.communicators_of = "begin", None
            case Reset(state):
                require(
                    self.device in ("healthy", "empty", "changed"), "the server has to be restarted before"
                )
                require(self.kept_from <= state <= self.kept_to, "what made the objects is not kept")
                if self.state != state:
                    self.state, self.device = None, "empty"
                self.ended, self.place, self.local, self.right = state, "begin", None, False
            case LoadFromHost(state, of):
                require(of != self.number or state in self.host_copies | self.images, "the host has no copy")
                require(
                    self.device in ("healthy", "empty") and self.ended == state, "not reset to that state"
                )
                self.state, self.device = state, "healthy"
            case MakeCommunicators():
                require(self.device in ("healthy", "empty"), "no communicator without a device")
                self.communicators_of = recovery
            case RestoreLocalState(state):
                require(self.kept_from <= state <= self.kept_to, "the host lacks that rank-local state")
                require(self.device == "healthy" and self.ended == state, "not reset to that state")
                self.local = state
            case RunLog(state, end):
                require(
                    self.state == self.local == state == self.ended, "the replay starts from another state"
                )
                require(self.communicators_of == recovery, "the collectives have no communicator")
                require(end <= self.log_end, "the log has no such call")
                require(state <= self.host_ended, "the host has still to make calls of the step")
                self.place, self.local, self.right = "middle", None, True
            case DeliverError(failure):
                require(
                    failure == self.failure == self.failure_before, "the application gets another's error"
                )
                self.got_error = True
            case LetGoOn():
                require(self.right, "the application would go on with a wrong state")
                require(self.communicators_of == recovery, "the application has no communicator")
                self.resumed, self.host_copies = True, frozenset()


class World:
    """The ranks of a job, and how far each is with its orders. Orders that need others wait for them.

    A rank may still be at the orders of an older recovery than another: then they do not meet.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = {rank.number: rank for rank in ranks}
        self.recovery = dict.fromkeys(self.ranks, 0)
        self._orders: dict[int, tuple[Order, ...]] = {}
        self._next: dict[int, int] = {}
        self._created: dict[int, int] = {}  # communicators of the order that the rank is at

    def copy(self) -> "World":
        other = World([replace(rank) for rank in self.ranks.values()])
        other.recovery, other._orders = dict(self.recovery), dict(self._orders)
        other._next, other._created = dict(self._next), dict(self._created)
        return other

    def content(self) -> tuple[object, ...]:
        """Return all there is, to be compared."""
        ranks = tuple(tuple(vars(rank).values()) for rank in self.ranks.values())
        progress = (self.recovery, self._orders, self._next, self._created)
        return ranks, *(tuple(sorted(one.items())) for one in progress)

    def reports(self) -> list[Report]:
        return [rank.report() for rank in self.ranks.values()]

    def begin(self, orders: Mapping[int, tuple[Order, ...]]) -> None:
        """Start a recovery of all ranks; whatever was under way is dropped."""
        require(orders.keys() == self.ranks.keys(), "not every rank has a plan")
        recovery = max(self.recovery.values()) + 1
        for rank, own in orders.items():
            self.begin_rank(rank, recovery, own)

    def begin_rank(self, rank: int, recovery: int, orders: tuple[Order, ...]) -> None:
        self.recovery[rank], self._orders[rank] = recovery, orders
        self._next[rank] = self._created[rank] = 0
        self.ranks[rank].resumed = False

    def at(self, rank: int) -> Order | None:
        place = self._next.get(rank, 0)
        orders = self._orders.get(rank, ())
        return orders[place] if place < len(orders) else None

    def over(self) -> bool:
        return all(self.at(rank) is None for rank in self.ranks)

    def able(self) -> list[int]:
        """Return the ranks that can go on."""
        return [rank for rank in self.ranks if self.at(rank) is not None and self._can_go_on(rank)]

    def go_on(self, rank: int) -> list[int]:
        """Let a rank carry out its next order, with those that take part in it; return whose are over."""
        match self.at(rank):
            case MakeCommunicators(creations) if self._created[rank] < len(creations):
                for caller in creations[self._created[rank]].callers:
                    self._created[caller] += 1
                return []
        return self._end(rank)

    def run(self, choose: Callable[[list[int]], int] = lambda able: able[0]) -> None:
        """Carry out all orders; WrongOrderError if ranks wait in a circle."""
        while not self.over():
            able = self.able()
            require(bool(able), f"deadlock: { ({rank: self.at(rank) for rank in self.ranks}) }")
            self.go_on(choose(able))

    def _end(self, rank: int) -> list[int]:
        order = self.at(rank)
        assert order is not None
        self.ranks[rank].do(order, self.recovery[rank])
        self._next[rank] += 1
        self._created[rank] = 0
        return [rank]

    def _can_go_on(self, rank: int) -> bool:
        match self.at(rank):
            case MakeCommunicators(creations) if self._created[rank] < len(creations):
                due = creations[self._created[rank]]
                return all(self._meets(rank, caller) and self._is_at(caller, due) for caller in due.callers)
            case LoadFromHost(state, of) if of != rank:
                require(self.ranks[of].shard == self.ranks[rank].shard, "another shard's state")
                # Whatever has become of the other's device, what its host has can be read.
                return self.recovery[rank] == self.recovery[of] and self._has_saved(of, state)
            case RunLog():
                # It may hold collectives of all ranks.
                return all(self._meets(rank, other) and self._has_met(other) for other in self.ranks)
        return True

    def _meets(self, rank: int, other: int) -> bool:
        """Whether both are at the same recovery, and the other's device can take part in it."""
        return self.recovery[rank] == self.recovery[other] and self.ranks[other].device != "lost"

    def _is_at(self, rank: int, creation: Creation) -> bool:
        order = self.at(rank)
        return isinstance(order, MakeCommunicators) and (
            self._created[rank] < len(order.creations) and order.creations[self._created[rank]] == creation
        )

    def _has_met(self, rank: int) -> bool:
        """Whether the rank is at its replay, or past it."""
        if not self._orders[rank]:
            return False  # it has not heard of them yet
        rest = self._orders[rank][self._next[rank] :]
        return not any(isinstance(order, LoadFromHost | MakeCommunicators) for order in rest)

    def _has_saved(self, rank: int, state: int) -> bool:
        """Whether the rank is past its orders to save, and its host has that state."""
        rest = self._orders[rank][self._next[rank] :]
        return state in self.ranks[rank].host_copies and not any(
            isinstance(order, SaveToHost) for order in rest
        )
