"""This host's part of a snapshot goes to other hosts, and comes back from one of them if it is lost here."""

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.held_copies import PATIENCE, VISIT, HeldCopies, send_part
from jitckpt.agent.migration.image_receiver import receive_files
from jitckpt.agent.migration.shelf import DamagedSnapshot, ProcessSnapshot, Shelf
from jitckpt.agent.migration.snapshot_parts import ComingPart, files_of
from jitckpt.agent.migration.suspending import SLOWEST_DISK
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.copied_snapshots import in_turn
from jitckpt.decisions.holders import in_use
from jitckpt.decisions.placement import Machine
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.hosts import visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.wire.agents import CopySnapshot
from jitckpt.wire.hosts import Host
from jitckpt.wire.visits import CameDamaged, HasNot, ItsFiles, PartFile, PutSnapshot, VisitDone, WantSnapshot

# Called once a part has its copies, or why not, a clause; with the bytes that were sent. By another thread.
Done = Callable[[str, int], None]


class PartCopier:
    """Of one start of the ranks: this host's snapshots, and what it holds of others'."""

    def __init__(self, hosts: Hosts, shelf: Shelf, held: HeldCopies) -> None:
        self._hosts, self.shelf, self._held = hosts, shelf, held

    def begin(self, asked: CopySnapshot, done: Done) -> None:
        """Have other hosts get copies of this host's part of a snapshot, which stays until `end`."""
        snapshot = self.shelf.begin_copying((asked.step, asked.name))
        if snapshot is None:
            done("it is gone", 0)
            return
        future = self._hosts.start(self._copy(snapshot, asked))
        future.add_done_callback(lambda ended: _tell(ended, done))

    def end(self, named: Named, *, made: bool) -> None:
        """The parts of all hosts have their copies, or not all will."""
        self.shelf.end_copying(named, made=made)
        self.tidy()

    def tidy(self) -> None:
        """Give up the copies of what this host has given up itself. Nobody waits for the disk."""
        keep = partial(self._held.keep, self.shelf.named)
        threading.Thread(target=keep, name="jitckpt-copies", daemon=True).start()

    def forget(self) -> None:
        """No snapshot is of any use any more."""
        self._held.forget()

    async def _copy(self, snapshot: ProcessSnapshot, asked: CopySnapshot) -> tuple[str, int]:
        hosts, size, have, whys = self._hosts, 0, 0, list[str]()
        wanted = min(asked.copies, len(hosts.all) - 1)
        try:
            turn = in_turn(machines_of(hosts.all), hosts.index, wanted, asked.size)
            files = await asyncio.to_thread(files_of, snapshot)
        except (InvalidInput, OSError) as error:
            return str(error), 0
        for host in turn:
            if have == wanted:
                break
            try:
                size += await self._send(host, snapshot, files, asked.seconds)
                have += 1
            except DamagedSnapshot as error:
                self.shelf.forget_pages()  # it may be what is on this host's own disk
                whys.append(f"{hosts.name(host)}: {str(error).removesuffix('.')}")
            except (LinkError, OSError) as error:
                whys.append(f"{hosts.name(host)}: {str(error).removesuffix('.')}")
        return ("" if have == wanted else "; ".join(whys)), size

    async def _send(
        self, host: int, snapshot: ProcessSnapshot, files: Sequence[PartFile], seconds: float
    ) -> int:
        """Return the bytes that were sent. Raises DamagedSnapshot, LinkError or OSError."""
        who = self._hosts.name(host)
        async with self._hosts.visit(host, VISIT) as (reader, writer):
            put = PutSnapshot(self._hosts.index, snapshot.step, snapshot.name, list(files))
            writer.write(visiting.encode(put))
            said, _ = await visiting.answer(reader, who, PATIENCE, HasNot, VisitDone)
            if isinstance(said, VisitDone):
                return 0
            assert isinstance(said, HasNot)
            size = await send_part(writer, snapshot, files, said, seconds=seconds)
            patience = PATIENCE + sum(one.size for one in files) / SLOWEST_DISK
            end, _ = await visiting.answer(reader, who, patience, VisitDone, CameDamaged)
            if isinstance(end, CameDamaged):
                raise DamagedSnapshot(end.why)
            return size


def _tell(ended: "Future[tuple[str, int]]", done: Done) -> None:
    if ended.cancelled():  # the start is over
        return
    error = ended.exception()
    if error is None:
        done(*ended.result())
    else:  # who waits for the copies has to hear of it
        done(f"it has failed: {error!r}", 0)


def machines_of(hosts: Collection[Host]) -> list[Machine]:
    """Return all hosts as what a part can be placed on."""
    domains = in_use([one.domains for one in hosts], [one.domains_by for one in hosts])
    room = [one.room << 20 or float("inf") for one in hosts]
    return [Machine(*of_host) for of_host in zip(domains, room, strict=True)]


async def fetch(
    hosts: Hosts, holder: int, folder: Path, snapshot: ProcessSnapshot
) -> tuple[ProcessSnapshot, int]:
    """Fetch this host's part of a snapshot into its folder; return it and its bytes.

    Raises LinkError, OSError, or DamagedSnapshot.
    """
    who = hosts.name(holder)
    async with hosts.visit(holder, VISIT) as (reader, writer):
        writer.write(visiting.encode(WantSnapshot(hosts.index, snapshot.step, snapshot.name)))
        said, _ = await visiting.answer(reader, who, PATIENCE, ItsFiles)
        coming = ComingPart(folder, snapshot.step, snapshot.name, said.files)
        try:
            await asyncio.to_thread(coming.begin)
            lacking = [(one.rank, one.image) for one in coming.lacking]
            writer.write(visiting.encode(HasNot(lacking, packing.can_pack())))
            size = await receive_files(reader, writer, coming.opened, PATIENCE)
            return await asyncio.to_thread(coming.finish), size
        finally:
            coming.drop()
