"""What a host lacks to go on, where every host has a checkpoint directory of its own, comes from the others.

Before the ranks start, each agent asks the others what saves they have, decides (a pure function) what its
ranks need, and fetches that. A save is taken in only if its checksums are right.
"""

import asyncio
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jitckpt.console import say
from jitckpt.errors import SaveError
from jitckpt.hosts import visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import HashedFile, SaveFolder
from jitckpt.saves.layout import FileEntry, Metadata
from jitckpt.system import regular_file
from jitckpt.wire.checked import Kind, ProtocolError
from jitckpt.wire.visits import EndOfFile, Refused, SavePiece, Saves, WantFile, WantSaves

PIECE = 4 << 20  # bytes
ANSWER_SECONDS = 60.0
VISIT = "saves"  # what an agent says that wants some


@dataclass(frozen=True)
class Fetch:
    """A save that this host needs, and which host has it."""

    host: int
    save: Metadata


@dataclass(frozen=True)
class Fetched:
    """What has come: saves of this step, their bytes, and the seconds that it took."""

    step: int
    saves: int
    bytes: int
    seconds: float


def wanted(
    held: Mapping[int, Sequence[Metadata]],
    own: int,
    ranks: Collection[int],
    kept: Collection[int] = (),
    *,
    world_size: int | None = None,
) -> tuple[Fetch, ...]:
    """Return what the host `own` has to fetch, so that its ranks can go on from the step that all will take.

    held: every host's finished saves. The step is the newest for which every shard is saved somewhere. A host
    needs one save of each shard that its ranks hold, each of its ranks' own save if there is one, and else
    its local state; and the local states of the ranks `kept`, whose host may be lost with its disk.
    world_size: ranks of the job now; None: as many as saved it. Where it had others, a host needs all shards:
    each rank cuts its own out of them.
    """
    everywhere: dict[int, list[Metadata]] = {}  # by step
    for save in (save for saves_of_host in held.values() for save in saves_of_host):
        everywhere.setdefault(save.step, []).append(save)
    for step in sorted(everywhere, reverse=True):
        job = _whole(everywhere[step])
        if job is not None:
            found = _Found(step, job, held, own)
            of_ranks = ranks if world_size in (None, job[1]) else None
            return found.missing(ranks, kept, _shards_of(of_ranks, job, everywhere))
    return ()


Job = tuple[str, int]  # and its ranks' number


def _job(save: Metadata) -> Job:
    return save.identity.job, save.identity.world_size


def _whole(of_step: Sequence[Metadata]) -> Job | None:
    """Return the first job of which every shard is among these saves."""
    shards: dict[Job, set[int]] = {}
    numbers: dict[Job, int] = {}
    for save in of_step:
        if save.kind == "rank":
            shards.setdefault(_job(save), set()).add(save.identity.shard)
            numbers.setdefault(_job(save), save.identity.shards)
    return next((job for job in sorted(shards) if len(shards[job]) == numbers[job]), None)


def _shards_of(
    ranks: Collection[int] | None, job: Job, saves_by_step: Mapping[int, Sequence[Metadata]]
) -> set[int]:
    """Return which shards these ranks hold; all, for None or if the saves do not tell it of one of them."""
    shards: dict[int, int] = {}
    number = 0
    for step in sorted(saves_by_step):
        for save in saves_by_step[step]:
            if _job(save) == job:
                shards[save.identity.rank], number = save.identity.shard, save.identity.shards
    if ranks is None or not shards.keys() >= set(ranks):
        return set(range(number))
    return {shards[rank] for rank in ranks}


class _Found:
    """The saves of the step that all will go on from: what is here, and from where the rest can come."""

    def __init__(self, step: int, job: Job, held: Mapping[int, Sequence[Metadata]], own: int) -> None:
        self._own = own
        self._here = {
            _key(save): save for save in held.get(own, ()) if (save.step, _job(save)) == (step, job)
        }
        self._elsewhere = {
            _key(save): Fetch(host, save)
            for host, of_host in sorted(held.items(), reverse=True)
            for save in of_host
            if host != own and (save.step, _job(save)) == (step, job) and _key(save) not in self._here
        }

    def missing(
        self, ranks: Collection[int], kept: Collection[int], shards: Collection[int]
    ) -> tuple[Fetch, ...]:
        """Return what this host needs for its ranks, which hold these shards."""
        needed: list[tuple[str, int]] = []
        for rank in sorted(ranks):
            replica, local = ("rank", rank), ("local", rank)
            needed.append(replica if replica in self._here or replica in self._elsewhere else local)
        needed += [("local", rank) for rank in sorted(kept)]
        come = [self._elsewhere[key].save for key in needed if key in self._elsewhere]
        have = {save.identity.shard for save in (*self._here.values(), *come) if save.kind == "rank"}
        holders: dict[int, list[int]] = {}
        for kind, rank in sorted(self._elsewhere):
            if kind == "rank":
                shard = self._elsewhere[kind, rank].save.identity.shard
                holders.setdefault(shard, []).append(rank)
        for shard in sorted(set(shards) - have):
            of_shard = holders.get(shard, [])
            if of_shard:
                needed.append(("rank", of_shard[self._own % len(of_shard)]))  # not all hosts ask the same one
        return tuple(self._elsewhere[key] for key in needed if key in self._elsewhere)


