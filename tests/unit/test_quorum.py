"""Who may go on after hosts were lost: one start has at most one that follows it, whatever happens."""

import itertools
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jitckpt.decisions.quorum import may_go_on, missing
from jitckpt.wire.hosts import HEARD, STORE, Past

NUMBERS = itertools.count()


@dataclass
class Process:
    """An agent: the newest start it took part in, who has told it that it ends, what it agreed to since."""

    start: Past | None = None
    heard: Past | None = None
    ended: set[int] = field(default_factory=set)
    in_doubt: list[Past] = field(default_factory=list)
    agent: str = field(default_factory=lambda: str(next(NUMBERS)))

    def told(self) -> list[Past]:
        if self.start is not None:
            return [replace(self.start, ended=tuple(sorted(self.ended))), *self.in_doubt]
        if self.heard is not None and not self.in_doubt:
            return [replace(self.heard, place=HEARD)]
        return list(self.in_doubt)


class Job(RuleBasedStateMachine):
    """Hosts that die, say that they end, are cut off, come back, and meet in any constellation.

    Where hosts meet and what they know of each other is left to chance: safety must not depend on it.
    """

    hosts: int
    goes_on_with_fewer = False
    followers: dict[str, list[str]]

    @initialize(hosts=st.integers(3, 6), data=st.data())
    def start(self, hosts: int, data: st.DataObject) -> None:
        self.hosts, self.followers, self.count = hosts, {}, 0
        self.processes = [Process() for _ in range(hosts)]
        self.members: dict[str, list[Process]] = {}  # of the starts to which all have agreed
        self._meet(self.processes, data)

    def _meet(self, met: list[Process], data: st.DataObject) -> None:
        """All agree, or some, or none, before the store is lost; who hears that all have, begins."""
        pasts = [past for one in met for past in one.told()]
        self.count += 1
        name, number = f"start {self.count}", 1 + max((past.number for past in pasts), default=0)
        # Of two that are left of more the store alone knows who goes on (hosts/stores.py).
        holder = data.draw(st.integers(-1, len(met) - 1), "holder") if len(met) > 2 else -1
        in_doubt = tuple(one.agent for one in met)
        self.processes += [one for one in met if all(one is not known for known in self.processes)]
        places = range(len(met))
        all_agree = data.draw(st.booleans(), "all agree")
        for place in places if all_agree else data.draw(st.sets(st.sampled_from(places)), "agree"):
            met[place].in_doubt.append(Past(name, number, len(met), place, holder, (), in_doubt))
            if sum(any(past.start == name for past in one.in_doubt) for one in met) == len(met):
                self._go_on(met, name, pasts, data)

    def _go_on(self, met: list[Process], name: str, pasts: list[Past], data: st.DataObject) -> None:
        """All have agreed, and so somebody may know it and run."""
        before = max((past for past in pasts if past.start in self.members), key=_age, default=None)
        if before is not None:
            self.followers.setdefault(before.start, []).append(name)
        self.members[name] = list(met)
        for one in data.draw(st.permutations(met))[: data.draw(st.integers(0, len(met)), "hear")]:
            one.start, one.ended, one.in_doubt = replace(one.in_doubt[-1], in_doubt=()), set(), []

    @rule(data=st.data())
    def meet(self, data: st.DataObject) -> None:
        """As many hosts as the job has come together, new ones among them."""
        start = data.draw(st.sampled_from(self.processes)).start
        old = [one for one in self.processes if _is_same(one.start, start)]
        old = data.draw(st.permutations(old))[: data.draw(st.integers(1, self.hosts))]
        if data.draw(st.booleans(), "hosts of another start, too"):
            others = [one for one in self.processes if all(one is not known for known in old)]
            old = (old + data.draw(st.permutations(others)))[: self.hosts]
        least = max(2, len(old)) if self.goes_on_with_fewer else self.hosts
        count = data.draw(st.integers(least, self.hosts), "hosts")
        met = old + [Process() for _ in range(count - len(old))]
        pasts = [past for one in met for past in one.told()]
        if not pasts or missing(pasts, {one.agent for one in met}) is not None:
            return  # those who meet where no start was are another job
        self._meet(met, data)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if len(self.processes) > 1:
            dead = data.draw(st.sampled_from(self.processes))
            self.processes = [one for one in self.processes if one is not dead]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A host says to the others of its start that it ends, while its ranks run; some of them hear it."""
        speaking = [one for one in self.processes if one.start is not None and not one.in_doubt]
        if len(speaking) < 2:
            return
        leaver = data.draw(st.sampled_from(speaking))
        assert leaver.start is not None
        self.processes = [one for one in self.processes if one is not leaver]
        for one in self.members[leaver.start.start]:
            if (
                one.start is not None
                and one.start.start == leaver.start.start
                and data.draw(st.booleans(), "hears it")
            ):
                one.ended.add(leaver.start.place)

    @invariant()
    def no_start_is_followed_by_two(self) -> None:
        for start, followers in getattr(self, "followers", {}).items():
            assert len(followers) <= 1, f"{start}: {followers}"


class JobWithFewer(Job):
    """The same, but any number of hosts from two to all may make a start."""

    goes_on_with_fewer = True


def _is_same(one: Past | None, other: Past | None) -> bool:
    return one is other if one is None or other is None else one.start == other.start


def _age(past: Past) -> tuple[int, str]:
    return past.number, past.start


class JobOfTwo(RuleBasedStateMachine):
    """Two hosts run, others stand by; they meet where the store is, which may be lost and come anew."""

    @initialize()
    def start(self) -> None:
        self.processes = [Process() for _ in range(2)]
        self.running: list[list[Process]] = []
        self.holder, self.known, self.count = self.processes[0], list[Past](), 0

    @rule()
    def come(self) -> None:
        """A new host stands by, and makes a store if there is none."""
        self.processes.append(Process())
        if all(self.holder is not one for one in self.processes):
            self.holder, self.known = self.processes[-1], []

    @rule(data=st.data())
    def meet(self, data: st.DataObject) -> None:
        is_there = any(self.holder is one for one in self.processes)
        free = [one for one in self.processes if all(one is not busy for run in self.running for busy in run)]
        if not is_there or len(free) < 2:
            return
        met = data.draw(st.permutations(free))[:2]
        pasts = [past for one in met for past in one.told()] + self.known
        if missing(pasts) is not None or (not pasts and self.count):
            return  # new hosts that meet where nobody has heard of the job are another one
        self.count += 1
        place = next((place for place, one in enumerate(met) if one is self.holder), -1)
        start = Past(f"start {self.count}", self.count, 2, STORE, place)
        self.known = [start]
        for number, one in enumerate(met):
            one.start = replace(start, place=number)
        self.running.append(met)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """One that stands by reads what the store knows."""
        waiting = [one for one in self.processes if one.start is None]
        if waiting and self.known:
            data.draw(st.sampled_from(waiting)).heard = self.known[0]

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Two that run together lose each other."""
        if self.running:
            self.running.remove(data.draw(st.sampled_from(self.running)))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if self.processes:
            dead = data.draw(st.sampled_from(self.processes))
            self.processes = [one for one in self.processes if one is not dead]
            self.running = [run for run in self.running if all(one is not dead for one in run)]

    @invariant()
    def one_runs(self) -> None:
        assert len(getattr(self, "running", [])) <= 1


