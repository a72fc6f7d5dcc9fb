"""Ranks that leave their host go to one that stands by and is still there."""

import asyncio
import contextlib
import math
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from descriptors import held_descriptors

from jitckpt._pages import checksum
from jitckpt._step_barrier import STEP_BITS
from jitckpt.agent import standby
from jitckpt.agent.migration import image_receiver
from jitckpt.agent.migration import leaving as leaving_module
from jitckpt.agent.migration.image_transfer import send_file
from jitckpt.agent.migration.leaving import Departure
from jitckpt.agent.migration.move import CLOCKS, Dumped
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.rank_from_images import RankFromImages
from jitckpt.agent.proxies.step_barrier import known_again, told_of, told_of_ranks
from jitckpt.agent.standby import _receive_files, _Waiting
from jitckpt.console import show_size
from jitckpt.decisions.belongings import Carried
from jitckpt.decisions.step_tree import TreePlace
from jitckpt.hosts import link, visiting
from jitckpt.hosts.connections import listen
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby
from jitckpt.ring import local_state
from jitckpt.wire.agents import Come
from jitckpt.wire.checked import Checked, content_of
from jitckpt.wire.hosts import Host
from jitckpt.wire.moves import (
    DumpedRank,
    HandOver,
    ImageFile,
    ImagePiece,
    JobFacts,
    Move,
    RanksRestored,
    SamePiece,
    Steps,
    Taken,
    Whole,
)
from jitckpt.wire.visits import Refused

