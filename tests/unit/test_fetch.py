"""What a host fetches from the others, and that it takes in nothing else."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from jitckpt.errors import JitckptError
from jitckpt.hosts import connections, fetch, link, visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.fetch import Fetch, wanted
from jitckpt.hosts.link import LinkError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import FileEntry, Identity, Kind, Metadata
from jitckpt.wire.hosts import Host
from jitckpt.wire.visits import EndOfFile, Saves, WantSaves

SECRET = b"what only this job's agents know"


def identity(rank: int, shards: int = 1, world_size: int = 4, job: str = "job") -> Identity:
    return Identity(job, "f", world_size, rank, rank % shards, shards)


def save(step: int, kind: Kind, rank: int, shards: int = 1, job: str = "job") -> Metadata:
    return Metadata(identity(rank, shards, job=job), kind, "builtin", step, 0.0, ())


def test_hosts_that_share_a_directory_fetch_nothing() -> None:
    held = [save(5, "rank", 0), save(5, "local", 1)]
    assert wanted({0: held, 1: held}, 1, [2, 3]) == ()


def test_a_new_host_fetches_a_replica_and_its_ranks_own_states() -> None:
    others = [save(5, "rank", 0), save(5, "rank", 1), save(5, "local", 2), save(5, "local", 3)]
    fetched = wanted({0: others, 1: []}, 1, [2, 3])
    assert {(one.save.kind, one.save.identity.rank) for one in fetched} == {
        ("local", 2),
        ("local", 3),
        ("rank", 1),
    }
    assert all(one.host == 0 for one in fetched)


def test_a_host_fetches_the_own_states_of_the_ranks_that_it_keeps_copies_of() -> None:
    """Their host may be lost, with its disk, before it has made another step."""
    first = [save(5, "rank", 0), save(5, "local", 0), save(5, "local", 3)]
    second = [save(5, "rank", 1), save(5, "local", 1)]
    held = {0: first, 1: second, 2: []}
    assert wanted(held, 1, [1], kept=[0]) == (Fetch(0, save(5, "local", 0)),)
    assert wanted(held | {1: [*second, save(5, "local", 0)]}, 1, [1], kept=[0]) == ()
    assert wanted(held, 1, [1], kept=[2]) == (), "nobody has it"


def test_a_ranks_own_save_is_better_than_a_replicas() -> None:
    assert wanted({0: [save(5, "rank", 0)], 1: [save(5, "rank", 1)]}, 0, [1]) == (
        Fetch(1, save(5, "rank", 1)),
    )


def test_the_newest_step_that_all_hosts_together_have_whole_is_taken() -> None:
    first = [save(4, "rank", 0, 2), save(5, "rank", 0, 2)]
    second = [save(4, "rank", 1, 2)]
    assert wanted({0: first, 1: second}, 1, [2]) == (Fetch(0, save(4, "rank", 0, 2)),)


def test_a_host_fetches_the_shards_of_its_own_ranks_alone() -> None:
    first = [save(5, "rank", 0, 2), save(4, "local", 3, 2)]
    second = [save(5, "rank", 1, 2)]
    held = {0: first, 1: second, 2: []}
    assert wanted(held, 0, [0]) == ()
    assert wanted(held, 2, [3]) == (Fetch(1, save(5, "rank", 1, 2)),)
    both = {Fetch(0, save(5, "rank", 0, 2)), Fetch(1, save(5, "rank", 1, 2))}
    assert set(wanted(held, 2, [2])) == both, "no save says which shard rank 2 holds"


def test_a_job_of_another_number_of_ranks_needs_all_shards_on_each_host() -> None:
    """Its ranks cut their own out of them."""
    four = [save(5, "rank", rank, 4) for rank in range(4)]
    assert {one.save for one in wanted({0: four, 1: []}, 1, [1], world_size=2)} == {*four}
    assert wanted({0: four, 1: []}, 1, [1], world_size=4) == (Fetch(0, four[1]),)


def test_saves_of_different_jobs_are_not_mixed() -> None:
    assert wanted({0: [save(5, "rank", 0, 2)], 1: [save(5, "rank", 1, 2, "other")]}, 0, [0, 1]) == ()


all_saves = st.builds(
    save, st.integers(1, 3), st.sampled_from(["rank", "local"]), st.integers(0, 3), st.just(2)
)
holdings = st.fixed_dictionaries({host: st.lists(all_saves, max_size=8) for host in range(3)})


@given(holdings)
def test_after_the_fetch_every_host_can_go_on_from_the_same_step(held: dict[int, list[Metadata]]) -> None:
    """Unless no step is whole; and it has of its ranks' own states what there is."""
    ranks = {0: [0], 1: [1, 2], 2: [3]}
    everywhere = [one for of_host in held.values() for one in of_host]
    whole = {
        step
        for step in (1, 2, 3)
        if {s.identity.shard for s in everywhere if (s.kind, s.step) == ("rank", step)} == {0, 1}
    }
    for host, own in ranks.items():
        fetched = wanted(held, host, own)
        assert all(one.save in held[one.host] and one.save not in held[host] for one in fetched)
        assert len(set(fetched)) == len(fetched)
        if not whole:
            assert fetched == ()
            continue
        has = [one for one in [*held[host], *(f.save for f in fetched)] if one.step == max(whole)]
        needed = {rank % 2 for rank in own}
        assert {one.identity.shard for one in has if one.kind == "rank"} >= needed
        if {one.identity.rank for one in everywhere} >= set(own):
            assert {f.save.identity.shard for f in fetched if f.save.kind == "rank"} <= needed
        for rank in own:
            known = {one.kind for one in everywhere if (one.step, one.identity.rank) == (max(whole), rank)}
            kinds = {one.kind for one in has if one.identity.rank == rank}
            assert "rank" in kinds or ("rank" not in known and ("local" in kinds or not known))


