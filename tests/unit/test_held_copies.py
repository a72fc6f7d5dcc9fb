"""A host's part of a snapshot goes to another host and comes back, whole and checked, or not at all."""

import asyncio
import os
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_shelf import JOB, pages_of, put, read

from jitckpt.agent.migration.held_copies import FOLDER, VISIT, HeldCopies
from jitckpt.agent.migration.image_transfer import Pace
from jitckpt.agent.migration.pages import PAGE
from jitckpt.agent.migration.part_copier import PartCopier, fetch
from jitckpt.agent.migration.shelf import PAGES, DamagedSnapshot, ProcessSnapshot, Shelf
from jitckpt.agent.migration.snapshot_parts import files_of
from jitckpt.hosts import connections, visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.wire.agents import CopySnapshot
from jitckpt.wire.hosts import Host
from jitckpt.wire.visits import OF_ALL, PartFile, PutSnapshot, Refused

HOSTS = 3


class One:
    """A host: its own part, which it says is whole everywhere, and what it holds of others'."""

    def __init__(self, directory: Path, place: int, hosts: Hosts) -> None:
        self.directory, self.place, self.hosts = directory, place, hosts
        self.shelf = Shelf(directory / f"host-{place}", JOB, several="mark")
        self.begin()

    def begin(self) -> None:
        """Another launcher begins here."""
        self.held, self.reserve = HeldCopies(self.directory), 0
        self.copier = PartCopier(self.hosts, self.shelf, self.held)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.held.serve(lambda: self.reserve, reader, writer)

        self.hosts.answers[VISIT] = serve

    def put(self, step: int, pages: str) -> None:
        put(self.shelf, step, pages, called=f"snapshot {step}")
        self.shelf.all_have()

    def copy(self, step: int, copies: int = 1) -> tuple[str, int]:
        """Have a part copied; return why that was not done, and the bytes that went."""
        ended, said = threading.Event(), []

        def done(why: str, size: int) -> None:
            said.append((why, size))
            ended.set()

        named = (step, f"snapshot {step}")
        self.copier.begin(CopySnapshot(*named, copies, self.shelf.images), done)
        assert ended.wait(20)
        self.shelf.end_copying(named, made=not said[0][0])
        return said[0]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.hosts.start(coroutine).result(20)

    def fetch(self, holder: int, step: int) -> ProcessSnapshot:
        """Fetch the host's own part from another host."""
        lost = ProcessSnapshot(Path(), step, f"snapshot {step}", (holder,))
        found: ProcessSnapshot = self.run(fetch(self.hosts, holder, self.shelf.directory, lost))[0]
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[One]]:
    listeners = [connections.listen("127.0.0.1") for _ in range(HOSTS)]
    known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
    connected = [Hosts(i, known, one, b"0123456789abcdef", 60) for i, one in enumerate(listeners)]
    for one in connected[1:]:
        one._thread.start()
    connected[0].connect(60)
    yield [One(tmp_path / str(i), i, one) for i, one in enumerate(connected)]
    for one in connected:
        one.close()


