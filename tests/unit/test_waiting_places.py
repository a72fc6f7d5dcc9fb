"""Where a host waits to take another's place, at etcd: what the others see of it."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from etcd_cluster import Cluster, etcd
from test_coordinated import Agents, Silent, agents_at

from jitckpt.errors import HostsMissing, JobEnded
from jitckpt.hosts.etcd import Etcd
from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.stores import StoreGone
from jitckpt.hosts.waiting_places import AtService
from jitckpt.wire.moves import JobFacts

LIMIT = 60.0
SILENCE = 2.0
SECRET = b"0123456789abcdef"
ONE, OTHER = Standby("10.0.0.1", 1, unpacks=True), Standby("10.0.0.2", 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def agents(cluster: Cluster) -> Iterator[Agents]:
    with agents_at(cluster) as made:
        yield made


class Places:
    """Where hosts wait to take a place in the job of these agents."""

    def __init__(self, agents: Agents) -> None:
        self.agents, self.made = agents, list[AtService]()

    def make(self, own: Standby, timeout: float = LIMIT, secret: bytes = SECRET) -> AtService:
        service = Etcd(self.agents.cluster.url, {}, 5)
        signature = Signature(self.agents.job, secret)
        self.made.append(AtService(service, signature, timeout=timeout, silence=SILENCE))
        self.made[-1].announce(own)
        return self.made[-1]


@pytest.fixture
def places(agents: Agents) -> Iterator[Places]:
    made = Places(agents)
    yield made
    for place in made.made:
        place.close(handed_over=True)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def lasting(is_so: Callable[[], bool]) -> None:
    """Look for longer than a lease lasts that nobody keeps alive."""
    end = time.monotonic() + 3 * SILENCE
    while time.monotonic() < end:
        assert is_so()
        time.sleep(0.1)


def members(agents: Agents) -> set[str]:
    return set(agents.made[0]._entries.members(Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/")))


def test_who_waits_is_seen_until_it_ends_or_takes_a_place(agents: Agents, places: Places) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    agents.meet(a, b)
    assert a.standbys() == []
    one = places.make(ONE)
    until(lambda: a.standbys() == [ONE])
    other = places.make(OTHER)
    until(lambda: b.standbys() == [OTHER, ONE])
    assert (one.others(), other.others()) == ([OTHER], [ONE])
    lasting(lambda: a.standbys() == [OTHER, ONE])
    one.take_place(b.agent)
    until(lambda: a.standbys() == [OTHER])
    other.close(handed_over=False)
    assert a.standbys() == []


def test_a_stranger_is_not_seen(agents: Agents, places: Places) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    agents.meet(a, b)
    places.make(ONE, secret=b"of somebody else")
    lasting(lambda: a.standbys() == [])
    c = agents.make()  # without a secret anybody could sign
    assert c.standbys() == []


def test_the_start_goes_on_where_a_place_is_handed_over_again_and_again(
    agents: Agents, places: Places
) -> None:
    """It is not over, and no agent of it is lost."""
    a, b = agents.make(secret=SECRET, silence=SILENCE), agents.make(secret=SECRET, silence=SILENCE)
    agents.meet(a, b)
    one, other = places.make(ONE), places.make(OTHER)
    one.take_place(b.agent)
    until(lambda: a.standbys() == [OTHER])
    b.hand_over()
    assert not b.shutdown(), "the job has not ended"
    b.leave()
    lasting(lambda: members(agents) == {a.agent, b.agent})
    other.take_place(b.agent)
    until(lambda: a.standbys() == [])
    one.close(handed_over=True)
    lasting(lambda: members(agents) == {a.agent, b.agent})
    a._see_that_all_are_there()
    found = Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/meeting/")
    assert a._entries.read(found, "over") is None


def test_once_its_ranks_have_ended_the_others_start_without_it(agents: Agents, places: Places) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    agents.meet(a, b)
    one = places.make(ONE)
    one.take_place(b.agent)
    until(lambda: a.standbys() == [])
    b.hand_over()
    one.close(handed_over=False)
    assert a.start is not None
    place = [*a.start.agents].index(b.agent)  # who came first is by chance
    with pytest.raises(StoreGone, match=f"host {place} is lost"):
        a._see_that_all_are_there()
    c = agents.make(secret=SECRET)
    agents.meet(a, c)
    assert a.start is not None
    assert (a.start.number, set(a.start.agents)) == (2, {a.agent, c.agent})


def test_who_has_taken_a_place_starts_again_with_the_others_as_that_agent(
    agents: Agents, places: Places
) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    agents.meet(a, b)
    one, new = places.make(ONE), agents.make(secret=SECRET)
    one.take_place(b.agent)
    until(lambda: a.standbys() == [])
    b.hand_over()
    assert a.start is not None
    before = a.start.agents
    there = [SimpleNamespace(agent=agent, ranks_of=-1) for agent in before]
    there.append(
        SimpleNamespace(agent="", ranks_of=0)
    )  # has come for the first one's ranks, and meets nobody
    hosts: Any = SimpleNamespace(all=there, index=before.index(b.agent))
    new.take_place(hosts, JobFacts("run", 0, ("a", 1), number=a.start.number, fence=a.fence), None)
    assert new.start == a.start
    new._see_that_all_are_there()
    one.leave()
    agents.meet(a, new)
    assert (a.start.number, a.start.agents) == (2, before)
    assert new.start == a.start
    lasting(lambda: members(agents) == {*before})
    one.close(handed_over=False)
    a._see_that_all_are_there()
    assert a.standbys() == []


def test_the_end_of_the_job_ends_the_wait(agents: Agents, places: Places) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    one = places.make(ONE)
    one.look()
    agents.meet(a, b)
    one.look()
    assert a.shutdown()
    with pytest.raises(JobEnded):
        one.look()


def test_an_end_before_this_host_came_was_that_of_another_run(agents: Agents, places: Places) -> None:
    agents.meet(first := agents.make(secret=SECRET), second := agents.make(secret=SECRET))
    assert first.shutdown()
    first.leave()
    second.leave()
    one = places.make(ONE)
    one.look()
    agents.meet(agents.make(secret=SECRET), agents.make(secret=SECRET))
    one.look()


def test_a_job_of_which_nobody_comes_is_not_waited_for_for_ever(agents: Agents, places: Places) -> None:
    one = places.make(ONE, timeout=0.5)
    one.look()
    time.sleep(0.5)
    with pytest.raises(HostsMissing, match=r"^No host of job .* was there for 0.5 s"):
        one.look()


def test_a_silent_service_is_waited_for(agents: Agents) -> None:
    service: Any = Silent()
    one = AtService(service, Signature("job", SECRET), timeout=0.5, silence=SILENCE)
    one.announce(ONE)
    assert one.others() == []
    one.look()
    time.sleep(0.5)
    with pytest.raises(HostsMissing):
        one.look()
    one.close(handed_over=False)


def test_one_that_has_the_ranks_of_an_agent_that_stays_is_no_member(agents: Agents, places: Places) -> None:
    a, b = agents.make(secret=SECRET), agents.make(secret=SECRET)
    agents.meet(a, b)
    one = places.make(ONE)
    until(lambda: a.standbys() == [ONE])
    one.take_place("")
    until(lambda: a.standbys() == [])
    assert members(agents) == {a.agent, b.agent}
    one.close(handed_over=False)
    a._see_that_all_are_there()
    found = Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/meeting/")
    assert a._entries.read(found, "over") is None, "its end is not the start's"
