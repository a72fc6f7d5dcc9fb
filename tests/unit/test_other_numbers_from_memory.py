"""Where more or fewer hosts meet, what memory has goes to files, to be cut anew: agents without training."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_assembly import TENSORS, part, sealed
from test_parity import lose
from test_protection import Agents

from jitckpt.agent.memory_tier import MemoryTier, ToCutAnew
from jitckpt.decisions.memory_wanted import tier
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.formats import whole_step
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, own_shard, shard

JOB = "job"


class Elastic(Agents):
    """Agents of a job that goes on with as many hosts as there are."""

    files: Path
    newest = 0

    def lose(self, *hosts: int) -> None:
        """Have the others meet, in the places that are left."""
        for host in sorted(hosts, reverse=True):
            self.tiers.pop(host).close(end=True)
        self.count = len(self.tiers)
        self.meet()

    def come(self) -> None:
        """Have one more host meet the others."""
        self.tiers.append(MemoryTier(self.tiers[0].wanted, f"{self.job} {self.count}", EventLog()))
        self.count += 1
        self.meet()

    def make(self, *steps: int) -> None:
        for step in steps:
            for rank in range(self.count):
                self.put(rank, step)
            self.until_safe(step)

    def write(self) -> list[int]:
        """Return which step each host says that it has written to files."""
        files = ToCutAnew(self.files, JOB, self.newest)
        with ThreadPoolExecutor(self.count) as pool:
            every = zip(self.tiers, self.hosts, strict=True)
            return list(pool.map(lambda of: of[0].gather(of[1], files), every))

    def saved(self) -> list[SaveRecord]:
        """Return one save of each rank's shard of the newest whole step, with the right bytes."""
        found = whole_step.find(self.files)
        for record in found:
            data = folders.read(record).tensors["big"].numpy().tobytes()
            assert data == b"state" * (record.rank + 1)
        return found

    def warnings(self) -> list[str]:
        return [text for tier in self.tiers for text in self.warned(tier)]

    @staticmethod
    def warned(tier: MemoryTier) -> list[str]:
        return [one["text"] for one in tier._log.events if one["event"] == "warning"]


def started(tmp_path: Path, count: int, copies: int = 2, mode: str = "peer") -> Elastic:
    made = Elastic(str(tmp_path), count, copies=copies, mode=mode)
    made.files = tmp_path / "files"
    folders.open_directory(made.files, JOB)
    made.start()
    return made


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Elastic]:
    found = started(tmp_path, 4)
    yield found
    found.close()


def which(saved: list[SaveRecord]) -> list[tuple[int, int]]:
    return [(record.step, record.rank) for record in saved]


@pytest.mark.parametrize("lost", range(4))
def test_all_ranks_of_before_are_in_files_each_once(agents: Elastic, lost: int) -> None:
    agents.make(1, 2)
    agents.lose(lost)
    assert agents.write() == [2, 2, 2]
    assert which(agents.saved()) == [(2, rank) for rank in range(4)]
    written = [one for tier in agents.tiers for one in tier._log.events if one["event"] == "memory_written"]
    everything = sum(path.stat().st_size for path in agents.files.glob("step-*/*/*"))
    assert sum(one["bytes"] for one in written) == everything, "each is written once"
    assert agents.warnings() == [], "only the number of ranks is another: nothing is lost"


def test_a_host_that_comes_finds_all_in_files(tmp_path: Path) -> None:
    agents = started(tmp_path, 3)
    try:
        agents.make(1)
        agents.come()
        assert agents.write() == [1] * 4
        assert which(agents.saved()) == [(1, 0), (1, 1), (1, 2)]
    finally:
        agents.close()


@pytest.mark.parametrize("count", [4, 3])
def test_what_a_lost_host_had_is_decoded_from_parity(tmp_path: Path, count: int) -> None:
    """Also where those that are left are too few to keep parity themselves."""
    agents = started(tmp_path, count, copies=count, mode="parity")
    try:
        agents.make(1, 2)
        agents.lose(1)
        assert agents.write() == [2] * (count - 1)
        assert which(agents.saved()) == [(2, rank) for rank in range(count)]
    finally:
        agents.close()