def _key(save: Metadata) -> tuple[str, int]:
    return save.kind, save.identity.rank


# The side that has.


async def serve(directory: Path | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what another host asks about this directory, until it has asked all. Raises LinkError then."""
    while True:
        try:
            request, _ = await visiting.hear(reader, WantSaves, WantFile)
            match request:
                case WantSaves(theirs):
                    listing = await asyncio.to_thread(_listing, directory)
                    # Hosts that share a directory know already what is in it.
                    known = theirs == xxhash.xxh3_128_hexdigest(listing)
                    writer.write(visiting.encode(Saves(known), b"" if known else listing))
                case WantFile():
                    pieces = _pieces(directory, request)
                    while piece := await asyncio.to_thread(next, pieces, b""):
                        writer.write(visiting.encode(SavePiece(), piece))
                        await writer.drain()
                    writer.write(visiting.encode(EndOfFile()))
        except (OSError, SaveError, ProtocolError, ValueError) as error:
            writer.write(visiting.encode(Refused(f"{error}")))
        await writer.drain()


def _listing(directory: Path | None) -> bytes:
    found = [] if directory is None else [save for save in folders.find(directory) if save.metadata]
    return json.dumps([save.metadata.to_json().decode() for save in found if save.metadata]).encode()


def _pieces(directory: Path | None, request: WantFile) -> Iterator[bytes]:
    """Yield a file of a save, which must be one that the save's metadata names."""
    if directory is None:
        raise SaveError("This host has no checkpoint directory yet.")
    save = folders.look_at(directory, request.step, request.kind, request.rank)
    if save.metadata is None or request.file not in {file.name for file in save.metadata.files}:
        raise SaveError(f"There is no {request!r} in {directory}.")
    with regular_file.reading(save.path / request.file) as file:
        while data := file.read(PIECE):
            yield data


# The side that lacks.


def fetch(hosts: Hosts, directory: Path, start: int = 0) -> Fetched | None:
    """Fetch what this host's ranks need into its directory; None if they lack nothing.

    start: the number of the one that they begin.
    Damaged saves are passed over. SaveError if what came can't be written, LinkError if a host is gone.
    """
    return asyncio.run(_fetch(hosts, directory, start))


class _Damaged(SaveError):
    """What came is not what was saved."""


async def _fetch(hosts: Hosts, directory: Path, start: int) -> Fetched | None:
    begun = time.monotonic()
    listing = _listing(directory)
    known = xxhash.xxh3_128_hexdigest(listing)
    held = {hosts.index: _parse(listing)}
    for host in range(len(hosts.all)):
        if host != hosts.index:
            async with hosts.visit(host, VISIT) as (reader, writer):
                writer.write(visiting.encode(WantSaves(known)))
                saves, data = await _answer(reader, Saves)
                if not saves.known:  # what is here as well is nothing that could be fetched
                    held[host] = _parse(data)
    sizes: list[int] = []
    ranks, world_size = hosts.all[hosts.index].ranks, sum(len(host.ranks) for host in hosts.all)
    kept = hosts.all[hosts.index - 1].ranks  # of whose local states this host has copies
    while needed := wanted(held, hosts.index, ranks, kept, world_size=world_size):
        step = needed[0].save.step
        folders.open_directory(directory, needed[0].save.identity.job)
        for one in needed:
            async with hosts.visit(one.host, VISIT) as (reader, writer):
                try:
                    sizes.append(await _take(one.save, directory, start, reader, writer))
                    held[hosts.index].append(one.save)
                except _Damaged as error:
                    say(f"a save of {hosts.name(one.host)} is passed over: {error}")
                    held[one.host].remove(one.save)
                    break  # another replica's may serve, or an older step has to
    return Fetched(step, len(sizes), sum(sizes), time.monotonic() - begun) if sizes else None


async def _take(
    save: Metadata,
    directory: Path,
    start: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> int:
    """Fetch one save; return its bytes."""
    with SaveFolder(
        directory, save.identity, save.step, save.kind, save.saver, by="fetched", start=start
    ) as folder:
        for file in save.files:
            request = WantFile(save.step, save.kind, save.identity.rank, file.name)
            writer.write(visiting.encode(request))
            path = folder.path / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with HashedFile(path) as copy:
                while copy.size <= file.size:
                    said, data = await _answer(reader, SavePiece, EndOfFile)
                    if isinstance(said, EndOfFile):
                        break
                    copy.write(data)
            if FileEntry(file.name, copy.size, copy.checksum) != file:
                raise _Damaged(
                    f"{file.name} of step {save.step}, {save.kind} {save.identity.rank}, came damaged."
                )
            folder.add_checked(file)
        return folder.commit()[1]


async def _answer(reader: asyncio.StreamReader, *kinds: type[Kind]) -> tuple[Kind, bytes]:
    try:
        return await visiting.answer(reader, "Another host", ANSWER_SECONDS, *kinds)
    except visiting.RefusedError as error:
        raise LinkError(f"Another host can't give a save: {error}") from error


def _parse(listing: bytes) -> list[Metadata]:
    try:
        texts = json.loads(listing)
        if not isinstance(texts, list):
            raise TypeError(f"{type(texts).__name__} instead of a list")
        return [layout.parse_metadata(text.encode()) for text in texts]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise LinkError(f"Another host's list of saves makes no sense: {error}.") from error
