"""Meeting by etcd, without a job: who starts with whom, and who can't write any more."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from etcd_cluster import Cluster, etcd
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from jitckpt.errors import HostsError, NotNeeded
from jitckpt.hosts import coordinated
from jitckpt.hosts.coordinated import STANDS_BY, CoordinatedRendezvous
from jitckpt.hosts.coordination import CoordinationError, LeaseLost
from jitckpt.hosts.etcd import Etcd
from jitckpt.hosts.stores import StoreGone

LIMIT = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


class Agents:
    """Of one job with two hosts."""

    def __init__(self, cluster: Cluster, pool: ThreadPoolExecutor) -> None:
        self.cluster, self.pool, self.job = cluster, pool, uuid4().hex
        self.made: list[CoordinatedRendezvous] = []

    def make(self, service: Etcd | None = None, **named: Any) -> CoordinatedRendezvous:
        service = service or Etcd(self.cluster.url, {}, 5)
        made = CoordinatedRendezvous(
            service, self.job, **{"hosts": 2, "timeout": 60.0, "silence": 60.0, **named}
        )
        self.made.append(made)
        return made

    def meet(self, *agents: CoordinatedRendezvous) -> list[Any]:
        """Return each agent's part in the next start."""
        return [future.result() for future in self.begin(*agents)]

    def until_there(self, count: int) -> None:
        """Wait until so many are members."""
        service = Etcd(self.cluster.url, {}, 5)
        while len(service.get(f"jitckpt/{self.job}/meeting/members/").entries) < count:
            time.sleep(0.05)

    def begin(self, *agents: CoordinatedRendezvous) -> "list[Future[Any]]":
        return [self.pool.submit(agent.next_rendezvous) for agent in agents]


@contextmanager
def agents_at(cluster: Cluster) -> Iterator[Agents]:
    with ThreadPoolExecutor(8) as pool:
        made = Agents(cluster, pool)
        yield made
        for agent in made.made:
            agent.leave()


@pytest.fixture
def agents(cluster: Cluster) -> Iterator[Agents]:
    with agents_at(cluster) as made:
        yield made


def lose(agent: CoordinatedRendezvous, *others: CoordinatedRendezvous) -> None:
    """Let an agent see others no more."""
    agent._lost = frozenset(other.agent for other in others)


class Silent:
    """A service of which no member answers; each time that is said with other numbers."""

    silence = ""

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def ask(*_: object) -> None:
            self.asked += 1
            raise CoordinationError(f"etcd at E gives no answer (E: read timeout={self.asked / 7})")

        return ask


