"""The copies that this host has of other hosts' parts of snapshots, in its own checkpoint directory.

Each host's lie in a folder of their own, which is as that host's own one is (shelf.py).
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.image_receiver import receive_files
from jitckpt.agent.migration.image_transfer import PIECE, Pace, send_file
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.pages import BLOCK, Pages
from jitckpt.agent.migration.shelf import (
    HOST,
    INDEX,
    PAGES,
    UNFINISHED,
    DamagedSnapshot,
    ProcessSnapshot,
    left,
    of_hosts,
    snapshot_path,
    told_of,
)
from jitckpt.agent.migration.snapshot_parts import ComingPart, files_of, opened
from jitckpt.decisions import copied_snapshots
from jitckpt.decisions.copied_snapshots import Copied
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.hosts import visiting
from jitckpt.hosts.link import LinkError
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.moves import Whole
from jitckpt.wire.visits import (
    CameDamaged,
    HasNot,
    ItsFiles,
    PartFile,
    PutSnapshot,
    Refused,
    VisitDone,
    WantSnapshot,
)

FOLDER = "copies-of-snapshots"
VISIT = "snapshots"  # what an agent says that brings some, or wants some
PATIENCE = 60.0  # seconds for a word, or a piece
LOOK_SECONDS = 0.1  # between two looks whether another one has ended


class HeldCopies:
    """Of one launcher, over all starts of its ranks. It is used by several threads."""

    def __init__(self, directory: Path) -> None:
        """directory: this host's, for checkpoints."""
        self._directory, self._folder = directory, directory / FOLDER
        self._lock = threading.Lock()  # never held while a disk is waited for
        self._held: dict[Copied, ProcessSnapshot] = {}
        self._busy: set[int] = set()  # hosts in whose folders something comes or goes
        self._forgets = 0  # how often all were given up
        for folder in of_hosts(self._folder):
            for path in folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
            for one in left(folder):
                try:
                    name = str(told_of(one)["name"])
                except (DamagedSnapshot, KeyError):
                    continue  # it goes with the next one that is whole
                self._held[int(folder.name.removeprefix(HOST)), one.step, name] = one
            _give_back(folder)
        self._left = frozenset(self._held)

    @property
    def held(self) -> tuple[Copied, ...]:
        """Which there are."""
        with self._lock:
            return tuple(sorted(self._held))

    @property
    def bytes_on_disk(self) -> int:
        """What they take there. Raises OSError."""
        return sum(path.stat().st_blocks * BLOCK for path in self._folder.rglob("*"))

    def keep(self, named: Collection[Named]) -> None:
        """Give up those of other snapshots than these, which are whole on all hosts, and of what may come.

        Where one of a host's comes just now, its older ones stay until the next time.
        """
        for folder in of_hosts(self._folder):
            place = int(folder.name.removeprefix(HOST))
            if not self._begins(place):
                continue
            try:
                with self._lock:
                    of_host = [one for one in self._held if one[0] == place]
                    for copied in copied_snapshots.given_up(of_host, self._left, named):
                        del self._held[copied]
                    stay = {one.path for one in self._held.values()}
                for one in left(folder):
                    if one.path not in stay:
                        shutil.rmtree(one.path, ignore_errors=True)
                _give_back(folder)
            finally:
                self._ends(place)

    def forget(self) -> None:
        """None is of any use any more, nor what comes just now."""
        with self._lock:
            self._held.clear()
            self._forgets += 1
        shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(
        self, reserve: Callable[[], int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take a copy from another host, or give it one. Raises LinkError at the connection's end.

        reserve: how many bytes of the disk this host needs for its own next snapshot.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                said, _ = await visiting.hear(reader, PutSnapshot, WantSnapshot)
            match said:
                case PutSnapshot():
                    await self._take(said, reserve, reader, writer)
                case WantSnapshot():
                    await self._give(said, reader, writer)
        except (OSError, ProtocolError, LinkError, DamagedSnapshot) as error:
            strerror = error.strerror if isinstance(error, OSError) else None
            writer.write(visiting.encode(Refused(strerror or str(error) or "it takes too long")))
        await writer.drain()
        while await asyncio.wait_for(reader.read(PIECE), PATIENCE):
            pass  # who still sends reads the answer after that

    # What comes.

    async def _take(
        self,
        put: PutSnapshot,
        reserve: Callable[[], int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        copied = (put.place, put.step, put.name)
        if copied in self.held:
            writer.write(visiting.encode(VisitDone()))
            return
        if await asyncio.to_thread(self._is_own, put):
            raise LinkError("it has the same checkpoint directory")
        async with asyncio.timeout(PATIENCE):
            while not self._begins(put.place):  # what came in the start before ends, or older ones go
                await asyncio.sleep(LOOK_SECONDS)
        forgets, folder = self._forgets, self._folder / f"{HOST}{put.place}"
        coming = ComingPart(folder, put.step, put.name, put.files)
        try:
            await asyncio.to_thread(lambda: coming.begin(reserve()))
            lacking = [(one.rank, one.image) for one in coming.lacking]
            writer.write(visiting.encode(HasNot(lacking, packing.can_pack())))
            await receive_files(reader, writer, coming.opened, PATIENCE)
            snapshot = await asyncio.to_thread(coming.finish)
            with self._lock:
                if self._forgets == forgets:
                    self._held[copied] = snapshot
            if copied not in self.held:
                await asyncio.to_thread(shutil.rmtree, snapshot.path, ignore_errors=True)
                raise LinkError("all snapshots were given up meanwhile")
            writer.write(visiting.encode(VisitDone()))
        except DamagedSnapshot as error:
            writer.write(visiting.encode(CameDamaged(str(error))))
        finally:
            # Not waited for: this may be cancelled, and a disk takes its time.
            asyncio.get_running_loop().run_in_executor(None, self._drop, put.place, coming)

    def _begins(self, place: int) -> bool:
        """Return whether this host's folder is the caller's from now on, until `_ends`."""
        with self._lock:
            if place in self._busy:
                return False
            self._busy.add(place)
            return True

    def _drop(self, place: int, coming: ComingPart) -> None:
        coming.drop()
        self._ends(place)

    def _ends(self, place: int) -> None:
        with self._lock:
            self._busy.discard(place)

    def _is_own(self, put: PutSnapshot) -> bool:
        """Return whether the very part lies in this host's directory."""
        path = snapshot_path(self._directory / f"{HOST}{put.place}", put.step)
        try:
            return bool(told_of(ProcessSnapshot(path, put.step))["name"] == put.name)
        except (DamagedSnapshot, KeyError):
            return False

    # What goes.

    async def _give(
        self, want: WantSnapshot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with self._lock:
            snapshot = self._held.get((want.place, want.step, want.name))
        if snapshot is None:
            raise LinkError("it has no such copy any more")
        files = await asyncio.to_thread(files_of, snapshot)
        writer.write(visiting.encode(ItsFiles(files)))
        async with asyncio.timeout(PATIENCE):
            has_not, _ = await visiting.hear(reader, HasNot)
        await send_part(writer, snapshot, files, has_not)


async def send_part(
    writer: asyncio.StreamWriter,
    snapshot: ProcessSnapshot,
    files: Collection[PartFile],
    has_not: HasNot,
    *,
    seconds: float = 0.0,
) -> int:
    """Send the files of a part that the other side has not, and return their bytes.

    seconds: over which they may be spread. Raises LinkError or OSError.
    """
    lacking = set(has_not.files)
    pace = Pace(sum(one.bytes for one in files if (one.rank, one.image) in lacking), seconds)
    packer = Packer(has_not.packs and packing.can_pack())
    size = 0
    for one in files:
        if (one.rank, one.image) in lacking:
            file = await asyncio.to_thread(opened, snapshot, one)
            try:
                size += await send_file(
                    writer, one.rank, one.image, file, packer, patience=PATIENCE, pace=pace
                )
            finally:
                os.close(file)
    writer.write(visiting.encode(Whole()))
    return size


def _give_back(folder: Path) -> None:
    """Give pages back to the disk that none of these has any more."""
    indexes = [path for one in left(folder) for path in one.path.glob(f"rank-*/*{INDEX}")]
    try:
        Pages(folder / PAGES).keep(indexes)
    except OSError:  # they can't be read, so nothing of them is given back
        return
