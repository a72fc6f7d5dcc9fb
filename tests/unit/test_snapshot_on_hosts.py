"""What hosts say to each other for a snapshot: it is whole on all of them, or none has it and all go on."""

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from jitckpt.agent.migration.followed_snapshots import FollowedSnapshots
from jitckpt.agent.migration.host_part import Place
from jitckpt.agent.migration.led_copies import LedCopies
from jitckpt.agent.migration.move import MoveError
from jitckpt.agent.migration.shelf import Shelf, Size
from jitckpt.agent.migration.snapshots import ProcessSnapshots
from jitckpt.agent.migration.suspended_job import SuspendedJob, found
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived
from jitckpt.hosts.store_server import store_at
from jitckpt.system import datagrams
from jitckpt.system.job_socket import Caller
from jitckpt.system.resting_place import Guest, RestingPlace
from jitckpt.wire import agents
from jitckpt.wire.commands import FROM_LAUNCHER, Suspend
from jitckpt.wire.environment import REST

HOSTS = 3
COMMAND = SuspendedJob(["--nnodes", "3"], ["train.py"], "/work")


@dataclass
class Relay:
    store: tuple[str, int]
    written: set[bytes]
    name: str = "relay"


@dataclass
class Proxies:
    at_this_rest: dict[str, Any] = field(default_factory=dict)
    servers_stay: bool = True


@dataclass
class Mover:
    relay: Relay
    proxies: Proxies = field(default_factory=Proxies)


class Dumps:
    """What a host writes: a file in place of processes."""

    def __init__(self, folder: Path, relay: Relay) -> None:
        folder = folder / f"host-{folder.name}"
        folder.mkdir(parents=True)
        self.mover, self.place = Mover(relay), RestingPlace(1)
        self.shelf = Shelf(folder, {}, several="mark")
        self.guest = Guest(self.place.of(0)[REST.name])
        self.is_ready, self.bytes = True, 10**9
        self.never = self.not_now = self.fails = ""
        self.disk_fails = False
        self.draft: Any = None
        self.dropped = self.has_put = 0

    def why_never(self) -> str:
        return self.never

    def why_no_room(self) -> str:
        return self.not_now

    def dump(self, step: int) -> None:
        self.place.want(0)
        if self.fails:
            raise MoveError(self.fails)
        self.draft = self.shelf.begin(step, in_memory=False)

    def put(self, plan: Mapping[str, Any], done: Callable[[Size, OSError | None], None]) -> None:
        draft, self.draft = self.draft, None
        if self.disk_fails:
            draft.path.rmdir()  # nothing can be written there
        self.shelf.put(draft, plan, done)
        self.shelf.settle()
        self.has_put += 1

    def drop(self) -> None:
        self.place.want(0)
        self.dropped += 1
        if self.draft is not None:
            self.draft.drop()
            self.draft = None

    @property
    def waits_behind(self) -> int:
        return int.from_bytes(Path(f"/proc/self/fd/{self.place.file}").read_bytes()[:8], "little")


class Copier:
    """What has a host's part copied: `fails` says why it can't be."""

    def __init__(self, dumps: Dumps) -> None:
        self.shelf, self.fails, self.waits = dumps.shelf, "", False
        self.done: Callable[[str, int], None] = lambda why, size: None
        self.begun: list[tuple[int, int]] = []  # steps, and how many copies
        self.tidied = self.forgot = 0

    def begin(self, asked: agents.CopySnapshot, done: Callable[[str, int], None]) -> None:
        assert self.shelf.begin_copying((asked.step, asked.name)) is not None
        self.begun.append((asked.step, asked.copies))
        self.done = done
        if not self.waits:
            done(self.fails, 100)

    def end(self, named: tuple[int, str], *, made: bool) -> None:
        self.shelf.end_copying(named, made=made)

    def tidy(self) -> None:
        self.tidied += 1

    def forget(self) -> None:
        self.forgot += 1


class Wire:
    """Hosts, of whom the one that is `index` speaks; what is said lies in `said` until it is delivered."""

    said: list[tuple[int, int, agents.AgentMessage, bytes]]  # from, to

    def __init__(self, index: int, said: list[tuple[int, int, agents.AgentMessage, bytes]]) -> None:
        self.index, self.all, self.said = index, range(HOSTS), said

    def send(self, host: int, message: agents.AgentMessage, data: bytes = b"") -> None:
        self.said.append((self.index, host, agents.decode(agents.encode(message)), data))

    def broadcast(self, message: agents.AgentMessage) -> None:
        for host in self.all:
            if host != self.index:
                self.send(host, message)

    def name(self, host: int) -> str:
        return f"host {host}"