def test_that_the_service_is_silent_is_said_once_and_not_waited_for_for_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As where hosts are lost with most of the members that ran on them."""
    service: Any = Silent()
    agent = CoordinatedRendezvous(service, "job", hosts=3, timeout=0.3, silence=60.0)
    with pytest.raises(RendezvousTimeoutError):
        agent.next_rendezvous()
    assert service.asked > 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("jitckpt: etcd at E gives no answer (E: read timeout=")
    assert told.endswith(" This agent waits for at most 0.3 s.")
    agent.leave()


def test_two_meet_and_share_a_store(agents: Agents) -> None:
    a, b = agents.make(), agents.make()
    first, second = agents.meet(a, b)
    assert {first.rank, second.rank} == {0, 1}
    first.store.set("from/a", b"1")
    assert second.store.get("from/a") == b"1"
    assert [first.store.add("n", 1), second.store.add("n", 1), first.store.add("n", 5)] == [1, 2, 7]
    before = [first.rank, second.rank]
    assert [info.rank for info in agents.meet(a, b)] == before, "each keeps its place"
    assert a.start is not None
    assert a.start.number == 2


def test_an_agent_without_a_lease_leaves_nothing_in_the_store_for_ever(agents: Agents) -> None:
    a, b = agents.make(), agents.make()
    first, _ = agents.meet(a, b)
    a._forget_lease(a._lease)
    with pytest.raises(LeaseLost, match="has no other yet"):
        first.store.set("from/a", b"1")


def test_a_job_that_met_elsewhere_before_numbers_its_starts_on(agents: Agents) -> None:
    a, b = agents.make(), agents.make()
    b.newest_start = 7
    agents.meet(a, b)
    assert a.start is not None
    assert a.start.number == 8
    assert a.fence == b.fence > 0
    agents.meet(a, b)
    assert a.start.number == 9


def test_an_agent_that_was_cut_off_can_write_nothing_any_more(agents: Agents) -> None:
    a, b = agents.make(), agents.make()
    old, _ = agents.meet(a, b)
    old.store.set("before", "1")
    c = agents.make()
    waits = agents.begin(c)
    lose(b, a)
    lose(c, a)
    (new,) = agents.meet(b)
    waits[0].result()
    with pytest.raises(StoreGone, match="has gone on after start 1"):
        old.store.set("late", "1")
    with pytest.raises(StoreGone):
        old.store.add("count", 1)
    with pytest.raises(StoreGone):
        old.store.get("what nobody says")
    assert not a.shutdown(), "nor can it end the job"
    new.store.set("still", "1")
    service = Etcd(agents.cluster.url, {}, 5)
    assert not any("late" in key or "count" in key for key in service.get(f"jitckpt/{agents.job}/").entries)
    a._after = 1
    a._say_over()
    assert b.start is not None
    assert b.start.number == 2
    new.store.set("still", "2")


def test_who_waits_for_a_lost_agent_hears_of_it(agents: Agents) -> None:
    a, b = agents.make(silence=2.0), agents.make(silence=2.0)
    first, _ = agents.meet(a, b)
    b._closing.set()  # as if it were killed
    with pytest.raises(StoreGone, match="is lost"):
        first.store.get("what b never says")


def test_no_start_follows_one_that_may_still_run(agents: Agents) -> None:
    a, b = agents.make(silence=2.0), agents.make(silence=2.0)
    agents.meet(a, b)
    for killed in (a, b):
        killed._closing.set()
    others = [agents.make(timeout=6.0), agents.make(timeout=6.0)]
    for future in agents.begin(*others):
        with pytest.raises(Exception, match="was not seen to end"):
            future.result()
    agents.made = [agent for agent in agents.made if agent not in (a, b)]
    sure = [agents.make(silent_hosts_are_dead=True) for _ in range(2)]
    for agent in others:
        agent.leave()
    agents.meet(*sure)
    assert sure[0].start is not None
    assert sure[0].start.number == 2


def test_who_stands_by_hears_that_the_job_has_ended(agents: Agents) -> None:
    a, b, c = agents.make(), agents.make(), agents.make()
    agents.meet(a, b)
    (waits,) = agents.begin(c)
    while not c._joined:
        time.sleep(0.05)
    assert a.shutdown()
    for agent in (a, b):
        agent.leave()
    with pytest.raises(NotNeeded):
        waits.result()
    c.leave()
    again = [agents.make(), agents.make()]
    agents.meet(*again)  # a later run of the same name is none of that one's
    assert again[0].start is not None
    assert again[0].start.number == 2


class SilentForAWhile(Etcd):
    """As while most members stand still: it can't be told, twice, that the job has ended."""

    silent = 2

    def put_if(
        self, puts: Mapping[str, bytes | None], revisions: Mapping[str, int], lease: int = 0
    ) -> int | None:
        if any(key.endswith("/closed") for key in puts) and self.silent:
            self.silent -= 1
            raise CoordinationError("etcd at E gives no answer")
        return super().put_if(puts, revisions, lease)


