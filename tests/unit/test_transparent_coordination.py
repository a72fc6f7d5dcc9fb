"""The agreement on a recovery: every state that it can come to, however messages, ranks and agents fare."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transparent_model import Rank, World

from jitckpt.decisions.transparent.coordination import (
    MOST_ATTEMPTS,
    CarryOut,
    Coordinator,
    FromRank,
    GivenUp,
    GiveUpRecovery,
    HoldRanks,
    Participant,
    RankAlarmed,
    RankDone,
    RankHeld,
    RankStopped,
    RestRanks,
    ToRank,
    succeed,
)
from jitckpt.decisions.transparent.decision import FallBack
from jitckpt.decisions.transparent.orders import Abort, RestartServer
from jitckpt.decisions.transparent.report import Report

Sent = tuple[int, FromRank | ToRank]  # to that rank; below 0: to the coordinator ~number


@dataclass(frozen=True)
class Fate:
    """What may still go wrong: how many transient failures, lost devices, lost nodes, lost coordinators."""

    failures: int = 0
    losses: int = 0
    deaths: int = 0
    successions: int = 0


class Job:
    """A job with its coordinators. Every message that was ever sent may still come, any number of times."""

    def __init__(self, world: World, fate: Fate) -> None:
        self.world, self.fate = world, fate
        self.coordinators: tuple[Coordinator | None, ...] = (Coordinator(tuple(world.ranks)),)
        self.participants: dict[int, Participant | None] = {rank: Participant(rank) for rank in world.ranks}
        self.lost: frozenset[int] = frozenset()  # devices whose loss has not been reported
        self.sent: frozenset[Sent] = frozenset()
        self.say()

    def after(self, event: Callable[["Job"], None]) -> "Job":
        other = Job.__new__(Job)
        other.__dict__ |= self.__dict__
        other.world, other.participants = self.world.copy(), dict(self.participants)
        event(other)
        other.say()
        return other

    def content(self) -> tuple[object, ...]:
        coordinators = tuple(
            c
            and (
                c.recovery,
                c.phase,
                c.held,
                tuple(sorted(c.reports)),
                str(c.decided),
                c.done,
                c.attempts,
                c.last_state,
                c.servers_stay,
            )
            for c in self.coordinators
        )
        participants = tuple(self.participants.values())
        return self.fate, coordinators, participants, self.lost, self.sent, self.world.content()

    def living(self) -> dict[int, Participant]:
        return {rank: p for rank, p in self.participants.items() if p is not None}

    def say(self) -> None:
        """Send all that is being said."""
        found: set[Sent] = set()
        for participant in self.living().values():
            message = participant.says()
            if message is not None:
                found |= {(~place, message) for place in range(len(self.coordinators))}
        for coordinator in self.coordinators:
            if coordinator is not None:
                found |= set(coordinator.says().items())
        self.sent = self.sent | found

    # What goes wrong.

    def fails(self, rank: int) -> None:
        self.fate = replace(self.fate, failures=self.fate.failures - 1)
        self.participants[rank] = self.living()[rank].failed()

    def loses_device(self, rank: int) -> None:
        self.fate = replace(self.fate, losses=self.fate.losses - 1)
        self.world.ranks[rank].lose()
        self.lost = self.lost | {rank}

    def dies(self, rank: int) -> None:
        self.fate = replace(self.fate, deaths=self.fate.deaths - 1)
        self.world.ranks[rank].lose()
        self.participants[rank] = None
        self.hears_of_deaths()

    def is_succeeded(self, dead: bool) -> None:
        """Another coordinator takes over; the old one may go on for a while, not knowing."""
        self.fate = replace(self.fate, successions=self.fate.successions - 1)
        new = succeed([*self.participants], len(self.coordinators), restorable=False)
        old = self.coordinators[:-1] + ((None,) if dead else self.coordinators[-1:])
        self.coordinators = (*old, new)
        self.hears_of_deaths()

    def hears_of_deaths(self) -> None:
        *old, newest = self.coordinators
        for rank, participant in self.participants.items():
            if participant is None and newest is not None:
                newest = newest.lose(rank, "its node does not answer")
        self.coordinators = (*old, newest)

    # What goes on.

    def deliver(self, sent: Sent) -> None:
        to, message = sent
        if isinstance(message, HoldRanks | RestRanks | CarryOut | GiveUpRecovery):
            before = self.living().get(to)
            if before is not None:
                self.participants[to] = now = before.hear(message)
                term, number = now.recovery
                self.world.begin_rank(to, 1000 * term + number, now.orders)
        else:
            coordinators = list(self.coordinators)
            receiver = coordinators[~to]
            coordinators[~to] = receiver and receiver.hear(message)
            self.coordinators = tuple(coordinators)

    def is_news(self, sent: Sent) -> bool:
        to, message = sent
        if isinstance(message, HoldRanks | RestRanks | CarryOut | GiveUpRecovery):
            rank = self.living().get(to)
            return rank is not None and rank.hear(message) != rank
        receiver = self.coordinators[~to]
        return receiver is not None and receiver.hear(message) != receiver

    def notices_loss(self, rank: int) -> None:
        self.participants[rank] = self.living()[rank].failed()

    def is_held(self, rank: int) -> None:
        self.participants[rank] = self.living()[rank].held()

    def stops(self, rank: int) -> None:
        """Communicators end here: what comes of that must not count anywhere."""
        living = self.living()
        here = living[rank].recovery
        for other in living.values():
            assert other.recovery > here or (
                other.recovery == here and other.phase not in ("running", "failed", "stopping")
            ), f"rank {other.rank} would take what comes of a communicator that has ended"
        self.lost = self.lost - {rank}
        self.participants[rank] = self.living()[rank].stopped(self.world.ranks[rank].report())

    def carries_out(self, rank: int) -> None:
        orders = {other: self.world.at(other) for other in self.world.ranks}
        if isinstance(orders[rank], RestartServer):
            self.lost = self.lost - {rank}
        for other in self.world.go_on(rank):
            order = orders[other]
            assert order is not None
            self.participants[other] = self.living()[other].did(order)

    def able(self) -> list[int]:
        """Return the ranks that can carry out their order."""
        carrying = {rank for rank, one in self.living().items() if one.phase == "carrying out"}
        found = []
        for rank in self.world.able():
            order = self.world.at(rank)
            if rank in carrying and (rank not in self.lost or isinstance(order, RestartServer)):
                found.append(rank)
        return found

    def wrongs(self) -> Iterator["Job"]:
        """Yield what the job is after anything that may go wrong now."""
        for rank, participant in self.living().items():
            if self.fate.failures and participant.phase in ("running", "carrying out"):
                yield self.after(lambda job, r=rank: job.fails(r))  # type: ignore[misc]
            if self.fate.losses and participant.phase != "given up":
                yield self.after(lambda job, r=rank: job.loses_device(r))  # type: ignore[misc]
            if self.fate.deaths:
                yield self.after(lambda job, r=rank: job.dies(r))  # type: ignore[misc]
        if self.fate.successions:
            yield self.after(lambda job: job.is_succeeded(dead=True))
            yield self.after(lambda job: job.is_succeeded(dead=False))

    def events(self) -> Iterator["Job"]:
        """Yield what the job is after anything that can happen now by itself."""
        for rank, participant in self.living().items():
            if participant.phase == "stopping":
                yield self.after(lambda job, r=rank: job.is_held(r))  # type: ignore[misc]
            if participant.phase == "resting":
                yield self.after(lambda job, r=rank: job.stops(r))  # type: ignore[misc]
            if rank in self.lost and participant.phase in ("running", "carrying out"):
                yield self.after(lambda job, r=rank: job.notices_loss(r))  # type: ignore[misc]
        for rank in self.able():
            yield self.after(lambda job, r=rank: job.carries_out(r))  # type: ignore[misc]
        for sent in filter(self.is_news, self.sent):
            yield self.after(lambda job, s=sent: job.deliver(s))  # type: ignore[misc]

    def has_ended(self) -> bool:
        """Return whether nothing is left to do; see that it ended well."""
        newest = self.coordinators[-1]
        assert newest is not None
        living = self.living().values()
        if newest.phase == "giving up":
            return newest.over and all(one.phase == "given up" for one in living)
        if newest.phase != "watching" or self.lost:
            return False
        if any(one.phase != "running" or one.recovery != newest.recovery for one in living):
            return False
        assert all(rank.right for rank in self.world.ranks.values())
        return True


def job(size: int, fate: Fate, place: str = "middle") -> Job:
    one = Rank(0, state=1, ended=1, kept_from=1, kept_to=1 + (place == "ready"), host_ended=1)
    one.place = "ready" if place == "ready" else "middle"
    return Job(World([replace(one, number=number) for number in range(size)]), fate)


def explore(first: Job, most: int) -> int:
    """Go through all that can happen; every state must be safe, and must be able to end by itself."""
    known = {first.content(): 0}
    jobs = [first]
    before: list[list[int]] = [[]]  # the states from which one comes without anything going wrong
    ended: list[int] = []
    for number, now in enumerate(jobs):
        assert len(jobs) < most, "there are more states than expected"
        if now.has_ended():
            ended.append(number)
            assert all(after.has_ended() for after in now.events()), "an old message wakes the job"
        for after, by_itself in [
            *((one, True) for one in now.events()),
            *((one, False) for one in now.wrongs()),
        ]:
            content = after.content()
            if content not in known:
                known[content] = len(jobs)
                jobs.append(after)
                before.append([])
            if by_itself:
                before[known[content]].append(number)
    ends, latest = set(ended), set(ended)
    while latest:
        latest = {one for number in latest for one in before[number]} - ends
        ends |= latest
    assert len(ends) == len(jobs), "from some states the job never ends its recovery"
    return len(jobs)


@pytest.mark.parametrize(
    ("size", "fate"),
    [
        (2, Fate()),
        (2, Fate(failures=1)),
        (2, Fate(losses=1)),
        (2, Fate(deaths=1)),
        (2, Fate(successions=1)),
        (2, Fate(failures=2)),
        (2, Fate(failures=1, losses=1)),
        (2, Fate(losses=2)),
        (2, Fate(failures=1, deaths=1)),
        (2, Fate(losses=1, deaths=1)),
        (3, Fate(failures=1)),
        (3, Fate(losses=1)),
    ],
)
def test_every_state_is_safe_and_ends(size: int, fate: Fate) -> None:
    assert explore(job(size, fate), most=20_000) > 1 or fate == Fate()


def test_a_loss_when_the_gradients_are_complete() -> None:
    assert explore(job(2, Fate(losses=1), place="ready"), most=20_000) > 100


@settings(deadline=None)
@given(st.data())
def test_any_history_ends(data: st.DataObject) -> None:
    counts = st.integers(0, 2)
    fate = Fate(data.draw(counts), data.draw(counts), data.draw(st.integers(0, 1)), data.draw(counts))
    now = job(data.draw(st.integers(2, 4)), fate, data.draw(st.sampled_from(["middle", "ready"])))
    for _ in range(data.draw(st.integers(0, 50))):
        wrong = list(now.wrongs()) if data.draw(st.integers(0, 9)) == 0 else []
        able = wrong or list(now.events())
        if able:
            now = able[data.draw(st.integers(0, len(able) - 1))]
    for _ in range(1000):
        if now.has_ended():
            return
        now = next(now.events())
    raise AssertionError("the recovery does not end")


def stopped(coordinator: Coordinator, failing: int = 0) -> Coordinator:
    """Let something fail, and all ranks report."""
    coordinator = coordinator.hear(RankAlarmed(failing, coordinator.recovery))
    coordinator = held(coordinator)
    for rank in coordinator.ranks:
        coordinator = coordinator.hear(RankStopped(rank, coordinator.recovery, Report(rank)))
    return coordinator


def held(coordinator: Coordinator) -> Coordinator:
    for rank in coordinator.ranks:
        assert coordinator.says()[rank] == HoldRanks(coordinator.recovery)
        coordinator = coordinator.hear(RankHeld(rank, coordinator.recovery))
    return coordinator


def test_failures_that_come_again_and_again_are_given_up() -> None:
    coordinator = Coordinator((0, 1))
    for _ in range(MOST_ATTEMPTS):
        coordinator = stopped(coordinator)
        assert coordinator.phase == "ordering"
        for rank in coordinator.ranks:
            coordinator = coordinator.hear(RankDone(rank, coordinator.recovery))
        assert coordinator.phase == "watching"
    coordinator = stopped(coordinator)
    assert coordinator.phase == "giving up"
    assert isinstance(coordinator.decided, FallBack)
    assert "10 recoveries in a row to the state after step 0 have failed" in coordinator.decided.reason
    said = coordinator.says()
    assert {rank: type(message) for rank, message in said.items()} == {0: GiveUpRecovery, 1: GiveUpRecovery}


def test_steps_that_were_made_in_between_count() -> None:
    coordinator = stopped(Coordinator((0,)))
    assert coordinator.attempts == 1
    coordinator = held(coordinator.hear(RankAlarmed(0, coordinator.recovery)))
    later = Report(0, begun=1, ended=1, ready=1, kept_to=1, host_ended=1)
    coordinator = coordinator.hear(RankStopped(0, coordinator.recovery, later))
    assert (coordinator.last_state, coordinator.attempts) == (1, 1)


def test_a_rank_that_has_given_up_tells_the_next_coordinator() -> None:
    decided = FallBack(False, "no replica")
    rank = Participant(0).hear(GiveUpRecovery((0, 3), decided))
    new = succeed([0, 1], 1, restorable=False)
    rank = rank.hear(new.says()[0])
    message = rank.says()
    assert message == GivenUp(0, (1, 1), decided)
    assert message is not None
    new = new.hear(message)
    assert new.says() == {1: GiveUpRecovery((1, 2), decided)}
    assert new.hear(GivenUp(1, (1, 2), decided)).over


def test_an_older_coordinator_falls_silent() -> None:
    old = Coordinator((0, 1)).hear(RankAlarmed(0, (0, 0)))
    assert old.says() == {0: HoldRanks((0, 1)), 1: HoldRanks((0, 1))}
    rank = Participant(0).hear(HoldRanks((1, 1))).held().hear(RestRanks((1, 1))).stopped(Report(0))
    message = rank.says()
    assert message is not None
    old = old.hear(message)
    assert (old.phase, old.says(), old.over) == ("superseded", {}, True)
    assert old.lose(1, "its node does not answer") == old
    assert rank.hear(HoldRanks((0, 7))) == rank


def test_what_was_not_asked_for_is_refused() -> None:
    rank = Participant(0)
    with pytest.raises(ValueError, match="Rank 0 is running, not stopping"):
        rank.held()
    with pytest.raises(ValueError, match="Rank 0 is running, not resting"):
        rank.stopped(Report(0))
    rank = (
        rank.hear(HoldRanks((0, 1)))
        .held()
        .hear(RestRanks((0, 1)))
        .stopped(Report(0))
        .hear(CarryOut((0, 1), (Abort(),)))
    )
    with pytest.raises(ValueError, match="Rank 0 was not to"):
        rank.did(RestartServer())
    assert rank.order == Abort()
    assert rank.did(rank.orders[0]).says() == RankDone(0, (0, 1))