# Real saves, over real connections.


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Host 0 has step 5 of rank 0 and the local state of rank 1; host 1 has nothing."""
    found = [tmp_path / "0", tmp_path / "1"]
    folders.open_directory(found[0], "job")
    for kind, rank in (("rank", 0), ("local", 1)):
        with SaveFolder(found[0], identity(rank, world_size=2), 5, kind, "builtin") as folder:  # type: ignore[arg-type]
            folder.add_tensors("tensors.safetensors", {"weight": torch.full((3_000_000,), float(rank))})
            folder.add_json("state.json", {"rank": rank})
            folder.commit()
    return found


@pytest.fixture
def met(directories: list[Path]) -> Iterator[list[Hosts]]:
    listeners = [connections.listen("127.0.0.1") for _ in range(2)]
    known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]

    found = [Hosts(i, known, one, SECRET, 60) for i, one in enumerate(listeners)]
    for host, directory in zip(found, directories, strict=True):
        host.answers[fetch.VISIT] = partial(fetch.serve, directory)
    found[1]._thread.start()
    found[0].connect(60)
    yield found
    for host in found:
        host.close()


def test_what_is_fetched_is_whole_and_the_same(met: list[Hosts], directories: list[Path]) -> None:
    fetched = fetch.fetch(met[1], directories[1])
    assert fetched is not None
    assert (fetched.step, fetched.saves) == (5, 2)
    assert folders.open_directory(directories[1]) == "job"
    for record in folders.find(directories[0]):
        copy = directories[1] / record.path.relative_to(directories[0])
        for name in ("tensors.safetensors", "state.json"):
            assert (copy / name).read_bytes() == (record.path / name).read_bytes()
    assert all(folders.verify(record) is None for record in folders.find(directories[1]))
    assert fetch.fetch(met[1], directories[1]) is None
    assert fetch.fetch(met[0], directories[0]) is None


def test_a_damaged_save_is_not_taken_in(
    met: list[Hosts], directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(directories[0] / "step-0000000005" / "local-00001")
    path = directories[0] / "step-0000000005" / "rank-00000" / "state.json"
    path.write_text('{"rank": 1}')
    assert fetch.fetch(met[1], directories[1]) is None
    err = capsys.readouterr().err
    assert "a save of host 0 (127.0.0.1) is passed over: state.json of step 5, rank 0, came damaged." in err
    assert not list(directories[1].glob("step-*/*"))


def refusal_of(met: list[Hosts], header: dict[str, Any]) -> str:
    """Return why a host does not give what is asked for like this; the next wish is heard then."""

    async def ask() -> str:
        async with met[1].visit(0, fetch.VISIT) as (reader, writer):
            writer.write(link.encode(header))
            with pytest.raises(visiting.RefusedError) as caught:
                await visiting.answer(reader, "It", 60.0, Saves, EndOfFile)
            writer.write(visiting.encode(WantSaves("")))
            assert (await visiting.answer(reader, "It", 60.0, Saves))[0] == Saves(known=False)
            return str(caught.value)

    return asyncio.run(ask())


@pytest.mark.parametrize("file", ["metadata.json", "../../job.json", "/etc/passwd", "nothing"])
def test_only_files_of_saves_are_given(met: list[Hosts], file: str) -> None:
    wanted = {"type": "want_file", "step": 5, "kind": "rank", "rank": 0}
    assert "There is no " in refusal_of(met, wanted | {"file": file})


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({}, "A message has the unknown type None; known are want_saves, want_file."),
        ({"type": "want_saves"}, "A message of type want_saves lacks known."),
        ({"type": "want_file", "step": 5, "kind": "rank", "rank": 0, "file": 7}, "file can't be 7."),
        ({"type": "want_file", "step": 5, "kind": "other", "rank": 0, "file": "f"}, "kind can't be 'other'."),
        ({"type": "want_file", "step": 1e300, "kind": "rank", "rank": 0, "file": "f"}, "step can't be"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_in_a_sentence(
    met: list[Hosts], header: dict[str, Any], why: str
) -> None:
    assert why in refusal_of(met, header)


@pytest.mark.parametrize(
    "header",
    [{"saves": True}, {"type": "saves", "known": 1}, {"type": "piece"}, {"type": "refused", "why": 7}],
)
def test_an_answer_that_makes_no_sense_is_refused_in_a_sentence(
    met: list[Hosts], directories: list[Path], header: dict[str, Any]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link.receive(reader)
        writer.write(link.encode(header, b"[]"))

    met[0].answers[fetch.VISIT] = answer
    with pytest.raises(LinkError, match=r"Another host says what makes no sense: (A|In a) message .*\.$"):
        fetch.fetch(met[1], directories[1])


@example(b"{}")
@example(b"[" * 100_000)
@given(st.binary(max_size=50) | st.from_type(type(None)).map(lambda _: b"[1]"))
def test_a_listing_that_makes_no_sense_is_refused(listing: bytes) -> None:
    if listing == b"[]":
        return
    with pytest.raises(JitckptError):
        fetch._parse(listing)


def test_a_listing_with_a_path_out_of_the_save_is_refused() -> None:
    evil = replace(save(5, "rank", 0), files=(FileEntry("../../evil", 1, "0" * 32),))
    with pytest.raises(JitckptError, match="no path inside the save"):
        fetch._parse(json.dumps([evil.to_json().decode()]).encode())
