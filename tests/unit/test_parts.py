"""Parts of shards on other hosts, in memory and in a directory; and the shard put together again."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_host_memory import made

from jitckpt.decisions.sources import PartOfShard
from jitckpt.errors import SaveError
from jitckpt.hosts import connections, link
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, part_peers, part_store, parts, peers, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.tiers.part_store import PartStore
from jitckpt.tiers.parts import ReadPart
from jitckpt.tiers.tier import Shard
from jitckpt.wire.hosts import Host
from jitckpt.wire.visits import HeldPart

IDENTITY = Identity("job", "fingerprint", 2, 0, 0, 2)
COUNT = 5  # chunks; of which 2 go at a time
ROOM = 2 * COUNT * shard.CHUNK + (1 << 20)


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom((COUNT - 1) * shard.CHUNK + 1000)


class Keeper:
    """Host 1, which keeps parts of rank 0's shards; host 0 is `peer`'s owner."""

    def __init__(self, directory: Path) -> None:
        self.room = ROOM
        self.memory = PartStore({}, host_memory.create, lambda: self.room, "spare memory")
        file = partial(part_store.file_in, directory)
        self.files = PartStore({}, file, lambda: self.room, str(directory))
        listeners = [connections.listen("127.0.0.1") for _ in range(2)]
        known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        self.hosts = [Hosts(i, known, one, b"secret", 30) for i, one in enumerate(listeners)]
        self.arrived: list[tuple[int, bool]] = []

        async def more(request: object, connection: peers.Connection) -> bool:
            return await part_peers.answer(
                (self.memory, self.files),
                lambda rank: None if rank == 0 else "not for me",
                lambda *arrived: self.arrived.append(arrived),
                request,  # type: ignore[arg-type]
                connection,
            )

        empty = HostMemory()
        self.hosts[1].answers[peers.VISIT] = partial(peers.serve, empty, lambda rank: None, more=more)
        for one in self.hosts:
            one._thread.start()
        self.peer = PeerParts(self.hosts[0], 1)

    def close(self) -> None:
        for one in self.hosts:
            one.close()
        self.memory.close()
        self.files.close()


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(part_store, "AT_A_TIME", 2)
    found = Keeper(tmp_path)
    yield found
    found.close()


def whole_again(keeper: Keeper, into: HostMemory) -> int:
    held = [(one, place) for place, of in enumerate(keeper.peer.parts()) for one in of]
    place = held[0][1]
    slot, of = keeper.peer.part(0, 1, "first", in_directory=bool(place))

    def read(one: HeldPart, place: int) -> ReadPart:
        source = PartOfShard(0, 1, "first", 1, one.first, one.count, one.chunks, one.of)

        def call(window: Window, digests: Sequence[bytes]) -> None:
            keeper.peer.part_into(0, 1, "first", window, digests, in_directory=bool(place))

        return ReadPart(source, range(one.first, one.first + one.count), call)

    return parts.put_together(slot, of, [read(*one) for one in held], into)


def test_a_shard_comes_back_bit_for_bit_from_memory_and_files(
    keeper: Keeper, data: bytes, tmp_path: Path
) -> None:
    one = made(1, data, identity=IDENTITY)
    keeper.peer.put_part(parts.part_of(one, 0, 3), in_directory=False)
    keeper.peer.put_part(parts.part_of(one, 3, 2), in_directory=True)
    assert keeper.arrived == [(0, False), (0, True)]
    assert not any(tmp_path.iterdir()), "the files have no names"
    of_memory, of_directory = keeper.peer.parts()
    assert [(held.first, held.count, held.chunks) for held in of_memory] == [(0, 3, COUNT)]
    assert [(held.first, held.count, held.chunks) for held in of_directory] == [(3, 2, COUNT)]
    again = HostMemory()
    assert whole_again(keeper, again) == one.seal.size
    host_memory.check(again.of(0), 1)
    there = again.shard(0, 1, "first")
    assert bytes(memoryview(there.window)) == bytes(memoryview(one.window))
    assert (there.seal, there.index) == (one.seal, one.index)
    again.close()


@pytest.mark.parametrize("in_directory", [False, True])
def test_a_flipped_byte_is_found_before_the_shard_is_whole(
    keeper: Keeper, data: bytes, in_directory: bool
) -> None:
    one = made(1, data, identity=IDENTITY)
    keeper.peer.put_part(parts.part_of(one, 0, COUNT), in_directory=in_directory)
    store = keeper.files if in_directory else keeper.memory
    place = host_memory.data_place(1) + 3 * shard.CHUNK
    (before,) = os.pread(store.descriptors[0], 1, place)
    os.pwrite(store.descriptors[0], bytes([before ^ 1]), place)
    again = HostMemory()
    with pytest.raises(PieceLost) as lost:
        whole_again(keeper, again)
    assert isinstance(lost.value.piece, PartOfShard)
    assert "damaged" in str(lost.value)
    assert not again.has()
    again.close()


def test_what_has_no_room_or_makes_no_sense_is_refused(keeper: Keeper, data: bytes) -> None:
    one = made(1, data, identity=IDENTITY)
    part = parts.part_of(one, 0, 3)
    keeper.room = 4 * shard.CHUNK
    with pytest.raises(SaveError, match="would need"):
        keeper.peer.put_part(part, in_directory=False)
    with pytest.raises(SaveError, match="no part of a shard"):
        keeper.peer.put_part(made(1, b"small", identity=IDENTITY), in_directory=False)
    other = made(1, data, identity=Identity("job", "fingerprint", 2, 1, 1, 2))
    with pytest.raises(SaveError, match="not for me"):
        keeper.peer.put_part(parts.part_of(other, 0, 1), in_directory=False)
    as_another = Shard(0, 1, part.seal, parts.part_of(other, 0, 3).index, part.window)
    with pytest.raises(SaveError, match="damaged"):
        keeper.peer.put_part(as_another, in_directory=False)
    assert keeper.peer.parts() == ([], [])
    assert keeper.memory.taken() == 0, "nothing is left of what was refused"


HELD = HeldPart(0, 1, "first", 0, 2, COUNT, 2 * shard.CHUNK, "job", 2, 0, "ab")


def says(keeper: Keeper, there: list[dict[str, Any]]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link.receive(reader)
        writer.write(link.encode({"type": "parts", "in_memory": there, "in_directory": []}))

    keeper.hosts[1].answers[peers.VISIT] = answer


def test_what_a_host_says_of_its_parts_is_checked_as_it_is_read(keeper: Keeper) -> None:
    says(keeper, [asdict(HELD) | {"first": "0"}])
    with pytest.raises(LinkError, match=r"^host 1 .* In a message of type parts, in_memory can't be "):
        keeper.peer.parts()


def test_what_a_host_of_a_later_version_says_more_of_its_parts_is_left_out(keeper: Keeper) -> None:
    says(keeper, [asdict(HELD) | {"compressed": True}])
    assert keeper.peer.parts() == ([HELD], [])


def test_lent_memory_is_given_back(keeper: Keeper, data: bytes) -> None:
    for step in (1, 2):
        one = made(step, data, identity=IDENTITY)
        keeper.peer.put_part(parts.part_of(one, 0, 2), in_directory=False)
    assert keeper.memory.drop(lambda held: held.step < 2) == []
    assert [held.step for held in keeper.memory.has()] == [2]
    assert keeper.memory.keep_within(1 << 40) == []
    assert keeper.memory.keep_within(2 * shard.CHUNK) == [0]
    assert (keeper.memory.taken(), keeper.memory.has()) == (0, [])
    with pytest.raises(SaveError, match="No part"):
        keeper.peer.part(0, 2, "first", in_directory=False)