SECRET = b"0123456789abcdef"
FACTS = JobFacts("run", 3, ("127.0.0.1", 29500))
RANK = DumpedRank(
    rank=1,
    pids=(7, 9),
    sockets=((11, 1, "agent"), (12, 5, "control")),
    outputs=(("pipe:[3]", 1),),
    memory=("jitckpt-steps",),
    folders=("/tmp",),
    said={"control": ["00ff"]},
    conversations={},
    askers=(("control", 7, ((8, "it was killed"),)),),
)
CLOCKS_DIFFER = standby.SAME_CLOCK
HOSTS = [Host("127.0.0.1", 1, (0,), 0), Host("127.0.0.1", 2, (1,), 0)]
MOVE = Move(FACTS, 1, HOSTS, SECRET.hex(), "relay", time.monotonic(), [RANK])
COME = Come(5, 2, left=True)
HAND_OVER = HandOver(
    HOSTS, "00", Steps(COME, Come(), Come(), [(3, COME)]), [], [0], [(1, 0, "nothing")], 1, 2.0, 3.0, 4.0
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be long ago that MOVE was made."""
    monkeypatch.setattr(standby, "SAME_CLOCK", math.inf)


def departure(standbys: list[Standby]) -> Departure:
    unused: Any = SimpleNamespace(lost=frozenset())
    return Departure(
        unused,
        unused,
        unused,
        print,
        standbys=lambda: standbys,
        facts=lambda: FACTS,
        barrier=None,
        messenger=None,
        secret=SECRET,
        wait=0.0,
        is_interrupted=lambda: False,
        known=lambda: (),
    )


def gone() -> Standby:
    with listen("127.0.0.1") as listener:
        return Standby("127.0.0.1", listener.getsockname()[1])


def test_hosts_that_have_said_that_they_stand_by_and_are_gone_are_passed_over() -> None:
    with pytest.raises(LinkError, match="No host that stands by can be reached"):
        asyncio.run(departure([gone(), gone()])._send_to_one(MOVE, []))


# What the two say to each other.

PAGES = os.urandom(100 * 4096)

Told = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def dumped(tmp_path: Path) -> Iterator[Dumped]:
    """A rank with two files of images, one of them with a hole, and a log that stays."""
    (here := tmp_path / "here").mkdir()
    (here / "core-7.img").write_bytes(b"core")
    with (here / "pages-1.img").open("wb") as pages:
        pages.seek(1 << 20)
        pages.write(PAGES)
        pages.write(PAGES)
        pages.write(b"behind a hole")
    (here / "pages-2.img").write_bytes(PAGES[4096:])
    (here / "dump.log").write_text("nobody needs it")
    folder = os.open(here, os.O_RDONLY)
    yield Dumped(1, folder, Carried(), {}, pids=(7,))
    os.close(folder)


@pytest.fixture
def come(tmp_path: Path) -> Iterator[RankFromImages]:
    (there := tmp_path / "there").mkdir()
    rank = RankFromImages(RANK, os.open(there, os.O_RDONLY), local_state.create())
    yield rank
    os.close(rank.images)
    os.close(rank.ring)


async def to(called: Callable[..., Awaitable[None]], say: Callable[[Standby], Awaitable[Any]]) -> Any:
    """Say something to one that stands by, and return what that comes to."""

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link.admit(reader, writer, SECRET)
        await called(reader, writer)

    server = await asyncio.start_server(admit, "127.0.0.1")
    async with server:
        return await say(Standby("127.0.0.1", server.sockets[0].getsockname()[1]))


def leaving(ring: int, standby: Standby) -> Departure:
    made = departure([gone(), standby])
    made._mover = SimpleNamespace(worker=lambda rank: SimpleNamespace(ring_fd=ring))  # type: ignore[assignment]
    return made


def test_what_a_host_that_is_left_sends_comes_whole(
    dumped: Dumped, come: RankFromImages, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = local_state.create()
    os.pwrite(ring, b"local state", 5000)

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        move, _ = await visiting.hear(reader, Move)
        assert replace(move, clock=MOVE.clock) == MOVE
        await _receive_files(reader, writer, {1: come}, 60)
        writer.write(visiting.encode(RanksRestored(4711, 0.5)))
        assert (await visiting.hear(reader, HandOver))[0] == HAND_OVER
        writer.write(visiting.encode(Taken()))

    async def say(standby: Standby) -> tuple[int, RanksRestored]:
        made = leaving(ring, standby)
        sent = await made._send_to_one(MOVE, [dumped])
        await made._finish(sent.reader, sent.writer, HAND_OVER)
        return sent.size, sent.restored

    size, restored = asyncio.run(to(called, say))
    assert (restored, size > 2 * len(PAGES)) == (RanksRestored(4711, 0.5), True)
    assert f"kB of {show_size(size)} had to go" in capsys.readouterr().err
    there = {name: os.open(name, os.O_RDONLY, dir_fd=come.images) for name in os.listdir(come.images)}
    assert {name: os.fstat(file).st_size for name, file in there.items()} == {
        "core-7.img": 4,
        "pages-1.img": (1 << 20) + 2 * len(PAGES) + 13,
        "pages-2.img": len(PAGES) - 4096,
    }
    assert os.pread(there["pages-1.img"], 1 << 20, 1 << 20) == 2 * PAGES + b"behind a hole"
    assert os.pread(there["pages-2.img"], 1 << 20, 0) == PAGES[4096:]
    assert os.pread(come.ring, 11, 5000) == b"local state"
    for file in (*there.values(), ring):
        os.close(file)


def test_a_host_that_takes_nothing_any_more_is_left(
    dumped: Dumped, come: RankFromImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this one would wait for it until it is taken away."""
    monkeypatch.setattr(leaving_module, "TAKING_SECONDS", 0.5)
    pages = os.open("pages-1.img", os.O_WRONLY, dir_fd=dumped.folder)
    os.write(pages, os.urandom(16 << 20))
    os.close(pages)

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await visiting.hear(reader, Move)
        await reader.read(1)
        await asyncio.sleep(30)

    async def say(standby: Standby) -> None:
        async with asyncio.timeout(20):
            await leaving(come.ring, standby)._send_to_one(MOVE, [dumped])

    with pytest.raises(LinkError, match=r"The other side takes nothing any more, for 0.5 s\."):
        asyncio.run(to(called, say))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (content_of(Refused("no room here.")), "The host that stands by says: no room here."),
        ({"port": 1, "restore": 2.0}, "says what makes no sense: A message has the unknown type None"),
        (
            {"type": "restored", "port": "1", "seconds": 0},
            "of type restored, port can't be '1'.",
        ),
        ({"type": "restored", "port": 0, "seconds": 0}, "makes no sense: 0 is no port."),
        ({"type": "restored", "port": 5}, "lacks seconds"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_sentence(
    dumped: Dumped, come: RankFromImages, answer: dict[str, Any], why: str
) -> None:
    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await visiting.hear(reader, Move)
        await _receive_files(reader, writer, {1: come}, 60)
        writer.write(link.encode(answer))

    with pytest.raises(LinkError) as caught:
        asyncio.run(to(called, lambda standby: leaving(come.ring, standby)._send_to_one(MOVE, [dumped])))
    assert why in str(caught.value)


def standing_by() -> _Waiting:
    """Return one that stands by; to be called in an event loop."""
    waiting = _Waiting.__new__(_Waiting)
    waiting._secret, waiting._takes = SECRET, asyncio.Lock()
    waiting._taken = asyncio.get_running_loop().create_future()
    place: Any = SimpleNamespace(reserve=lambda: None)
    waiting._place = place
    return waiting


def but(message: Checked, **fields: Any) -> dict[str, Any]:
    return content_of(message) | fields


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([{}], "A message has the unknown type None; known are move."),
        ([{"plan": {}}], "A message has the unknown type None"),
        ([but(MOVE, hosts=None)], "In a message of type move, hosts can't be None."),
        ([but(MOVE, hosts=[{"address": 1}])], "hosts can't be [{'address': 1}]."),
        ([but(MOVE, index=2)], "it has 2 hosts, and is of host 2"),
        ([but(MOVE, secret="xyz")], "'xyz' is not hexadecimal"),
        ([but(MOVE, relay="")], "the relay has no name"),
        ([but(MOVE, ranks=[])], "the host has the ranks (1,), and [] come"),
        ([but(MOVE, facts=asdict(FACTS) | {"workers_store": ["host"]})], "facts can't be"),
        ([but(MOVE, ranks=[asdict(replace(RANK, pids=(1,)))])], "ranks can't be"),
        ([but(MOVE, ranks=[asdict(replace(RANK, sockets=()))])], "ranks can't be"),
        ([but(MOVE, ranks=[asdict(replace(RANK, said={"agent": ["0"]}))])], "ranks can't be"),
        (
            [but(MOVE), but(ImageFile(0, "core", 5))],
            "File(rank=0, image='core', size=5) makes no sense",
        ),
        ([but(MOVE), but(ImageFile(1, "../core", 5))], "'../core' is no name of an image"),
        ([but(MOVE), but(ImagePiece(1, "core", 0, "00", 0))], "makes no sense here."),
        ([but(MOVE), but(ImageFile(1, "core", 5)), but(ImageFile(1, "core", 5))], "makes no sense here."),
        ([but(MOVE), but(ImageFile(1, "core", 5)), but(ImagePiece(1, "core", 0, "00", 0))], "came damaged."),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(ImagePiece(1, "core", -1, "00", 0))],
            "-1 is no place in",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(ImagePiece(1, "core", 0, "00", 1 << 30))],
            "a piece has at most 4194304 bytes, and not 1073741824",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(ImagePiece(1, "core", 0, "00", 5))],
            "A piece that was packed came damaged",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(SamePiece(1, "core", 0, 5, 1, "pages-1.img", 0))],
            "makes no sense here.",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(SamePiece(1, "core", 0, 6, 1, "core", 0))],
            "is to be the same as what has not come.",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(SamePiece(1, "core", 0, 1 << 30, 1, "core", 0))],
            "a piece has at most 4194304 bytes, and not 1073741824",
        ),
        (
            [but(MOVE), but(ImageFile(1, "core", 5)), but(SamePiece(1, "core", 0, 5, 1, "core", -1))],
            "has no place",
        ),
        ([but(MOVE), {"whole": True}], "known are whole, file, file_part, same_part."),
    ],
)
def test_nonsense_is_refused_in_a_sentence_and_it_stands_by_on(
    capsys: pytest.CaptureFixture[str], said: list[Any], why: str
) -> None:
    before = held_descriptors()

    async def heard() -> str:
        waiting = standing_by()
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        async with server:
            place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
            reader, writer = await departure([])._connected(place)
            for one in said:
                writer.write(link.encode(one))
            refused, _ = await visiting.hear(reader, Refused)
            writer.close()
            await writer.wait_closed()
        return refused.why

    refused = asyncio.run(heard())
    assert why in refused
    assert f"a host's ranks did not come here: {refused}" in capsys.readouterr().err
    assert held_descriptors() <= before


