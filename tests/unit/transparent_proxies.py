"""A device proxy's client as the agent sees it: it answers as docs/how-it-works/transparent.md says."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from jitckpt.wire.communicators import EVERYBODY, FOREVER, Count, Membership, RecoveryNumber
from jitckpt.wire.proxy_messages import (
    AGAIN,
    EMPTY,
    FAILED,
    FIRST,
    HEALTHY,
    LEFT_OUT,
    LOST,
    RESTS,
    SUSPECT,
    SWITCH_OFF,
    TRIED,
    VALID,
    Alarm,
    Done,
    FromProxy,
    GiveUp,
    GoOn,
    Held,
    Hello,
    HostCopy,
    Id,
    Ids,
    Replay,
    Rest,
    Restart,
    Settle,
    Settled,
    Standing,
    Stop,
    Stopped,
    ToProxy,
    Validated,
    Validates,
    place_of,
)

WORLD = "11" * 16
PAIR = "22" * 16


@dataclass
class Proxy:
    """One rank of `size`. state: what its device holds; None: nothing yet. kept: the states of its images.

    failing: the call that fails whenever it is made, with its error. orders: all that it has carried out.
    lacks: what it has still to learn in a validation; others' results differ as long as one lacks something.
    wrong: its results always differ. has_failed: a hook of its program has. waits: it is at its place for a
    validation. step: which it makes there; place: as it said that last. validated: what it was told; heard:
    by place. compares: else it has nothing to compare after a failure, and wants the validation left out.
    made: by state the collectives that it had made in the world; 0: until now. waited: microseconds, for its
    device. content: a digest of its parameters and optimizer state; unfit: why they can't stay on the device.
    tries: it makes the step after which they may; fails_trial: why they can't, as that shows. stays: they do,
    so that `kept` has none of them. ready: the step that it could begin. copies: the states of which they are
    in host memory, too. breaks: its server can't stay the next time. couple: a communicator of its own with
    its neighbour. unsettled: why it can't rest with its server; ends_at_rest: that ends meanwhile.
    """

    rank: int
    size: int
    kept: tuple[int, ...] = (6, 7)
    state: int | None = 7
    held: bool = False
    failing: tuple[int, str] | None = None
    got_error: bool = False
    given_up: str = ""
    recovery: RecoveryNumber = (0, 0)
    server: int = 0
    issues: Sequence[str] = (WORLD,)
    failed: tuple[int, str] = (0, "")
    orders: list[ToProxy] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    waited: int = 0
    lacks: int = 0
    wrong: bool = False
    has_failed: bool = False
    waits: bool = False
    validated: list[int] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)
    compares: bool = True
    content: str = ""
    unfit: str = ""
    tries: bool = False
    fails_trial: str = ""
    stays: bool = False
    device: int = LOST
    ended: int = 7
    ready: int = 7
    copies: set[int] = field(default_factory=set)
    breaks: bool = False
    couple: str = ""
    unsettled: str = ""
    ends_at_rest: bool = False
    step: int = 0
    place: int = 0

    def hello(self) -> Hello:
        return Hello(self.recovery, 100 + self.rank, self.rank, "cafe")

    def alarm(self, call: int = 0, error: str = "its server was ended by Killed") -> Alarm:
        self.held, self.failed = True, (call, error)
        return Alarm(self.recovery, call, error)

    def places(self) -> tuple[Membership, ...]:
        since = max(self.made, default=7)
        pair = [Membership(PAIR, WORLD, 1, self.rank, 2, since)] if self.rank < 2 <= self.size else []
        if self.couple:
            pair.append(Membership(self.couple, "", 0, self.rank % 2, 2, 0))
        counts = tuple(Count(state, EVERYBODY, made, 0) for state, made in self.made.items() if state)
        return (Membership(WORLD, "", 0, self.rank, self.size, 0, FOREVER, counts), *pair)

    def standing(self) -> Standing:
        counts = (Count(FOREVER, EVERYBODY, self.made.get(0, 0), 0),)
        places = (Membership(WORLD, "", 0, self.rank, self.size, 0, FOREVER, counts),)
        return Standing(self.recovery, self.waited, 60_000_000, places)

    def validates(self) -> Validates:
        """Come to its place."""
        self.step += 1
        return self.says(FIRST)

    def has_tried(self) -> Validates:
        """Come to the end of the step."""
        return self.says(TRIED, unfit=self.fails_trial)

    def rests(self, unfit: str = "") -> Validates:
        """Come to the end of the step behind which all are to wait."""
        return self.says(RESTS, unfit=unfit)

    def loses_its_server(self) -> None:
        """It has ended, as the rank is at rest."""
        assert self.held
        self.state, self.device = None, LOST

    def says(self, what: int, text: str = "", digest: str = "", unfit: str = "") -> Validates:
        """Say that at its place."""
        self.waits, self.place = True, place_of(self.step, what)
        return Validates(self.recovery, self.place, what, text, digest, unfit)

    def fails(self) -> Validates:
        """A hook of its program has failed, wherever that is."""
        self.has_failed = True
        return self.says(FAILED, "its hook has failed")

    def judges(self, overwritten: bool) -> Validates:
        """Say what follows from calls that were made again; all is put back if nothing was overwritten."""
        if self.has_failed:
            return self.fails()
        if self.place == place_of(self.step, RESTS):
            return self.rests()
        if self.tries:
            return self.has_tried()
        if not overwritten and not self.compares:
            return self.says(LEFT_OUT, "its memory was not compared")
        self.lacks = max(self.lacks - 1, 0) if overwritten else 0
        says = AGAIN if self.lacks else SWITCH_OFF if self.wrong else VALID
        said = f"what rank {self.rank} has"
        return self.says(VALID, said, self.content, self.unfit) if says == VALID else self.says(says, said)

    def hear(self, order: ToProxy) -> FromProxy | None:
        """Carry out an order; return the answer."""
        if order.recovery < self.recovery or self.given_up:
            return None
        assert order.recovery == self.recovery or isinstance(order, Stop | GiveUp)
        self.recovery = order.recovery
        self.orders.append(order)
        answer: FromProxy | None = None
        match order:
            case Stop() | Rest():
                answer = self.stops(order)
            case Restart():
                assert self.held, "the host was not stopped"
                answer = self.restarts(order)
            case Replay():
                answer = self.makes_calls_again(order)
            case Validated(_, place, valid) if self.waits and place == self.place:
                answer = self.is_told(place, valid)
            case Settle():
                self.held = True
                answer = self.settles()
            case GoOn():
                answer = self.goes_on()
            case GiveUp(_, reason):
                self.given_up, self.held = reason, False
        return answer

    def is_told(self, place: int, valid: int) -> Validates | None:
        """Go on from its place; or try whether the state can stay, and say so behind the step."""
        self.validated.append(valid)
        self.heard[place] = valid
        self.waits = False
        tried, self.tries = self.tries, valid == 2 and not self.tries
        if self.tries:
            return self.has_tried()
        if valid == 2 and tried:
            self.stays, self.device = True, HEALTHY
        return None

    def settles(self) -> Settled:
        """Say that it is held, with a copy of its state, or why not."""
        if self.stays and not self.unsettled and self.state is not None:
            self.copies.add(self.state)
        return Settled(self.recovery, int(not self.unsettled), self.unsettled)

    def goes_on(self) -> Validates | Alarm | None:
        """Go on where it was held, unless something has failed meanwhile."""
        if self.ends_at_rest:
            self.ends_at_rest = False
            self.loses_its_server()
            return self.alarm()
        if self.failed[1]:
            return None
        self.held = False
        if self.state is not None:
            self.copies.discard(self.state)
        return self.rests()

    def stops(self, order: Stop | Rest) -> Held | Stopped:
        """Hold the program; then say what there is."""
        if isinstance(order, Stop):
            self.held = True
            return Held(self.recovery)
        assert self.held, "the host was not stopped"
        first, last = (self.kept[0], self.kept[-1]) if self.kept else (1, 0)
        failed, self.failed = self.failed, (0, "")
        now = (3, 0, LOST, last, last, last)
        if self.stays:
            bits = sum(1 << state - first for state in self.copies if first <= state <= last)
            now = (0, bits, self.device, self.ended, self.ended, self.ready)
        return Stopped(self.recovery, first, last, *now, 90, *failed, self.places())

    def restarts(self, order: Restart) -> Ids | Alarm:
        """Finish its step, copy its state, and have a server that is as a new one."""
        copy: tuple[HostCopy, ...] = ()
        readable = self.device in (HEALTHY, SUSPECT)
        if order.finish:
            if not readable:
                return self.alarm()
            assert order.finish == self.ready == self.ended + 1, "another step is due"
            self.state = self.ended = order.finish
        if order.copy and self.stays:
            if order.copy not in self.copies:
                if not readable:
                    return self.alarm()
                assert order.copy == self.state == self.ended, "that is not the state on the device"
                self.copies.add(order.copy)
            copy = (HostCopy(self.rank, 100 + self.rank, 9, order.copy, 1000, int(self.content, 16)),)
        stays = bool(order.may_stay) and not self.breaks
        if self.stays:
            stays = stays and self.device != LOST
            self.device = self.device if stays else EMPTY
        self.state = self.state if self.stays and stays else None
        self.server, self.breaks = self.server + (not stays), False
        issued = () if self.rank else self.issues
        return Ids(self.recovery, tuple(map(self.new_id, issued)), 5, 6, int(stays), copy)

    def makes_calls_again(self, order: Replay) -> Done | Alarm:
        """Get the state's memory, and make the calls since then."""
        assert {one.key for one in order.making if not one.parent} <= {one.key for one in order.ids}
        assert order.state in self.kept, "there is no image of it"
        if order.in_place:
            assert self.stays
            assert self.device != EMPTY, "nothing is on the device"
            assert self.device == LOST or self.state == order.state == self.ended, "another state is there"
        elif order.source:
            assert order.source[0].offset == order.state, "that is another state"
            assert order.source[0].digest == int(self.content, 16), "that is another shard's"
        else:
            assert not self.stays, "it has no copy of the state"
        if self.stays and self.device == LOST:
            return self.alarm()
        if self.failing is not None and not order.deliver_error:
            return self.alarm(*self.failing)
        self.got_error, self.failing = bool(order.deliver_error), None
        self.state = self.ended = self.ready = order.state
        self.held, self.device = False, HEALTHY if self.stays else LOST
        return Done(self.recovery, 1, 2, 3, 4, 5, 6)

    def loses_its_device(self) -> None:
        self.device, self.state = LOST, None

    def new_id(self, key: str) -> Id:
        """Return an id that no other recovery makes."""
        text = f"{key} {self.recovery}".encode()
        return Id(key, hashlib.sha512(text).digest().ljust(128, b"\0"))
