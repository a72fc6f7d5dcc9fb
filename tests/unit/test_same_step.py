"""All ranks go on from one step, and each reads the saves of its own shard alone."""

import multiprocessing
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from jitckpt.errors import CheckpointError, JitckptError
from jitckpt.saves import folders, layout, same_step, selection
from jitckpt.saves.folders import SaveFolder, SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.same_step import Decision, InMemory, Offer, OwnSaves, Verdict
from jitckpt.saves.selection import Choice

RANKS, SHARDS = 6, 3
JOB = Identity("j", "", RANKS, 0, 0, SHARDS)
PATIENCE = timedelta(seconds=120)


def identity(rank: int) -> Identity:
    return replace(JOB, rank=rank, shard=rank % SHARDS)


# The decision, against brute force.


@dataclass
class World:
    """Saves by host, step and rank; True: whole, False: damaged. Hosts hold two ranks each, or share all."""

    saves: dict[tuple[int, int], bool]  # by step and rank
    shared: bool
    asked: list[tuple[int, int]] = field(default_factory=list)

    def there(self, rank: int) -> Mapping[tuple[int, int], bool]:
        """What lies where the rank looks, of its own shard."""
        return {
            (step, other): whole
            for (step, other), whole in self.saves.items()
            if other % SHARDS == rank % SHARDS and (self.shared or other // 2 == rank // 2)
        }

    def offer(self, rank: int) -> Offer:
        steps = sorted({step for step, _ in self.there(rank)}, reverse=True)
        not_exact = tuple(step for step in steps if (step, rank) not in self.there(rank))
        return Offer(tuple(steps), max(steps, default=0), not_exact=not_exact)

    def check(self, rank: int, step: int) -> bool:
        self.asked.append((rank, step))
        return any(whole for (one, _), whole in self.there(rank).items() if one == step)

    def brute_force(self) -> int | None:
        """The newest step of which every rank has a whole save of its shard where it looks.

        Of those one in which each rank has its own state goes first; all are near.
        """
        steps = {step for step, _ in self.saves}
        good = [
            step
            for step in steps
            if all(
                any(whole for (one, _), whole in self.there(rank).items() if one == step)
                for rank in range(RANKS)
            )
        ]
        exact = [step for step in good if all((step, rank) in self.saves for rank in range(RANKS))]
        return max(exact or good, default=None)


worlds = st.builds(
    World,
    st.dictionaries(st.tuples(st.integers(1, 3), st.integers(0, RANKS - 1)), st.booleans()),
    st.booleans(),
)


@given(worlds)
def test_the_newest_step_is_taken_that_every_rank_can_load(world: World) -> None:
    decision = Decision([rank % SHARDS for rank in range(RANKS)])
    verdict = decision.hear_offers([world.offer(rank) for rank in range(RANKS)])
    while not verdict.decided:
        assert verdict.step is not None
        verdict = decision.hear_checks([world.check(rank, verdict.step) for rank in range(RANKS)])
    assert verdict.step == world.brute_force()
    assert verdict.newest == max((step for step, _ in world.saves), default=0)
    assert len(set(world.asked)) == len(world.asked), "nothing is read twice"
    newer = {step for step, _ in world.saves if step > (verdict.step or 0)}
    assert len(verdict.lost) == len(newer), "each step that is passed over has its sentence"


def test_what_is_lost_is_named() -> None:
    decision = Decision([0, 1])
    assert decision.hear_offers([Offer((6, 5, 4), 6), Offer((5, 4), 5)]) == Verdict(5, False, (), 6)
    assert decision.hear_checks([True, False]) == Verdict(4, False, (), 6)
    lost = ("Step 6 has no whole save of shard 1.", "Step 5 has no whole save of shard 1.")
    assert decision.hear_checks([True, True]) == Verdict(4, True, lost, 6)


@pytest.mark.parametrize(
    ("exact", "taken", "why"),
    [((8, 7), 8, ()), ((7, 6), 7, None), ((6, 5), 6, None), ((5,), 8, ()), ((), 8, ())],
)
def test_a_step_that_is_exact_goes_before_a_newer_one(
    exact: tuple[int, ...], taken: int, why: tuple[str, ...] | None
) -> None:
    """A frozen host that woke has ended and saved step 8 alone: another rank's own state of it is lost."""
    steps = (8, 7, 6, 5)
    not_exact = tuple(step for step in steps if step not in exact)
    decision = Decision([0, 0])
    verdict = decision.hear_offers([Offer(steps, 8), Offer(steps, 8, not_exact=not_exact)])
    assert verdict.step == taken
    verdict = decision.hear_checks([True, True])
    assert verdict.decided
    assert verdict.step == taken
    if why is None:
        assert verdict.lost[0] == (
            "Of step 8 the own state (random numbers, buffers ...) of rank 1 is lost; a step just before it "
            "has all, so its minibatches are done again, exactly."
        )
    else:
        assert verdict.lost == why


def test_the_exact_step_is_damaged_and_the_newer_one_is_taken() -> None:
    decision = Decision([0, 0])
    offers = [Offer((8, 7), 8), Offer((8, 7), 8, not_exact=(8,))]
    assert decision.hear_offers(offers).step == 7
    assert decision.hear_checks([True, False]).step == 8
    assert decision.hear_checks([True, True]) == Verdict(8, True, (), 8)


def test_that_nothing_is_saved_is_known_at_once() -> None:
    assert Decision([0, 1]).hear_offers([Offer((), 0)] * 2) == Verdict(None, True, (), 0)


# Real files, a thread for each rank.


class ThreadStore:
    """What torch's store does, between threads."""

    def __init__(self, patience: float = 60.0) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = Condition()
        self.patience = patience
        self.messages = 0

    def set(self, key: str, value: str, /) -> None:
        with self.changed:
            self.messages += 1
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self.changed:
            self.messages += 1
            if not self.changed.wait_for(lambda: key in self.values, self.patience):
                raise RuntimeError(f"wait timeout, key: {key}")
            return self.values[key]


class FirstAgreement:
    """Each thread stands for a process, whose agreement is its first."""

    made = 0

    def __setattr__(self, name: str, value: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _threads_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitckpt.state.shards._Agreements", FirstAgreement())


def save(
    root: Path,
    step: int,
    rank: int,
    kind: layout.Kind = "rank",
    own: Identity | None = None,
    *,
    nothing_before: bool = False,
) -> Path:
    who = own or identity(rank)
    with SaveFolder(root, who, step, kind, "builtin", nothing_before=nothing_before) as folder:
        folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.full((1000,), float(rank))})
        folder.add_json(layout.STATE_FILE, {"rank": rank})
        return folder.commit()[0]