def lose_disk(one: One) -> None:
    for path in sorted(one.directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    one.shelf = Shelf(one.shelf.directory, JOB, several="mark")
    one.begin()


def holder_of(hosts: list[One]) -> One:
    (found,) = (one for one in hosts if one.held.held)
    return found


def test_what_was_lost_comes_back_from_another_host(hosts: list[One]) -> None:
    hosts[0].put(8, "a b c a")
    why, size = hosts[0].copy(8)
    assert why == ""
    assert size > 3 * PAGE
    holder = holder_of(hosts)
    assert holder.held.held == ((0, 8, "snapshot 8"),)
    assert (holder.directory / FOLDER / "host-0").stat().st_mode & 0o77 == 0
    lose_disk(hosts[0])
    assert read(hosts[0].fetch(holder.place, 8)) == (8, "a b c a")
    again = Shelf(hosts[0].shelf.directory, JOB, several="mark")
    assert again.named == [(8, "snapshot 8")]
    put(again, 12, "a x", called="next")
    again.all_have()
    assert read(again.newest) == (12, "a x")


def test_pages_that_are_there_already_do_not_go_again(hosts: list[One]) -> None:
    hosts[0].put(8, "a b c d e f")
    hosts[0].copy(8)
    hosts[0].put(12, "a b c d e x")
    why, size = hosts[0].copy(12)
    assert (why, size < 2 * PAGE) == ("", True)
    assert hosts[0].copy(12) == ("", 0)
    holder = holder_of(hosts)
    hosts[0].put(16, "a b c d e y")
    hosts[0].copy(16)
    holder.held.keep(hosts[0].shelf.named)
    assert [step for _, step, _ in holder.held.held] == [12, 16]
    folder = holder.directory / FOLDER / "host-0"
    assert sum(path.stat().st_blocks * 512 for path in pages_of(folder)) <= 8 * PAGE
    lose_disk(hosts[0])
    assert read(hosts[0].fetch(holder.place, 16)) == (16, "a b c d e y")
    assert read(hosts[0].fetch(holder.place, 12)) == (12, "a b c d e x")


def test_a_copy_outlives_its_holders_launcher(hosts: list[One]) -> None:
    hosts[0].put(8, "a b")
    hosts[0].copy(8)
    holder = holder_of(hosts)
    (holder.directory / FOLDER / "host-0" / "unfinished-snapshot-0000000012").mkdir()
    stray = holder.directory / FOLDER / "host-0" / PAGES / "77"  # of a copy that was coming
    stray.write_bytes(bytes(PAGE))
    holder.begin()
    assert holder.held.held == ((0, 8, "snapshot 8"),)
    assert not stray.exists()
    lose_disk(hosts[0])
    assert read(hosts[0].fetch(holder.place, 8)) == (8, "a b")


def test_a_damaged_copy_is_never_taken(hosts: list[One]) -> None:
    hosts[0].put(8, "a b")
    assert hosts[0].copy(8, copies=2)[0] == ""
    (pages,) = pages_of(hosts[1].directory / FOLDER / "host-0")
    pages.write_bytes(pages.read_bytes().replace(b"b", b"c"))
    lose_disk(hosts[0])
    with pytest.raises(DamagedSnapshot, match=r"pages-1\.img is not what was written"):
        hosts[0].fetch(1, 8)
    assert list(hosts[0].directory.rglob("*snapshot-*")) == []
    assert read(hosts[0].fetch(2, 8)) == (8, "a b")


def test_what_is_damaged_on_its_own_disk_is_no_copy_and_the_next_is_stored_as_a_whole(
    hosts: list[One],
) -> None:
    hosts[0].put(8, "a b")
    (pages,) = pages_of(hosts[0].shelf.directory)
    pages.write_bytes(pages.read_bytes().replace(b"b", b"c"))
    why, _ = hosts[0].copy(8)
    assert why.count("pages-1.img is not what was written") == 2, "the other host was tried, too"
    assert [one.held.held for one in hosts] == [()] * HOSTS
    until = time.monotonic() + 10
    while list(hosts[1].directory.rglob("*snapshot-*")) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(hosts[1].directory.rglob("*snapshot-*")) == []
    hosts[0].put(12, "a b")
    assert hosts[0].copy(12)[0] == ""
    lose_disk(hosts[0])
    assert read(hosts[0].fetch(holder_of(hosts).place, 12)) == (12, "a b")


Status = namedtuple("Status", "f_bavail f_frsize")


def test_where_a_host_has_no_room_another_one_takes_it(
    hosts: list[One], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts[0].put(8, "a b")
    statvfs: Callable[[Any], Any] = os.statvfs
    full = {hosts[1].directory}
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: Status(1, PAGE) if full & set(Path(path).parents) else statvfs(path),
    )
    assert hosts[0].copy(8)[0] == ""
    assert holder_of(hosts).place == 2
    full.add(hosts[2].directory)
    hosts[0].put(12, "a b x y")
    why, _ = hosts[0].copy(12)
    assert why.count("there is no room for") == 2
    assert hosts[2].held.held == ((0, 8, "snapshot 8"),), "what was there stays"


def test_room_for_a_hosts_own_next_snapshot_is_left_free(hosts: list[One]) -> None:
    hosts[0].put(8, "a b")
    for one in hosts[1:]:
        one.reserve = 1 << 60
    assert "of its own next snapshot" in hosts[0].copy(8)[0]


def test_a_disk_that_gets_full_on_the_way_leaves_nothing(
    hosts: list[One], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts[0].put(8, "a b")

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    why, _ = hosts[0].copy(8)
    assert why.count("No space left on device") == 2
    monkeypatch.undo()
    assert [one.held.held for one in hosts] == [()] * HOSTS
    assert hosts[0].copy(8)[0] == ""


def test_hosts_that_share_a_directory_need_no_copy(tmp_path: Path, hosts: list[One]) -> None:
    hosts[0].put(8, "a b")
    for one in hosts[1:]:
        one.directory = hosts[0].directory
        one.begin()
    assert hosts[0].copy(8)[0].count("it has the same checkpoint directory") == 2


def test_all_go_once_none_is_of_use(hosts: list[One]) -> None:
    hosts[0].put(8, "a b")
    hosts[0].copy(8)
    holder = holder_of(hosts)
    holder.held.forget()
    assert holder.held.held == ()
    assert not (holder.directory / FOLDER).exists()
    with pytest.raises(LinkError, match="it has no such copy any more"):
        hosts[0].fetch(holder.place, 8)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rank": 0, "image": "../core"}, "files can't be"),
        ({"rank": OF_ALL, "image": "events.jsonl"}, "files can't be"),
        ({"rank": -2}, "files can't be"),
        ({"bytes": -1}, "files can't be"),
    ],
)
def test_files_that_are_none_of_a_snapshot_are_refused(
    hosts: list[One], change: dict[str, Any], why: str
) -> None:
    hosts[0].put(8, "a b")
    assert hosts[0].shelf.newest is not None
    files = files_of(hosts[0].shelf.newest)

    async def ask() -> Refused:
        async with hosts[0].hosts.visit(1, VISIT) as (reader, writer):
            wrong: PartFile = replace(files[0], **change)
            writer.write(visiting.encode(PutSnapshot(0, 8, "snapshot 8", [wrong])))
            return (await visiting.hear(reader, Refused))[0]

    assert why in hosts[0].run(ask()).why


def test_a_copy_goes_no_faster_than_it_has_to() -> None:
    async def goes(size: int, seconds: float, pieces: int) -> float:
        pace, begun = Pace(size, seconds), time.monotonic()
        for _ in range(pieces):
            await pace.keep(size // pieces)
        return time.monotonic() - begun

    assert asyncio.run(goes(10**9, 0.2, 5)) >= 0.19
    assert asyncio.run(goes(10**9, 0.0, 5)) < 0.15
    assert asyncio.run(goes(10**6, 100.0, 5)) < 1, "a small one is not spread out"