Job.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestJob = Job.TestCase
JobWithFewer.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestJobWithFewer = JobWithFewer.TestCase
JobOfTwo.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestJobOfTwo = JobOfTwo.TestCase


@given(st.integers(3, 9), st.data())
def test_the_greater_part_goes_on(hosts: int, data: st.DataObject) -> None:
    together = data.draw(st.sets(st.integers(0, hosts - 1), min_size=hosts // 2 + 1))
    assert may_go_on(hosts, [], together, data.draw(st.integers(-1, hosts - 1)))


@given(st.integers(3, 9), st.data())
def test_who_is_left_when_all_others_said_that_they_end_goes_on(hosts: int, data: st.DataObject) -> None:
    living = data.draw(st.sets(st.integers(0, hosts - 1), min_size=1))
    ended = set(range(hosts)) - living
    assert may_go_on(hosts, ended, living, data.draw(st.integers(-1, hosts - 1)))


def test_half_goes_on_with_the_host_of_the_store_only() -> None:
    assert may_go_on(4, [], [0, 1], holder=0)
    assert not may_go_on(4, [], [2, 3], holder=0)
    assert not may_go_on(4, [], [0, 1], holder=-1)
    assert not may_go_on(3, [], [0], holder=0), "the others are more"


def test_of_two_hosts_each_goes_on_where_the_store_is() -> None:
    assert may_go_on(2, [], [1], holder=0)
    assert not may_go_on(2, [], [], holder=0), "only new ones, and the others may run"
    alone = Past("start", 0, 2, 0, holder=-1)
    assert missing([alone]) == (1, 2), "another may have gone on where the store was, which is lost"
    assert missing([alone, replace(alone, place=STORE)]) is None, "the store says that none has"


def test_only_the_newest_start_counts_and_new_hosts_do_not() -> None:
    cut_off = Past("first", 0, 3, 0, 0)
    others = [Past("second", 1, 3, place, 0) for place in range(3)]
    store = Past("second", 1, 3, STORE, 0)
    assert missing([]) is None, "a job begins"
    assert missing([store]) == (0, 3), "its hosts may run somewhere"
    assert missing([replace(store, place=HEARD)]) == (0, 3)
    assert missing([store, cut_off, *others[1:]]) is None
    assert missing([cut_off, others[1]]) == (1, 3)
    assert missing([cut_off]) == (1, 3)
    assert missing([replace(others[1], ended=(0, 2)), cut_off]) is None


def test_a_start_of_which_nobody_knows_whether_all_agreed() -> None:
    """The first host's store is lost, with it, while all agree on the second start."""
    first = [Past("first", 0, 3, place, 0) for place in range(3)]
    second = [Past("second", 1, 3, place, 0, in_doubt=("a", "b", "c")) for place in range(3)]
    both = {"b", "c"}
    assert missing([first[1], first[2]], both) is None, "neither has agreed"
    assert missing([first[1], second[1], first[2]], both) is None, "one never will, so all is as before"
    assert missing([first[1], second[1], first[2], second[2]], both) is None, "most of both starts"
    assert missing([first[1], second[1], replace(second[2], in_doubt=())], both) is None, "one knows it"
    assert missing([first[1], second[1]], {"b", "new"}) == (1, 3), "the others may have gone on"
    more = [Past("first", 0, 5, place, 0) for place in range(5)]
    assert missing([more[1], second[1], more[2], second[2]], both) == (2, 5), "as many of one start only"
