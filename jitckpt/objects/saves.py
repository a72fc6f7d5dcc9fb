"""Saves in a bucket: the same files under the same names as in a checkpoint directory, metadata.json last.

So a save is there whole or not at all, and what is copied back by any program is a checkpoint directory.

A host that was cut off may reach the store when the job has gone on without it. As in a directory
(saves/starts.py) each start is noted there before it writes, and from which step it has gone on; whoever
writes or removes looks first whether a later one is noted, and what lands all the same is refused by those
who read, as it is of a start that a later one has gone on without.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jitckpt.errors import CheckpointError, SaveError
from jitckpt.hosts.fetch import wanted
from jitckpt.objects.bucket import Bucket, DamagedObject
from jitckpt.saves import folders, layout, starts
from jitckpt.saves.folders import HashedFile, SaveFolder, SaveRecord
from jitckpt.saves.layout import FileEntry, Kind, Metadata
from jitckpt.saves.starts import Start, Starts
from jitckpt.system import regular_file

AT_ONCE = 8  # metadata that are asked for
TRIES = 2  # with a file that comes damaged: on the way, or there

Key = tuple[int, Kind, int]  # step, kind and rank of a save


@dataclass(frozen=True)
class Uploaded:
    """A save that was copied: its bytes, and those that an earlier try had brought there already."""

    bytes: int
    there: int


@dataclass(frozen=True)
class Downloaded:
    """What has come: saves of this step, and their bytes."""

    step: int
    saves: int
    bytes: int


class ObjectSaves:
    """The saves of one job in a bucket. start: which writes; without a number nobody is fenced off."""

    def __init__(self, bucket: Bucket, start: Start = Start()) -> None:  # noqa: B008
        self.bucket, self.start = bucket, start

    def starts(self) -> Starts:
        """Return which starts are noted there."""
        names = self.bucket.sizes(f"{starts.FOLDER}/")
        return starts.of_names(name.removeprefix(f"{starts.FOLDER}/") for name in names)

    def check(self) -> None:
        """Raise Superseded if a later start than this one has begun."""
        if self.start.number:
            starts.check_newest(self.starts().newest, self.start.number, self.bucket.url)

    def note_begun(self) -> None:
        """Note that the start begins. Raises Superseded if a later one, or another of this number, has."""
        if self.start.number == 0:
            return
        self.check()
        key = f"{starts.FOLDER}/{starts.begun_name(self.start.number)}"
        if not self.bucket.put_new(key, self.start.document()):
            raise starts.other_start(f"{self.bucket.url}/{key}", self.start)

    def note_going_on(self, number: int, step: int) -> None:
        """Note from which step a start has gone on."""
        self.bucket.put_new(f"{starts.FOLDER}/{starts.went_on_name(number, step)}", b"")

    def claim(self, job: str) -> None:
        """Let the place be of this job. Raises CheckpointError if it is of another one."""
        known = self.job()
        if known is None:
            document = f'{{"format": {layout.FORMAT}, "job": "{job}"}}'
            self.bucket.put(layout.JOB_FILE, document.encode())
        elif known != job:
            raise CheckpointError(
                f"{self.bucket.url} holds saves of another job ({known} instead of {job}): name another "
                "prefix."
            )

    def job(self) -> str | None:
        """Return whose saves are there, None if nobody has claimed the place."""
        if layout.JOB_FILE not in self.bucket.sizes(layout.JOB_FILE):
            return None
        job = layout.parse_object(
            self.bucket.get(layout.JOB_FILE), f"{self.bucket.url}/{layout.JOB_FILE}"
        ).get("job")
        if not isinstance(job, str) or not job:
            raise SaveError(f"{self.bucket.url}/{layout.JOB_FILE} has no job id: name another prefix.")
        return job

    def files(self) -> dict[Key, dict[str, int]]:
        """Return of each save the files that are there, with their bytes."""
        found: dict[Key, dict[str, int]] = {}
        for name, size in self.bucket.sizes("step-").items():
            step, _, rest = name.partition("/")
            rank, _, file = rest.partition("/")
            number, parsed = layout.parse_step_folder(step), layout.parse_rank_folder(rank)
            inside = not any(part in ("", ".", "..") for part in file.split("/"))
            if number is not None and parsed is not None and inside:
                found.setdefault((number, *parsed), {})[file] = size
        return found

    def metadata(self, key: Key) -> Metadata:
        """Return what a save says of itself. Raises SaveError for nonsense."""
        return layout.parse_metadata(self.bucket.get(name_of(key, layout.METADATA_FILE)))

    def upload(self, record: SaveRecord) -> Uploaded | None:
        """Copy a save; None if it is gone meanwhile, or another one came. Raises SaveError if it is damaged.

        Raises Superseded if the job has gone on without this process.
        """
        key: Key = (record.step, record.kind, record.rank)
        if record.metadata is None:
            raise SaveError(record.problem or f"{record.path} has no metadata.")
        try:
            own = regular_file.content_of(record.path / layout.METADATA_FILE)
            self.remove(key)
            total = there = 0
            for file in record.metadata.files:
                if (record.path / file.name).stat().st_size != file.size:
                    raise SaveError(f"{record.path / file.name} is damaged, and is not copied.")
                there += self.bucket.put_file(
                    name_of(key, file.name), record.path / file.name, _Checked(record, file)
                )
                total += file.size
        except FileNotFoundError:
            return None  # it was old, or another one has taken its place
        except OSError as error:
            raise SaveError(f"{record.path} can't be read: {error.strerror}.") from error
        self.check()
        name = name_of(key, layout.METADATA_FILE)
        if self.start.number == 0:
            self.bucket.put(name, own)
        elif not self.bucket.put_new(name, own):  # another process has been there since it was removed
            self.check()
            return None
        return Uploaded(total + len(own), there)

    def remove(self, key: Key, files: Collection[str] = ()) -> None:
        """Remove these files of a save; what makes it whole goes first. Raises Superseded."""
        self.check()
        self.bucket.delete(name_of(key, name) for name in (layout.METADATA_FILE, *files))

    def fetch(
        self, directory: Path, ranks: Collection[int], world_size: int | None = None
    ) -> Downloaded | None:
        """Copy back what these ranks lack in the directory to go on from the newest step; None for nothing.

        world_size: as for `wanted`.

        What comes damaged is passed over, for a replica's save or an older step. The directory is told where
        the starts went on that are noted there.
        """
        known = self.starts()
        starts.note_of_others(directory, sorted(known.went_on_from.items()))
        here = [record.metadata for record in folders.find(directory) if record.metadata]
        there = list(self._newest_whole())
        sizes: list[int] = []
        while needed := wanted({0: here, 1: there}, 0, ranks, world_size=world_size):
            folders.open_directory(directory, needed[0].save.identity.job)
            for save in (one.save for one in needed):
                try:
                    sizes.append(self._take(save, directory))
                    here.append(save)
                except _Damaged:
                    there.remove(save)
                    break
        return Downloaded(here[-1].step, len(sizes), sum(sizes)) if sizes else None

    def whole_steps(self, files: Mapping[Key, Collection[str]]) -> Iterator[tuple[int, list[Metadata]]]:
        """Yield the steps of which every shard is there, newest first, with what its saves say."""
        steps: dict[int, list[Key]] = {}
        noted = self.starts()
        for key in files:
            if layout.METADATA_FILE in files[key]:
                steps.setdefault(key[0], []).append(key)
        for step in sorted(steps, reverse=True):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                known = list(pool.map(self._known, sorted(steps[step])))
            found = [one for one in known if one and noted.problem(one.identity.start, one.step) is None]
            shards = {one.identity.shard for one in found if one.kind == "rank"}
            if shards and len(shards) == max(one.identity.shards for one in found if one.kind == "rank"):
                yield step, found

    def _newest_whole(self) -> Sequence[Metadata]:
        # All of them: where one is damaged, the older one is there.
        return [save for _, saves in self.whole_steps(self.files()) for save in saves]

    def _known(self, key: Key) -> Metadata | None:
        try:
            return self.metadata(key)
        except SaveError:  # it is not whole
            return None

    def _take(self, save: Metadata, directory: Path) -> int:
        key: Key = (save.step, save.kind, save.identity.rank)
        of = save.identity
        # Into a directory that has nothing, and so nothing that others could have gone on with.
        with SaveFolder(directory, of, save.step, save.kind, save.saver, by="objects", start=0) as folder:
            for file in save.files:
                path = folder.path / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not any(self._comes_whole(name_of(key, file.name), path, file) for _ in range(TRIES)):
                    raise _Damaged(f"{self.bucket.url}/{name_of(key, file.name)} is damaged.")
                folder.add_checked(file)
            return folder.commit()[1]

    def _comes_whole(self, key: str, path: Path, file: FileEntry) -> bool:
        path.unlink(missing_ok=True)
        with HashedFile(path) as copy:
            try:
                for piece in self.bucket.read(key):
                    copy.write(piece)
            except DamagedObject:
                return False
        return FileEntry(file.name, copy.size, copy.checksum) == file


class _Damaged(SaveError):
    """What came is not what was saved."""


class _Checked:
    """Is shown a file as it goes: raises SaveError at its end unless it is what the save says."""

    def __init__(self, record: SaveRecord, file: FileEntry) -> None:
        self._record, self._file = record, file
        self._hash, self._size = xxhash.xxh3_128(), 0

    def __call__(self, data: bytes) -> None:
        self._hash.update(data)
        self._size += len(data)
        if self._size >= self._file.size and self._hash.hexdigest() != self._file.checksum:
            raise SaveError(f"{self._record.path / self._file.name} is damaged, and is not copied.")


def name_of(key: Key, file: str) -> str:
    step, kind, rank = key
    return f"{layout.step_folder(step)}/{layout.rank_folder(kind, rank)}/{file}"