def damage(path: Path) -> None:
    file = path / layout.TENSORS_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def choices(
    roots: list[Path], store: ThreadStore | None = None, memories: Mapping[int, InMemory] | None = None
) -> list[Choice | None]:
    return warned(roots, store, memories)[0]


def warned(
    roots: list[Path], store: ThreadStore | None = None, memories: Mapping[int, InMemory] | None = None
) -> tuple[list[Choice | None], list[str]]:
    """Return what the ranks choose, and what they warn of."""
    store = store or ThreadStore()
    told: list[str] = []

    def together(rank: int) -> Choice | None:
        memory = (memories or {}).get(rank)
        return same_step.together(store, roots[rank], identity(rank), memory, told.append)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(together, range(RANKS))), told


def taken(roots: list[Path]) -> list[tuple[int, int]]:
    found = choices(roots)
    return [(one.step, one.save.rank) for one in found if one is not None]


def test_each_rank_loads_its_own_save_and_its_own_local_state(tmp_path: Path) -> None:
    for rank in range(SHARDS):
        save(tmp_path, 5, rank)
        save(tmp_path, 5, rank + SHARDS, "local")
    found = choices([tmp_path] * RANKS)
    assert [(one.step, one.save.rank, one.local and one.local.kind) for one in found if one] == [
        *((5, rank, "rank") for rank in range(SHARDS)),
        *((5, rank, "local") for rank in range(SHARDS)),
    ]


def test_what_a_host_has_saved_alone_is_passed_over_where_another_ranks_own_state_is_lost(
    tmp_path: Path,
) -> None:
    for rank in range(RANKS):
        save(tmp_path, 7, rank, "rank" if rank < SHARDS else "local")
    for rank in range(SHARDS):
        save(tmp_path, 8, rank)
        if rank:
            save(tmp_path, 8, rank + SHARDS, "local")
    found = choices([tmp_path] * RANKS)
    assert [one.step for one in found if one] == [7] * RANKS
    assert found[0] is not None
    assert (
        found[0].reasons[0].startswith("Of step 8 the own state (random numbers, buffers ...) of rank 3 is")
    )
    chosen = selection.choose(folders.find(tmp_path), identity(4), folders.verify)
    assert chosen is not None
    assert chosen.step == 7, "as what looks at all saves says"
    save(tmp_path, 8, SHARDS, "local")
    assert {one and one.step for one in choices([tmp_path] * RANKS)} == {8}