def test_what_a_host_knows_of_all_steps_goes_with_its_ranks() -> None:
    steps = HAND_OVER.steps or pytest.fail("there are none")
    assert told_of(known_again(5, [HOSTS[0]] * 9, steps)) == steps


def test_a_host_that_has_the_ranks_of_one_that_stays_is_no_part_of_the_tree() -> None:
    """It goes on from what that one had told of its own ranks."""
    own, everywhere = Come(7), Come(6)
    first = TreePlace(0, 2, STEP_BITS, own, {1: Come(6)}, everywhere=everywhere)
    place = known_again(2, [*HOSTS, replace(HOSTS[0], ranks_of=0)], told_of_ranks(first))
    assert place == TreePlace(2, 2, STEP_BITS, own, told=own, everywhere=everywhere, ranks_of=0)
    assert place.here(own) == (place, ())


def test_who_stands_by_takes_the_ranks_of_one_host_at_a_time() -> None:
    async def answered() -> str:
        waiting = standing_by()
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        async with server, waiting._takes:
            place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
            reader, writer = await departure([])._connected(place)
            writer.write(link.encode(content_of(MOVE)))
            refused, _ = await visiting.hear(reader, Refused)
            writer.close()
        return refused.why

    assert asyncio.run(answered()) == "Another host's ranks are just coming here."