class Job:
    """All hosts of one."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, every: float = 60, copies: int = 0
    ) -> None:
        self.folder = folder
        self.store = store_at("127.0.0.1")
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.said: list[tuple[int, int, agents.AgentMessage, bytes]] = []
        self.dumps = [
            Dumps(folder / str(host), Relay(("127.0.0.1", self.store.port), {b"/key-%d" % host}))
            for host in range(HOSTS)
        ]
        wires: list[Any] = [Wire(host, self.said) for host in range(HOSTS)]
        anything: list[Any] = self.dumps
        self.log, self.told = EventLog(), list[str]()
        places = [Place(COMMAND, host, HOSTS) for host in range(HOSTS)]
        self.copiers = [Copier(one) for one in self.dumps]
        copiers: list[Any] = self.copiers
        self.leader = ProcessSnapshots(
            anything[0],
            places[0],
            self.log,
            every=every,
            say=self.told.append,
            gone_back_to=None,
            hosts=wires[0],
            copies=LedCopies(copies, copiers[0], wires[0], self.log, self.told.append, every=every),
        )
        self.followers = [
            FollowedSnapshots(anything[host], places[host], wires[host], copiers[host])
            for host in range(1, HOSTS)
        ]
        self.went_on = 0

    def deliver(self, silent: int = -1) -> None:
        """Have all hosts hear what is said, but for what one of them says."""
        while self.said:
            by, to, message, data = self.said.pop(0)
            if by != silent:
                every: list[Any] = [self.leader, *self.followers]
                every[to].hear_host(Arrived(by, message, data))

    def begin(self, silent: int = -1) -> None:
        """Have the leader ask for a snapshot."""
        self.leader.note("validated", {})
        self.deliver()
        self.now += 61
        self.leader.look()
        self.deliver(silent)

    def rest(self) -> None:
        """All ranks rest: have their processes written and put on the disks."""

        def go_on() -> None:
            self.went_on += 1

        self.leader.note("held", {})
        self.leader.carry_out(go_on)
        self.deliver()
        self.leader.look()
        self.leader.note("rested", {})
        self.deliver()

    @property
    def steps(self) -> list[list[int]]:
        """Those of the snapshots that each host has as whole on all."""
        return [[] if one.shelf.step is None else [one.shelf.step] for one in self.dumps]

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [event for event in self.log.events if event["event"] == name]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path, monkeypatch)
    yield made
    end(made)


@pytest.fixture
def suspendable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Of this job snapshots are made only if it is to be suspended."""
    made = Job(tmp_path, monkeypatch, every=inf)
    all_begin(made, 9, 9, 9)
    made.leader.note("validated", {})
    assert (made.said, made.leader.next_look) == ([], None)
    yield made
    end(made)


def end(job: Job) -> None:
    for part in (job.leader, *job.followers):
        part.close()
    for one in job.dumps:
        one.guest.close()
        one.place.close()


def all_begin(job: Job, *steps: int) -> None:
    for dumps, step in zip(job.dumps, steps, strict=True):
        dumps.guest.begins(step)


def test_a_snapshot_is_whole_once_all_hosts_have_it(job: Job) -> None:
    all_begin(job, 9, 10, 9)
    for host in range(HOSTS):
        job.store.set(f"key-{host}", str(host))
    job.begin()
    assert [one.waits_behind for one in job.dumps] == [13] * 3
    job.rest()
    assert (job.steps, job.went_on) == ([[13]] * 3, 1)
    assert [one.waits_behind for one in job.dumps] == [0] * 3
    assert len(job.events("snapshot")) == len(job.events("snapshot_pause")) == 1
    assert len({tuple(one.shelf.named) for one in job.dumps}) == 1
    plans = [(path / "plan.json").read_text() for path in [one.shelf.newest.path for one in job.dumps]]  # type: ignore[union-attr]
    kept = [key.hex() for key in (b"/key-0", b"/key-1", b"/key-2")]
    assert [[key in plan for key in kept] for plan in plans] == [[True] * 3, [False] * 3, [False] * 3]


def test_what_can_never_be_written_on_one_host_is_said_at_the_start(job: Job) -> None:
    job.dumps[2].never = "Process 7 has an io_uring."
    all_begin(job, 5, 5, 5)
    job.begin()
    assert job.told == [
        "no snapshots are made: Process 7 has an io_uring. (host 2) A worker that dies ends the job, or "
        "begins it anew."
    ]
    assert (job.events("snapshot_wanted"), job.leader.next_look) == ([], None)