def test_a_damaged_save_has_a_replica_take_its_place_and_else_all_fall_back(tmp_path: Path) -> None:
    for step, rank in ((6, 0), (6, 1), (6, 2), (6, 4), (5, 0), (5, 1), (5, 2)):
        save(tmp_path, step, rank)
    damage(tmp_path / "step-0000000006/rank-00001")
    assert taken([tmp_path] * RANKS) == [(6, 0), (6, 4), (6, 2), (6, 0), (6, 4), (6, 2)]
    damage(tmp_path / "step-0000000006/rank-00002")
    found = choices([tmp_path] * RANKS)
    assert [one and (one.step, one.save.rank, one.newest) for one in found] == [
        (5, rank % SHARDS, 6) for rank in range(RANKS)
    ]
    assert found[2] is not None
    assert "is damaged" in found[2].reasons[0]
    assert found[0] is not None
    assert found[0].reasons == ("Step 6 has no whole save of shard 2.",)
    assert found[4] is not None
    assert found[4].reasons == ()


@settings(max_examples=10)  # each save is brought to the disk
@given(worlds)
def test_real_files_are_decided_upon_as_the_pure_decision_says(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> None:
    folder = tmp_path_factory.mktemp("world")
    roots = [folder / ("shared" if world.shared else f"host{rank // 2}") for rank in range(RANKS)]
    for (step, rank), whole in world.saves.items():
        path = save(roots[rank], step, rank)
        if not whole:
            damage(path)
    if world.saves and world.brute_force() is None:
        with pytest.raises(CheckpointError, match="none that rank"):
            choices(roots)
        return
    found = choices(roots)
    assert {one and one.step for one in found} == {world.brute_force()}
    assert all(folders.verify(one.save) is None for one in found if one)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_first_save_that_was_never_finished_has_all_begin_anew(tmp_path: Path, is_shared: bool) -> None:
    """A pair of hosts is lost in it: the third one's ranks have theirs, two ranks a host."""
    roots = [tmp_path / ("shared" if is_shared else f"host{rank // 2}") for rank in range(RANKS)]
    save(roots[4], 5, 4, nothing_before=True)
    save(roots[5], 5, 5, nothing_before=True)
    found, told = warned(roots)
    assert found == [None] * RANKS
    assert len(told) == 1
    assert told[0].startswith("The job's first save was never finished: Step 5 has no whole save of shard 0")
    save(roots[4], 6, 4)  # begun when step 5 may have been whole
    with pytest.raises(CheckpointError, match="none that rank"):
        choices(roots)


def test_a_first_save_that_was_whole_and_has_lost_a_part_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    for rank in range(SHARDS):
        save(tmp_path, 5, rank, nothing_before=True)
    folders.note_whole(tmp_path, 5)
    folders.note_whole(tmp_path, 6)  # of which nothing is here
    shutil.rmtree(tmp_path / "step-0000000005" / "rank-00001")
    with pytest.raises(CheckpointError, match="Step 5 has no whole save of shard 1"):
        choices([tmp_path] * RANKS)
    assert not (tmp_path / "step-0000000006").exists()


def test_a_first_save_that_is_damaged_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    for rank in range(SHARDS):
        save(tmp_path, 5, rank, nothing_before=True)
    assert {one and one.step for one in choices([tmp_path] * RANKS)} == {5}
    damage(tmp_path / "step-0000000005/rank-00001")
    with pytest.raises(CheckpointError, match="Step 5 has no whole save of shard 1"):
        choices([tmp_path] * RANKS)


class Memory:
    """Step 7 of each rank is in memory, or a step of another model, which is not to be passed over."""

    def __init__(self, step: int, newest: int = 0) -> None:
        self.step, self.newest = step, newest
        self.reasons: list[str] = []

    def offer(self) -> tuple[tuple[int, str], ...]:
        return ((self.step, "t"),) if self.step else ()

    def check(self, step: int) -> bool:
        return True

    def choice(self, step: int) -> Choice:
        return Choice(step, folders.look_at(Path("/none"), step, "rank", 0), None, (), step)


def test_who_goes_on_from_memory_still_knows_whether_anything_was_saved(tmp_path: Path) -> None:
    memories: dict[int, InMemory] = {rank: Memory(7) for rank in range(RANKS)}
    save(tmp_path, 5, 4, nothing_before=True)
    found = choices([tmp_path] * RANKS, memories=memories)
    assert [(one.step, one.nothing_saved) for one in found if one] == [(7, True)] * RANKS
    for rank in range(RANKS):
        save(tmp_path, 5, rank, nothing_before=True)
    found = choices([tmp_path] * RANKS, memories=memories)
    assert [(one.step, one.nothing_saved) for one in found if one] == [(7, False)] * RANKS


def test_what_another_model_has_in_memory_is_no_first_save(tmp_path: Path) -> None:
    save(tmp_path, 5, 4, nothing_before=True)
    with pytest.raises(CheckpointError, match="none that rank"):
        choices([tmp_path] * RANKS, memories={rank: Memory(0, rank) for rank in range(RANKS)})


def test_saves_of_another_job_are_refused_by_all(tmp_path: Path) -> None:
    for rank in range(RANKS):
        save(tmp_path, 5, rank, own=replace(identity(rank), job="other"))
    store = ThreadStore()
    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(same_step.together, store, tmp_path, identity(rank)) for rank in range(RANKS)]
    for future in futures:
        with pytest.raises(CheckpointError, match="is of another job"):
            future.result()