def test_a_job_that_ends_while_the_service_is_silent_is_not_waited_for(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that stand by did so for as long as the job seemed to be there: for ever."""
    monkeypatch.setattr(coordinated, "LOOK_SECONDS", 0.01)
    a, b = agents.make(SilentForAWhile(agents.cluster.url, {}, 5)), agents.make()
    agents.meet(a, b)
    (waits,) = agents.begin(agents.make())
    agents.until_there(3)
    assert a.shutdown()
    with pytest.raises(NotNeeded):
        waits.result()
    said = [line for line in capsys.readouterr().err.splitlines() if "E gives no answer" in line]
    assert said == [
        "jitckpt: etcd at E gives no answer. It is waited for at most 60 s, to say that the job has ended."
    ]


def test_a_spare_has_no_part_in_the_first_start(agents: Agents) -> None:
    spare, a, b = agents.make(is_spare=True), agents.make(), agents.make()
    (waits,) = agents.begin(spare)
    time.sleep(1)
    agents.meet(a, b)
    agents.until_there(3)
    assert not waits.done()
    assert a.shutdown()
    with pytest.raises(NotNeeded):
        waits.result()


def test_who_stands_by_does_so_for_as_long_as_the_job_is_there(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not for the time alone that hosts get to come; a job is longer than that."""
    a, b, spare = agents.make(), agents.make(), agents.make(timeout=1.0)
    agents.meet(a, b)
    (waits,) = agents.begin(spare)
    time.sleep(3.0)
    assert not waits.done()
    assert capsys.readouterr().err == f"jitckpt: {STANDS_BY}\n"
    lose(a, b)
    lose(spare, b)
    agents.meet(a)
    assert waits.result().rank in (0, 1)


def test_who_resumes_a_suspended_job_waits_for_the_end_of_its_agents(agents: Agents) -> None:
    """That they say that the job has ended is for those that stand by alone."""
    a, b, spare = agents.make(), agents.make(), agents.make()
    agents.meet(a, b)
    c, d = agents.make(resumes=True), agents.make(resumes=True)
    (stands_by, *goes_on) = agents.begin(spare, c, d)
    agents.until_there(5)
    for agent in (a, b):
        agent.shutdown()
    with pytest.raises(NotNeeded):
        stands_by.result(LIMIT)
    for agent in (spare, a, b):
        agent.leave()
    assert {one.result(LIMIT).rank for one in goes_on} == {0, 1}


def test_the_newest_safe_step_stands_in_the_start(agents: Agents) -> None:
    a, b = agents.make(), agents.make()
    agents.meet(a, b)
    b.newest_step = lambda: 40
    agents.meet(a, b)
    assert a.start is not None
    assert a.start.step == 40


def test_what_a_stranger_writes_is_refused(agents: Agents) -> None:
    secret = b"what only this job's hosts know"
    a, b = agents.make(secret=secret), agents.make(secret=secret)
    service = Etcd(agents.cluster.url, {}, 5)
    service.put_if({f"jitckpt/{agents.job}/meeting/members/stranger": b"cos\nsystem\n(S'true'\ntR."}, {})
    infos = agents.meet(a, b)
    infos[0].store.set("key", "value")
    (place,) = service.get(f"jitckpt/{agents.job}/start-1/").entries
    service.put_if({place: b"0" * 64 + b'"other"'}, {})
    with pytest.raises(StoreGone, match="not signed"):
        b.guarded(lambda: infos[1].store.get("key"))
    service.put_if({f"jitckpt/{agents.job}/meeting/start": b"x"}, {})
    with pytest.raises(HostsError, match="can't be read"):
        agents.meet(a)


def test_places_are_as_wished(agents: Agents) -> None:
    a, b = agents.make(fixed_place=1), agents.make(fixed_place=0)
    assert [info.rank for info in agents.meet(a, b)] == [1, 0]


def test_no_more_stand_by_than_are_wanted(agents: Agents) -> None:
    a, b, c, d = (agents.make(max_standby=1) for _ in range(4))
    agents.meet(a, b)
    (waits,) = agents.begin(c)
    while not c._joined:
        time.sleep(0.05)
    (surplus,) = agents.begin(d)
    with pytest.raises(NotNeeded, match="as many stand by as are to"):
        surplus.result()
    assert not d.shutdown(), "the job goes on without it"
    assert not waits.done()
    lose(b, a)
    lose(c, a)
    (info,) = agents.meet(b)
    assert {info.rank, waits.result().rank} == {0, 1}, "who stood by has taken the place"


class Slow(Etcd):
    """Whose first wish to be the root is held up until `go`, as by a machine that is busy."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.url, {}, 5)
        self.wishes, self.go = threading.Event(), threading.Event()

    def put_if(
        self, puts: Mapping[str, bytes | None], revisions: Mapping[str, int], lease: int = 0
    ) -> int | None:
        if any(key.endswith("/root") and value for key, value in puts.items()):
            self.wishes.set()
            self.go.wait()
        return super().put_if(puts, revisions, lease)


def test_who_was_too_slow_to_be_the_root_of_a_start_is_not_the_root_after_it(agents: Agents) -> None:
    """Or nobody could be in its place in the next meeting, where this one may be stopped or cut off."""
    slow = Slow(agents.cluster)
    a, b = agents.make(service=slow), agents.make()
    waits = agents.begin(a)
    slow.wishes.wait()
    agents.meet(b)
    slow.go.set()
    waits[0].result()
    found = Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/meeting/")
    assert [key for key in found.entries if key.endswith("/root")] == []


def test_a_root_that_is_cut_off_is_followed_by_another(agents: Agents) -> None:
    """Who was elected and waits for hosts is silent: once its lease has ended one of the others is."""
    service = CutOff(agents.cluster)
    cut_off = agents.make(service=service, silence=2.0, timeout=20.0)
    waits = agents.begin(cut_off)
    while (root := root_of(agents)) is None:
        time.sleep(0.05)
    assert cut_off.agent in root
    service.is_cut_off.set()
    others = agents.make(silence=2.0), agents.make(silence=2.0)
    assert {info.rank for info in agents.meet(*others)} == {0, 1}
    service.is_cut_off.clear()
    assert not waits[0].done(), "it stands by"
    assert others[0].shutdown()
    with pytest.raises(NotNeeded):
        waits[0].result()


def root_of(agents: Agents) -> str | None:
    """Return what lies in etcd under the root's name."""
    found = Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/meeting/root").entries
    return next((entry.value.decode() for entry in found.values()), None)


class CutOff(Etcd):
    """Which for a while reaches no member."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.url, {}, 5)
        self.is_cut_off = threading.Event()

    def _post(self, *arguments: Any, **named: Any) -> Any:
        if self.is_cut_off.is_set():
            time.sleep(0.2)
            raise OSError("no route to host")
        return super()._post(*arguments, **named)


def test_who_waits_for_hosts_is_told_which_are_not_well_and_why(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = b"what only this job's hosts know"
    a, ill, b = (
        agents.make(secret=secret),
        agents.make(secret=secret, address="10.0.0.7"),
        agents.make(secret=secret),
    )
    Etcd(agents.cluster.url, {}, 5).put_if(
        {f"jitckpt/{agents.job}/meeting/unwell/x": b'["10.0.0.8", "no"]'}, {}
    )
    ill.tell_health("`check` ended with status 7: the GPU smells")
    waits = agents.begin(a)
    said = ""
    while "10.0.0.7 is not taken (`check` ended with status 7: the GPU smells)." not in said:
        time.sleep(0.05)
        said += capsys.readouterr().err
    assert "10.0.0.8" not in said, "a stranger's word"
    ill.tell_health("")
    found = Etcd(agents.cluster.url, {}, 5).get(f"jitckpt/{agents.job}/meeting/unwell/").entries
    assert not any(ill.agent in key for key in found)
    (info,) = agents.meet(b)
    assert {info.rank, waits[0].result().rank} == {0, 1}


def test_the_job_goes_on_without_a_host_that_is_not_well(agents: Agents) -> None:
    a, b, c = agents.make(), agents.make(), agents.make()
    before, _ = agents.meet(a, b)
    (waits,) = agents.begin(c)
    b.decline(before.store, "again", 1)
    assert not b.shutdown(), "it does not end the job with its own part"
    (info,) = agents.meet(a)
    assert {info.rank, waits.result().rank} == {0, 1}
