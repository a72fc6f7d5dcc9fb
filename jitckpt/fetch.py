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

from jitckpt import layout, link, saves
from jitckpt.console import say
from jitckpt.errors import SaveError
from jitckpt.hosts import Hosts
from jitckpt.layout import FileEntry, Metadata
from jitckpt.link import LinkError
from jitckpt.saves import HashedFile, SaveFolder

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
    held: Mapping[int, Sequence[Metadata]], own: int, ranks: Collection[int], kept: Collection[int] = ()
) -> tuple[Fetch, ...]:
    """Return what the host `own` has to fetch, so that its ranks can go on from the step that all will take.

    held: every host's finished saves. The step is the newest for which every shard is saved somewhere. A host
    needs one save of every shard, each of its ranks' own save if there is one, and else its local state; and
    the local states of the ranks `kept`, whose host may be lost with its disk.
    """
    everywhere = {save for saves_of_host in held.values() for save in saves_of_host}
    for step in sorted({save.step for save in everywhere}, reverse=True):
        of_step = [save for save in everywhere if save.step == step]
        by_job = _whole(of_step)
        if by_job is not None:
            return _missing(held, own, ranks, kept, by_job)
    return ()


def _whole(of_step: Sequence[Metadata]) -> list[Metadata] | None:
    """Return the saves of one job, if every shard is among them."""
    for job in sorted({(save.identity.job, save.identity.world_size) for save in of_step}):
        found = [save for save in of_step if (save.identity.job, save.identity.world_size) == job]
        replicas = [save for save in found if save.kind == "rank"]
        shards = {save.identity.shard for save in replicas}
        if replicas and len(shards) == replicas[0].identity.shards:
            return found
    return None


def _missing(
    held: Mapping[int, Sequence[Metadata]],
    own: int,
    ranks: Collection[int],
    kept: Collection[int],
    found: Sequence[Metadata],
) -> tuple[Fetch, ...]:
    here = {_key(save) for save in held.get(own, ()) if save in found}
    elsewhere = {
        _key(save): Fetch(host, save)
        for host, of_host in sorted(held.items(), reverse=True)
        for save in of_host
        if host != own and save in found
    }
    needed: list[tuple[str, int]] = []
    for rank in sorted(ranks):
        replica, local = ("rank", rank), ("local", rank)
        needed.append(replica if replica in here or replica in elsewhere else local)
    needed += [("local", rank) for rank in sorted(kept)]
    have = {save.identity.shard for save in found if _key(save) in here | set(needed) and save.kind == "rank"}
    for shard in range(found[0].identity.shards):
        if shard not in have:
            holders = sorted(rank for kind, rank in elsewhere if kind == "rank")
            holders = [rank for rank in holders if elsewhere["rank", rank].save.identity.shard == shard]
            needed.append(("rank", holders[own % len(holders)]))  # not all hosts ask the same one
    return tuple(elsewhere[key] for key in needed if key not in here and key in elsewhere)


def _key(save: Metadata) -> tuple[str, int]:
    return save.kind, save.identity.rank


# The side that has.


async def serve(directory: Path | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what another host asks about this directory, until it has asked all. Raises LinkError then."""
    while True:
        request, _ = await link.receive(reader)
        try:
            if request.get("list") is True:
                writer.write(link.encode({"saves": True}, await asyncio.to_thread(_listing, directory)))
            else:
                pieces = _pieces(directory, request)
                while piece := await asyncio.to_thread(next, pieces, b""):
                    writer.write(link.encode({"piece": True}, piece))
                    await writer.drain()
                writer.write(link.encode({"end": True}))
        except (OSError, SaveError, KeyError, TypeError, ValueError) as error:
            writer.write(link.encode({"error": f"{error}"}))
        await writer.drain()


def _listing(directory: Path | None) -> bytes:
    found = [] if directory is None else [save for save in saves.find(directory) if save.metadata]
    return json.dumps([save.metadata.to_json().decode() for save in found if save.metadata]).encode()


def _pieces(directory: Path | None, request: Mapping[str, object]) -> Iterator[bytes]:
    """Yield a file of a save, which must be one that the save's metadata names."""
    if directory is None:
        raise SaveError("This host has no checkpoint directory yet.")
    wanted_save = request["step"], request["kind"], request["rank"]
    for save in saves.find(directory):
        if (save.step, save.kind, save.rank) == wanted_save and save.metadata is not None:
            names = {file.name for file in save.metadata.files}
            if request["file"] in names:
                with open(save.path / str(request["file"]), "rb", buffering=0) as file:
                    while data := file.read(PIECE):
                        yield data
                return
    raise SaveError(f"There is no {request!r} in {directory}.")


# The side that lacks.


def fetch(hosts: Hosts, directory: Path) -> Fetched | None:
    """Fetch what this host's ranks need into its directory; None if they lack nothing.

    Damaged saves are passed over. SaveError if what came can't be written, LinkError if a host is gone.
    """
    return asyncio.run(_fetch(hosts, directory))


class _Damaged(SaveError):
    """What came is not what was saved."""


async def _fetch(hosts: Hosts, directory: Path) -> Fetched | None:
    begun = time.monotonic()
    held = {hosts.index: _parse(_listing(directory))}
    for host in range(len(hosts.all)):
        if host != hosts.index:
            async with hosts.visit(host, VISIT) as (reader, writer):
                writer.write(link.encode({"list": True}))
                held[host] = _parse((await _answer(reader))[1])
    sizes: list[int] = []
    while needed := wanted(held, hosts.index, hosts.all[hosts.index].ranks, hosts.kept):
        one = needed[0]
        saves.open_directory(directory, one.save.identity.job)
        async with hosts.visit(one.host, VISIT) as (reader, writer):
            try:
                sizes.append(await _take(one.save, directory, reader, writer))
                held[hosts.index].append(one.save)
            except _Damaged as error:
                say(f"a save of {hosts.name(one.host)} is passed over: {error}")
                held[one.host].remove(one.save)
        step = one.save.step
    return Fetched(step, len(sizes), sum(sizes), time.monotonic() - begun) if sizes else None


async def _take(
    save: Metadata, directory: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> int:
    """Fetch one save; return its bytes."""
    with SaveFolder(directory, save.identity, save.step, save.kind, save.saver, by="fetched") as folder:
        for file in save.files:
            request = {"step": save.step, "kind": save.kind, "rank": save.identity.rank, "file": file.name}
            writer.write(link.encode(request))
            path = folder.path / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with HashedFile(path) as copy:
                while copy.size <= file.size and (answer := await _answer(reader))[0].get("piece"):
                    copy.write(answer[1])
            if FileEntry(file.name, copy.size, copy.checksum) != file:
                raise _Damaged(
                    f"{file.name} of step {save.step}, {save.kind} {save.identity.rank}, came damaged."
                )
            folder.add_checked(file)
        return folder.commit()[1]


async def _answer(reader: asyncio.StreamReader) -> tuple[link.Header, bytes]:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            header, data = await link.receive(reader)
    except TimeoutError as error:
        raise LinkError(f"Another host does not answer within {ANSWER_SECONDS:g} s.") from error
    if "error" in header:
        raise LinkError(f"Another host can't give a save: {header['error']}")
    return header, data


def _parse(listing: bytes) -> list[Metadata]:
    try:
        texts = json.loads(listing)
        if not isinstance(texts, list):
            raise TypeError(f"{type(texts).__name__} instead of a list")
        return [layout.parse_metadata(text.encode()) for text in texts]
    except (ValueError, TypeError, AttributeError) as error:
        raise LinkError(f"Another host's list of saves makes no sense: {error}.") from error