def test_ranks_that_nobody_hands_over_are_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that they have left goes on with its own, or is gone."""
    monkeypatch.setattr(standby, "HANDING_OVER_SECONDS", 0.2)
    ended: list[int] = []

    def made_again(_: _Waiting, move: Move, ranks: Any, undo: contextlib.ExitStack) -> Any:
        undo.callback(ended.append, move.index)
        return None, None

    monkeypatch.setattr(_Waiting, "_made_again", made_again)

    async def answered() -> str:
        waiting = standing_by()
        waiting._links = listen("127.0.0.1")
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        async with server:
            place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
            reader, writer = await departure([])._connected(place)
            writer.write(link.encode(content_of(MOVE)) + visiting.encode(Whole()))
            await visiting.hear(reader, RanksRestored)
            refused, _ = await visiting.hear(reader, Refused)
            writer.close()
        waiting._links.close()
        assert not waiting._taken.done()
        return refused.why

    assert "does not answer within 0.2 s" in asyncio.run(answered())
    assert ended == [MOVE.index]


def test_ranks_of_a_host_that_was_started_at_another_time_are_refused_where_they_would_lose_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby, "SAME_CLOCK", CLOCKS_DIFFER)
    monkeypatch.setattr(standby, "ENTER", "/nowhere/nsenter")

    async def answered() -> str:
        waiting = standing_by()
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        async with server:
            place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
            reader, writer = await departure([])._connected(place)
            writer.write(visiting.encode(replace(MOVE, clock=time.monotonic() - CLOCKS_DIFFER - 1)))
            refused, _ = await visiting.hear(reader, Refused)
            writer.close()
        return refused.why

    assert "needs nsenter here, of the package util-linux" in asyncio.run(answered())


@pytest.mark.parametrize(("apart", "own_clock"), [(0.0, False), (0.0, True), (100.0, False)])
def test_images_that_take_their_time_are_no_sign_of_another_clock(
    apart: float, own_clock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apart: seconds between the hosts' starts. With another one, the clock of the images is gone by."""
    monkeypatch.setattr(standby, "SAME_CLOCK", 2.0)
    clocks: list[list[str]] = []
    monkeypatch.setattr(RankFromImages, "restore", lambda one, *_: clocks.append(os.listdir(one.images)))
    monkeypatch.setattr(RankFromImages, "end", lambda _: None)

    async def restored() -> RanksRestored:
        waiting = standing_by()
        waiting._links = listen("127.0.0.1")
        some: Any = SimpleNamespace(criu="some", mark="mark")
        waiting._settings = waiting._children = some
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        async with server:
            place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
            reader, writer = await departure([])._connected(place)
            rank = replace(RANK, own_clock=own_clock)
            writer.write(visiting.encode(replace(MOVE, clock=time.monotonic() - apart, ranks=[rank])))
            with (tmp_path / CLOCKS).open("w+b") as file:
                file.write(b"the clocks")
                file.flush()
                await send_file(writer, 1, CLOCKS, file.fileno(), Packer(False), patience=60)
            await asyncio.sleep(2.5)
            writer.write(visiting.encode(Whole()))
            found, _ = await visiting.answer(reader, "It", 60, RanksRestored)
            writer.close()
        waiting._links.close()
        return found

    assert asyncio.run(restored()).port
    assert clocks == [[CLOCKS] * (own_clock or apart > 0)]


def test_a_job_that_is_over_as_ranks_come_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def over() -> None:
        waiting = standing_by()
        server = await asyncio.start_server(waiting._called, "127.0.0.1")
        place = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
        _, writer = await departure([])._connected(place)
        writer.write(visiting.encode(MOVE))
        while not waiting._takes.locked():
            await asyncio.sleep(0.01)

    asyncio.run(over())  # which ends all that is still under way
    assert caplog.text == ""


def test_a_piece_that_memory_has_no_room_for_is_no_image(tmp_path: Path) -> None:
    """The system writes as much as it can, and says how much that is."""
    data, limits = os.urandom(8192), resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "image").open("wb") as file:
        to = image_receiver._Opened(file.fileno(), len(data))
        said = ImagePiece(1, "pages-1.img", 0, checksum(data), 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            with pytest.raises(OSError, match="only 5000 of 8192 bytes of an image could be written"):
                image_receiver._write(to, said, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert image_receiver._write(to, said, data) == len(data)