def test_where_one_host_has_no_room_nobody_waits(job: Job) -> None:
    job.dumps[1].not_now = "it needs 2 GB beside the one before, and 1 GB are free."
    all_begin(job, 9, 9, 9)
    job.begin()
    assert [one.waits_behind for one in job.dumps] == [0] * 3
    assert "1 GB are free. (host 1) The training goes on; there is none." in job.told[0]
    job.dumps[1].not_now = ""
    job.now += 61
    job.leader.look()
    job.deliver()
    job.rest()
    assert job.steps == [[12]] * 3


def test_a_host_whose_ranks_have_passed_the_step_is_asked_again(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    want, passes = job.dumps[2].place.want, itertools.count()

    def too_late(step: int) -> None:
        if step and next(passes) == 0:
            job.dumps[2].guest.begins(step)  # which it has begun when it hears of it
        want(step)

    job.dumps[2].place.want = too_late  # type: ignore[method-assign]
    job.begin()
    assert [one.waits_behind for one in job.dumps] == [0] * 3, "its ranks are too far apart now"
    all_begin(job, 12, 12, 12)
    job.now += 61
    job.leader.look()
    job.deliver()
    assert [one.waits_behind for one in job.dumps] == [15] * 3


@pytest.mark.parametrize("host", range(HOSTS))
def test_a_host_that_can_not_write_leaves_all_without(job: Job, host: int) -> None:
    all_begin(job, 9, 9, 9)
    job.begin()
    job.rest()
    job.dumps[host].fails = "CRIU says no."
    all_begin(job, 20, 20, 20)
    job.now += 61
    job.leader.look()
    job.deliver()
    job.rest()
    assert (job.steps, job.went_on) == ([[12]] * 3, 2)
    assert [one.draft for one in job.dumps] == [None] * 3
    assert "CRIU says no." in job.told[0]
    assert "the newest is that after step 12" in job.told[0]
    assert len(job.events("snapshot_pause")) == 1, "the second is no pause of a snapshot"


@pytest.mark.parametrize("host", range(HOSTS))
def test_a_disk_that_is_full_on_one_host_leaves_all_the_one_before(job: Job, host: int) -> None:
    all_begin(job, 9, 9, 9)
    job.begin()
    job.rest()
    job.dumps[host].disk_fails = True
    all_begin(job, 20, 20, 20)
    job.now += 61
    job.leader.look()
    job.deliver()
    job.rest()
    assert job.steps == [[12]] * 3
    assert len({tuple(one.shelf.named) for one in job.dumps}) == 1
    assert "of step 23 could not be put on the disk" in job.told[0]
    assert "See to its checkpoint directory." in job.told[0]


def test_a_host_that_does_not_answer_is_not_waited_for(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    job.begin(silent=1)
    assert job.leader.next_look is not None
    job.now += 31
    job.leader.look()
    job.deliver()
    assert "host 1 has not answered within 30 s" in job.told[0]
    assert [one.waits_behind for one in job.dumps] == [0] * 3


def test_what_is_over_is_not_written_when_the_answer_comes_late(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    job.begin()
    job.leader.note("held", {})
    job.leader.carry_out(lambda: pytest.fail("a job that is given up does not go on"))
    job.leader.note("recovery_given_up", {"text": "rank 2 is gone"})
    job.deliver()
    assert job.steps == [[]] * 3
    assert [one.draft for one in job.dumps] == [None] * 3
    assert job.leader.next_look is None


def test_a_host_that_does_not_come_to_an_end_holds_nobody_for_ever(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    job.begin()
    went_on: list[float] = []
    job.leader.carry_out(lambda: went_on.append(job.now))
    job.deliver(silent=2)
    assert (went_on, job.leader.next_look is not None) == ([], True)
    job.now += 10_000
    job.leader.look()
    job.deliver()
    assert (job.steps, went_on) == ([[]] * 3, [job.now])
    assert "host 2 has not written its processes in 10000 s" in job.told[0]
    assert [one.draft for one in job.dumps] == [None] * 3


def test_a_disk_that_takes_no_end_is_named(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    job.begin()
    job.leader.carry_out(lambda: None)
    while job.said:  # all but what the last host says of its disk
        by, to, message, data = job.said.pop(0)
        if not (by == 2 and isinstance(message, agents.SnapshotPut)):
            every: list[Any] = [job.leader, *job.followers]
            every[to].hear_host(Arrived(by, message, data))
    job.leader.look()
    assert job.told == []
    job.now += 601
    job.leader.look()
    job.now += 601
    job.leader.look()
    assert job.told == [
        "a snapshot of step 12 is not on the disk of host 2 after 600 s, and none is made before it is. The "
        "training goes on; there is none."
    ]
    assert job.leader.next_look is None


def test_nobody_but_the_first_host_leads(job: Job) -> None:
    with pytest.raises(KeyError, match="host 2 does not lead"):
        job.followers[0].hear_host(Arrived(2, agents.DumpRanks("name", 7)))


# Suspended as a whole.


class Asker:
    """A command that asks a host's launcher to suspend the job."""

    def __init__(self, job: Job, host: int, to: str = "") -> None:
        self._own, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.setblocking(False)
        parts = [job.leader, *job.followers]
        parts[host]._asked(Caller(self._theirs), Suspend(to))
        job.deliver()
        job.leader.look()
        job.deliver()

    def hears(self) -> list[tuple[str, int | None]]:
        heard = list[tuple[str, int | None]]()
        while True:
            try:
                told = datagrams.receive(self._own, FROM_LAUNCHER)
            except BlockingIOError:
                return heard
            assert told is not None
            heard.append((told[0].text, told[0].status))


def suspended(job: Job) -> list[bool]:
    return [part.suspended for part in (job.leader, *job.followers)]


@pytest.mark.parametrize("host", range(HOSTS))
def test_a_job_is_suspended_on_all_hosts_whichever_is_asked(suspendable: Job, host: int) -> None:
    job, asker = suspendable, Asker(suspendable, host)
    assert asker.hears() == [("It is suspended once all ranks have ended step 12.", None)]
    job.rest()
    assert (suspended(job), job.went_on, job.steps) == ([True] * 3, 0, [[12]] * 3)
    ((text, status),) = asker.hears()
    assert (status, "the job is suspended after step 12" in text) == (0, True)
    assert len(job.events("suspended")) == 1
    for one in range(HOSTS):
        left = found(job.folder / str(one))
        assert list(left) == [one]
        assert (left[one].options, left[one].script, left[one].step) == (["--nnodes", "3"], ["train.py"], 12)


@pytest.mark.parametrize("host", range(HOSTS))
@pytest.mark.parametrize("fails", ["fails", "disk_fails", "not_now"])
def test_where_one_host_can_not_the_job_is_suspended_on_none(suspendable: Job, host: int, fails: str) -> None:
    job = suspendable
    setattr(job.dumps[host], fails, "It is full.")
    asker = Asker(job, 1)
    if fails != "not_now":
        job.rest()
    assert (suspended(job), job.steps) == ([False] * 3, [[]] * 3)
    assert job.went_on == (fails != "not_now"), "nobody is held for ever"
    text, status = asker.hears()[-1]
    assert (status, text[:27]) == (1, "The job was not suspended: ")
    assert job.told == [text]
    assert [found(job.folder / str(one)) for one in range(HOSTS)] == [{}] * 3
    setattr(job.dumps[host], fails, "")
    again = Asker(job, 2)
    job.rest()
    assert (suspended(job), again.hears()[-1][1]) == ([True] * 3, 0)


def test_the_end_of_a_host_is_no_failure_once_the_job_is_suspended(suspendable: Job) -> None:
    """Host 1 has heard it and ends, before host 2 hears that all wait for the end; host 0 is lost before."""
    job = suspendable
    asker = Asker(job, 0)
    asker.hears()
    job.leader.carry_out(lambda: pytest.fail("they do not go on"))
    assert not any(part.lose_host(2) for part in (job.leader, *job.followers)), "not yet"
    while not any(isinstance(message, agents.EndAwaited) for _, _, message, _ in job.said):
        if not job.said:
            job.leader.look()
        by, to, message, data = job.said.pop(0)
        every: list[Any] = [job.leader, *job.followers]
        every[to].hear_host(Arrived(by, message, data))
    assert job.followers[0].lose_host(2)
    assert job.followers[0].suspended
    assert not job.leader.suspended, "the others have not all said that they wait for it"
    assert job.leader.lose_host(1)
    assert job.leader.lose_host(2)
    assert job.leader.suspended


def test_what_is_asked_twice_or_elsewhere_is_refused(suspendable: Job) -> None:
    job = suspendable
    assert Asker(job, 0, "/elsewhere").hears()[0][1] == 1
    first, second = Asker(job, 1), Asker(job, 1)
    assert second.hears() == [("It is to be suspended already.", 1)]
    job.rest()
    assert first.hears()[-1][1] == 0


# Copies of each host's part on others.


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path, monkeypatch, copies=1)
    all_begin(made, 9, 9, 9)
    yield made
    end(made)


def snapshot(job: Job, *, ends: bool = True) -> None:
    """Have the next one made, and its copies if they end."""
    job.begin() if not job.events("snapshot") else job.leader.look()
    job.deliver()
    job.rest()
    if ends:
        job.leader.look()
        job.deliver()
    job.now += 61


def test_a_snapshot_is_protected_once_all_parts_have_copies(copied: Job) -> None:
    snapshot(copied)
    assert [one.begun for one in copied.copiers] == [[(12, 1)]] * 3
    (event,) = copied.events("snapshot_copied")
    assert (event["step"], event["copies"], event["bytes"]) == (12, 1, 300)
    assert copied.told == [
        "each host's part of the snapshot after step 12 is on another host, too (300 bytes sent in 0.00 s)."
    ]
    assert [one.tidied for one in copied.copiers] == [1] * 3
    all_begin(copied, 20, 20, 20)
    snapshot(copied)
    assert [event["step"] for event in copied.events("snapshot_copied")] == [12, 23]
    assert len(copied.told) == 1, "it is said once"


@pytest.mark.parametrize("host", range(HOSTS))
def test_a_part_that_can_not_be_copied_is_said_once_and_all_goes_on(copied: Job, host: int) -> None:
    snapshot(copied)
    copied.copiers[host].fails = "host 9: there is no room"
    all_begin(copied, 20, 20, 20)
    snapshot(copied)
    assert copied.told[1:] == [
        f"not all parts of the snapshot after step 23 have their copies: of host {host}: host 9: there is no "
        "room. The training goes on; the newest that has all is that after step 12."
    ]
    (event,) = copied.events("snapshot_not_copied")
    assert (event["step"], event["newest"]) == (23, 12)
    assert [[step for step, _ in one.shelf.named] for one in copied.dumps] == [[12, 23]] * 3
    all_begin(copied, 30, 30, 30)
    snapshot(copied)
    assert len(copied.told) == 2
    assert [[step for step, _ in one.shelf.named] for one in copied.dumps] == [[12, 33]] * 3, (
        "the one that is protected stays"
    )
    copied.copiers[host].fails = ""
    all_begin(copied, 40, 40, 40)
    snapshot(copied)
    assert "after step 43 is on another host, too" in copied.told[2]
    assert [[step for step, _ in one.shelf.named] for one in copied.dumps] == [[43]] * 3


@pytest.mark.parametrize("host", range(HOSTS))
def test_copies_that_take_long_hold_up_no_snapshot(copied: Job, host: int) -> None:
    """What is being copied stays; the newest is copied next, and none between."""
    copied.copiers[host].waits = True
    snapshot(copied, ends=False)
    for step in (20, 30, 40):
        all_begin(copied, step, step, step)
        snapshot(copied)
    assert [event["step"] for event in copied.events("snapshot")] == [12, 23, 33, 43]
    assert copied.copiers[host].begun == [(12, 1)]
    assert 12 in [step for step, _ in copied.dumps[host].shelf.named]
    copied.copiers[host].done("", 100)
    copied.leader.look()
    copied.deliver()
    assert copied.copiers[host].begun == [(12, 1), (43, 1)]
    copied.copiers[host].done("", 100)
    copied.leader.look()
    copied.deliver()
    assert [event["step"] for event in copied.events("snapshot_copied")] == [12, 43]


def test_what_all_have_gone_back_to_is_copied_again(copied: Job) -> None:
    """A host that was lost had copies of others' parts."""
    snapshot(copied)
    copied.leader._gone_back_to = 12
    copied.leader._copies._tried = None  # type: ignore[union-attr]  # as in another start
    copied.leader.note("rested", {})
    copied.deliver()
    assert [one.begun for one in copied.copiers] == [[(12, 1)] * 2] * 3


def test_where_nobody_wants_copies_there_are_none(job: Job) -> None:
    all_begin(job, 9, 9, 9)
    snapshot(job)
    assert [one.begun for one in job.copiers] == [[]] * 3
    assert (job.told, job.leader.next_look is None) == ([], False)