def test_a_damaged_state_is_written_from_another_hosts_copy(agents: Elastic) -> None:
    agents.make(2)
    agents.flip(0, 0, 2)
    agents.lose(3)
    assert agents.write() == [2, 2, 2]
    assert which(agents.saved()) == [(2, rank) for rank in range(4)]
    (warning,) = agents.warnings()
    assert "a copy of rank 0's state is passed over" in warning


def test_where_all_copies_are_damaged_no_step_is_whole(agents: Elastic) -> None:
    agents.make(2)
    agents.flip(0, 0, 2)
    agents.flip(2, 0, 2)
    agents.lose(3)
    assert sorted(agents.write()) == [0, 2, 2]
    assert agents.warnings()[-1] == "step 2 of rank 0 is whole in no host's memory any more"


def test_what_is_in_files_already_is_not_written(agents: Elastic) -> None:
    """Replicas have saved it, or all ranks have to take in hosts."""
    agents.make(1, 2)
    agents.newest = 2
    agents.lose(3)
    assert agents.write() == [0, 0, 0]
    assert folders.find(agents.files) == []
    assert agents.warnings() == []


def test_a_newer_step_of_as_many_ranks_goes_first(agents: Elastic) -> None:
    agents.make(1)
    agents.lose(3)
    for rank in range(3):
        agents.put(rank, 2)
    agents.until_safe(2)
    agents.meet()
    assert agents.write() == [0, 0, 0]
    assert folders.find(agents.files) == []
    assert all((rank, 2) in agents.held(rank) for rank in range(3))


def test_where_no_step_is_whole_no_rank_is_kept_from_what_files_have(agents: Elastic) -> None:
    """The two hosts of a pair are lost: what is left of the step is of no use to anybody."""
    agents.make(1, 2)
    agents.lose(1, 3)
    assert agents.write() == [0, 0]
    (warning,) = agents.warned(agents.tiers[0])
    assert "more is lost than its copies can give back" in warning
    assert [agents.held(host) for host in range(2)] == [set(), set()]


def test_where_the_hosts_are_always_all_nothing_is_said_lost_or_given_up(agents: Elastic) -> None:
    """The ranks refuse to begin beside what another number of them has left, and say so."""
    agents.make(1, 2)
    agents.lose(3)
    every = zip(agents.tiers, agents.hosts, strict=True)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda of: of[0].gather(of[1]), every)) == [0] * 3
    assert agents.warnings() == []
    assert {(0, 1), (0, 2)} <= agents.held(0)


def test_another_jobs_state_is_not_written_into_the_directory(agents: Elastic) -> None:
    agents.make(1)
    agents.lose(3)
    agents.files = agents.files.with_name("another")
    folders.open_directory(agents.files, "another job")
    files = ToCutAnew(agents.files, "another job")
    with ThreadPoolExecutor(3) as pool:
        every = zip(agents.tiers, agents.hosts, strict=True)
        assert list(pool.map(lambda of: of[0].gather(of[1], files), every)) == [0, 0, 0]
    assert folders.find(agents.files) == []


def test_what_can_not_be_written_stays_in_memory_and_is_said(agents: Elastic) -> None:
    agents.make(1)
    agents.lose(3)
    agents.files = Path(os.devnull) / "files"
    assert agents.write() == [0, 0, 0]
    assert all(f"could not be written to {agents.files}" in text for text in agents.warnings())
    assert len(agents.warnings()) == 3
    assert (0, 1) in agents.held(0)


