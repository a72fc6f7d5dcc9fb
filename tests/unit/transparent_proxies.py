"""A device proxy's client as the agent sees it: it answers every order as docs/transparent.md says."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from jitckpt.transparent.communicators import EVERYBODY, FOREVER, Count, Place
from jitckpt.transparent.coordination import Number
from jitckpt.transparent.messages import (
    AGAIN,
    FIRST,
    LOST,
    SWITCH_OFF,
    VALID,
    Alarm,
    Done,
    FromProxy,
    GiveUp,
    Hello,
    Id,
    Ids,
    Replay,
    Restart,
    Standing,
    Stop,
    Stopped,
    ToProxy,
    Validated,
    Validates,
)

WORLD = "11" * 16
PAIR = "22" * 16


@dataclass
class Proxy:
    """One rank of `size`. state: what its device holds; None: nothing yet. kept: the states of its images.

    failing: the call that fails whenever it is made, with its error. orders: all that it has carried out.
    lacks: what it has still to learn in a validation; others' results differ as long as one lacks something.
    wrong: its results always differ. waits: it is at its place for a validation. validated: what it was told.
    made: by state the collectives that it had made in the world; 0: until now. waited: microseconds, for its
    device.
    """

    rank: int
    size: int
    kept: tuple[int, ...] = (6, 7)
    state: int | None = 7
    held: bool = False
    failing: tuple[int, str] | None = None
    got_error: bool = False
    given_up: str = ""
    recovery: Number = (0, 0)
    server: int = 0
    issues: Sequence[str] = (WORLD,)
    failed: tuple[int, str] = (0, "")
    orders: list[ToProxy] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    waited: int = 0
    lacks: int = 0
    wrong: bool = False
    waits: bool = False
    validated: list[int] = field(default_factory=list)

    def hello(self) -> Hello:
        return Hello(self.recovery, 100 + self.rank, self.rank, "cafe")

    def alarm(self, call: int = 0, error: str = "its server was ended by Killed") -> Alarm:
        self.held, self.failed = True, (call, error)
        return Alarm(self.recovery, call, error)

    def places(self) -> tuple[Place, ...]:
        since = max(self.made, default=7)
        pair = [Place(PAIR, WORLD, 1, self.rank, 2, since)] if self.rank < 2 <= self.size else []
        counts = tuple(Count(state, EVERYBODY, made, 0) for state, made in self.made.items() if state)
        return (Place(WORLD, "", 0, self.rank, self.size, 0, FOREVER, counts), *pair)

    def standing(self) -> Standing:
        counts = (Count(FOREVER, EVERYBODY, self.made.get(0, 0), 0),)
        places = (Place(WORLD, "", 0, self.rank, self.size, 0, FOREVER, counts),)
        return Standing(self.recovery, self.waited, 60_000_000, places)

    def validates(self) -> Validates:
        """Come to its place."""
        self.waits = True
        return Validates(self.recovery, FIRST, "")

    def judges(self, overwritten: bool) -> Validates:
        """Say what follows from calls that were made again; all is put back if nothing was overwritten."""
        self.lacks = max(self.lacks - 1, 0) if overwritten else 0
        says = AGAIN if self.lacks else SWITCH_OFF if self.wrong else VALID
        return Validates(self.recovery, says, f"what rank {self.rank} has")

    def hear(self, order: ToProxy) -> FromProxy | None:
        """Carry out an order; return the answer."""
        if order.recovery < self.recovery or self.given_up:
            return None
        assert order.recovery == self.recovery or isinstance(order, Stop | GiveUp)
        self.recovery = order.recovery
        self.orders.append(order)
        match order:
            case Stop():
                self.held = True
                first, last = (self.kept[0], self.kept[-1]) if self.kept else (1, 0)
                failed, self.failed = self.failed, (0, "")
                return Stopped(
                    self.recovery, first, last, 3, LOST, last, last, last, 90, *failed, self.places()
                )
            case Restart(_, may_stay):
                assert self.held, "the host was not stopped"
                self.server, self.state = self.server + (not may_stay), None
                issued = () if self.rank else self.issues
                return Ids(self.recovery, tuple(map(self.new_id, issued)), 5, 6, may_stay)
            case Replay(_, state, deliver_error, _, _, _, ids, making):
                assert self.state is None, "the server is not new"
                assert {one.key for one in making if not one.parent} <= {one.key for one in ids}
                assert state in self.kept, "there is no image of it"
                if self.failing is not None and not deliver_error:
                    return self.alarm(*self.failing)
                self.got_error, self.failing = bool(deliver_error), None
                self.state, self.held = state, False
                return Done(self.recovery, 1, 2, 3, 4, 5, 6)
            case Validated(_, valid):
                assert self.waits, "it does not wait for that"
                self.validated.append(valid)
                self.waits = False
            case GiveUp(_, reason):
                self.given_up, self.held = reason, False
        return None

    def new_id(self, key: str) -> Id:
        """Return an id that no other recovery makes."""
        text = f"{key} {self.recovery}".encode()
        return Id(key, hashlib.sha512(text).digest().ljust(128, b"\0"))