def test_shards_that_the_script_now_gives_to_other_ranks_are_found(tmp_path: Path) -> None:
    for rank in range(SHARDS):
        save(tmp_path, 5, rank, own=replace(identity(rank), shard=(rank + 1) % SHARDS))
    assert taken([tmp_path] * RANKS) == [(5, (rank - 1) % SHARDS) for rank in range(RANKS)]


def test_a_rank_that_does_not_come_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(JitckptError, match="did not hear from the others which step to go on from"):
        same_step.together(ThreadStore(patience=0.01), tmp_path, identity(0))


def test_what_is_said_is_linear_in_the_ranks(tmp_path: Path) -> None:
    for rank in range(RANKS):
        save(tmp_path, 5, rank)
    store = ThreadStore()
    choices([tmp_path] * RANKS, store)
    assert store.messages <= 3 * (3 * RANKS + 2)  # three times all speak to rank 0, and hear from it


def test_a_rank_looks_at_no_other_shard_s_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(RANKS):
        save(tmp_path, 5, rank)
    looked: list[int] = []
    look_at = folders.look_at

    def counted(root: Path, step: int, kind: layout.Kind, rank: int) -> SaveRecord:
        looked.append(rank)
        return look_at(root, step, kind, rank)

    monkeypatch.setattr(folders, "look_at", counted)
    own = OwnSaves(tmp_path, identity(4), [1, 4])
    assert own.offer == Offer((5,), 5)
    assert own.check(5)
    assert looked == [4]


# One shard: nobody has to be asked.


def test_alone_a_rank_reads_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(JOB, shards=1)
    for rank in range(RANKS):
        save(tmp_path, 5, rank, own=replace(whole, rank=rank))
        save(tmp_path, 6, rank, own=replace(whole, rank=rank))
    read: list[Path] = []
    checksum = folders.checksum

    def counted(path: Path, on_read: object = None) -> str:
        read.append(path.parent)
        return checksum(path)

    monkeypatch.setattr(folders, "checksum", counted)
    choice = same_step.alone(tmp_path, replace(whole, rank=3))
    assert choice is not None
    assert (choice.step, choice.save.rank) == (6, 3)
    assert set(read) == {choice.save.path}


# Real processes, which count what they read.


def read_so_far() -> int:
    """Return the bytes that this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _load(root: Path, ranks: int, rank: int, port: int, results: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    before = read_so_far()
    choice = same_step.together(store, root, Identity("j", "", ranks, rank, rank, ranks))
    assert choice is not None
    results.put((rank, choice.step, choice.save.rank, read_so_far() - before))


def together_in_processes(root: Path, ranks: int) -> list[tuple[int, int, int, int]]:
    """Return of each rank: itself, the step, the rank whose save it loads, and the bytes that it has read."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    spawned = multiprocessing.get_context("spawn")
    results = spawned.Queue()
    started = [
        spawned.Process(target=_load, args=(root, ranks, rank, store.port, results)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    told = sorted(results.get(timeout=PATIENCE.total_seconds()) for _ in started)
    for process in started:
        process.join()
    return told


def test_a_process_reads_its_own_shard_and_little_else(tmp_path: Path) -> None:
    ranks, elements = 4, 1_000_000
    for step in (5, 6):
        for rank in range(ranks):
            own = Identity("j", "", ranks, rank, rank, ranks)
            with SaveFolder(tmp_path, own, step, "rank", "builtin") as folder:
                folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.full((elements,), float(rank))})
                folder.commit()
    told = together_in_processes(tmp_path, ranks)
    assert [one[:3] for one in told] == [(rank, 6, rank) for rank in range(ranks)]
    assert all(4 * elements <= size < 1.1 * 4 * elements for *_, size in told), told
    damage(tmp_path / "step-0000000006/rank-00002")
    told = together_in_processes(tmp_path, ranks)
    assert [one[:3] for one in told] == [(rank, 5, rank) for rank in range(ranks)]