class Replicas(Elastic):
    """Ranks hold the same, which is cut among them; all of them do, or every so many'th."""

    shards = 1

    def start_with(self, text: str) -> None:
        self.tiers = [MemoryTier(tier(text), self.job, EventLog()) for _ in range(self.count)]
        self.meet()

    def put(self, rank: int, step: int, data: bytes = b"") -> None:
        memory = self.tiers[rank].memory
        host_memory.put_word(memory.of(rank), host_memory.READY, 1)
        number = rank % self.shards
        identity = Identity(JOB, "fingerprint", self.count, rank, number, self.shards)
        one = part(rank, step, ranks=tuple(range(number, self.count, self.shards)), of=identity)
        document = {"local": {"trees": {"rank": rank}}}
        index = replace(shard.parse_index(one.index, one.seal), document=document)
        memory.put(sealed(index, one.window, one.slot))

    def check(self, step: int, ranks: int) -> None:
        """See that files have the state once, bit for bit, and of each rank what that alone knew."""
        found = {(one.kind, one.rank): folders.read(one) for one in folders.find(self.files)}
        assert sorted(found) == [
            *(("local", rank) for rank in range(self.shards, ranks)),
            *(("rank", rank) for rank in range(self.shards)),
        ]
        assert all(folders.verify(one) is None for one in folders.find(self.files))
        for (kind, rank), state in found.items():
            assert state.document == {"local": {"trees": {"rank": rank}}}
            assert torch.equal(state.tensors.pop("own"), torch.full((3,), rank))
            expected = TENSORS if kind == "rank" else {}
            assert state.tensors.keys() == expected.keys()
            assert all(torch.equal(state.tensors[name], of + (step - 4)) for name, of in expected.items())
        assert {saved.step for saved in whole_step.find(self.files)} == {step}


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    found = Replicas(str(tmp_path), 4)
    found.files = tmp_path / "files"
    folders.open_directory(found.files, JOB)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("text", "lost"), [("sharded+parity=4", (0,)), ("sharded+parity=4", (2,)), ("sharded+peer=3", (0, 3))]
)
def test_what_is_cut_among_replicas_is_put_together_and_written_once(
    replicas: Replicas, text: str, lost: tuple[int, ...]
) -> None:
    replicas.start_with(text)
    replicas.make(4, 5)
    replicas.lose(*lost)
    assert replicas.write() == [5] * (4 - len(lost))
    replicas.check(5, ranks=4)
    assert replicas.warnings() == []
    replicas.make(6)  # cut among those that are there, and nothing of before is in the way
    assert all((rank, 6) in replicas.held(rank) for rank in range(4 - len(lost)))


@pytest.fixture
def shards_of_two(tmp_path: Path) -> Iterator[Replicas]:
    """Ranks 0 and 3 hold the same, and are in different groups of parity; so are 1 and 4, and 2 and 5."""
    found = Replicas(str(tmp_path), 6)
    found.shards = 3
    found.files = tmp_path / "files"
    folders.open_directory(found.files, JOB)
    found.start_with("sharded+parity=3")
    found.make(4)
    yield found
    found.close()


def test_a_state_all_of_whose_parts_are_decoded_is_put_together(shards_of_two: Replicas) -> None:
    """No host has a part of it, and tells among which ranks it is cut."""
    shards_of_two.lose(0, 3)
    assert shards_of_two.write() == [4] * 4
    shards_of_two.check(4, ranks=6)
    assert shards_of_two.warnings() == []


def test_hosts_in_the_place_of_all_that_had_a_part_go_on_from_memory(shards_of_two: Replicas) -> None:
    for host in (0, 3):
        lose(shards_of_two, host)
    shards_of_two.meet()
    shards_of_two.gather()
    for rank in range(6):
        one = shards_of_two.tiers[rank]
        _, state = own_shard.read(one.memory.of(rank), 4, one.whole(rank))
        assert all(torch.equal(state.tensors[name], of) for name, of in TENSORS.items())


def test_a_part_is_never_written_as_the_whole(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="Step 4 of rank 2 in memory is a part of what ranks 0, 2, 3 hold"):
        own_shard.write_whole(part(2), tmp_path, 1, "memory")
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_damaged_is_decoded(replicas: Replicas) -> None:
    replicas.start_with("sharded+parity=4")
    replicas.make(4)
    memoryview(replicas.tiers[1].memory.shard(1, 4, "first").window)[0] ^= 1
    replicas.come()
    assert replicas.write() == [4] * 5
    replicas.check(4, ranks=4)
    assert any("a copy of ranks 0, 1, 2, 3's state is passed over" in text for text in replicas.warnings())


def test_without_all_parts_of_a_cut_state_nothing_of_it_is_written(replicas: Replicas) -> None:
    replicas.start_with("sharded")
    replicas.make(4)
    replicas.lose(3)
    assert replicas.write() == [0, 0, 0]
    assert folders.find(replicas.files) == []
