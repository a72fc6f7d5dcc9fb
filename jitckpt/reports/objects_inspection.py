"""What lies in an object store: inspected as a checkpoint directory whose files are all as long as there.

Of a save's files only metadata.json is fetched; with checksums every byte is read, and none of it kept.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from jitckpt.errors import CheckpointError
from jitckpt.objects.bucket import Bucket, DamagedObject
from jitckpt.objects.saves import ObjectSaves, name_of
from jitckpt.reports import inspection
from jitckpt.reports.inspection import Inspection
from jitckpt.saves import folders, layout, starts
from jitckpt.saves.folders import SaveRecord


def bytes_to_read(url: str) -> int:
    """Return how many bytes `inspect` reads with checksums."""
    return sum(Bucket(url).sizes("step-").values())


def inspect(url: str, checksums: bool = False, on_read: Callable[[int], object] | None = None) -> Inspection:
    """Look at every save; on_read is told how many bytes were read. Raises JitckptError."""
    saves = ObjectSaves(Bucket(url))
    if saves.job() is None:
        raise CheckpointError(f"{url} holds no saves of jitckpt.")

    def verify(record: SaveRecord) -> str | None:
        problem = folders.verify(record, checksums=False)
        if problem is not None or record.metadata is None or not checksums:
            return problem
        for file in record.metadata.files:
            name = name_of((record.step, record.kind, record.rank), file.name)
            content = xxhash.xxh3_128()
            try:
                for piece in saves.bucket.read(name):
                    content.update(piece)
                    if on_read is not None:
                        on_read(len(piece))
            except DamagedObject as error:
                return str(error)
            if content.hexdigest() != file.checksum:
                return f"{url}/{name} is damaged: its checksum is not the one in {layout.METADATA_FILE}."
        return None

    with tempfile.TemporaryDirectory(prefix="jitckpt-inspect-") as folder:
        _lay_out(saves, Path(folder))
        found = inspection.inspect(Path(folder), checksums, verify=verify)
        renamed: Inspection = _renamed(found, folder, url)
        return renamed


def _lay_out(saves: ObjectSaves, folder: Path) -> None:
    """Make files without content, as long as those that are there, and with it those that tell of others."""
    (folder / layout.JOB_FILE).write_bytes(saves.bucket.get(layout.JOB_FILE))
    known = saves.starts()
    starts.note_of_others(folder, sorted(known.went_on_from.items()))
    for key, files in saves.files().items():
        for name, size in files.items():
            path = folder / name_of(key, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == layout.METADATA_FILE:
                path.write_bytes(saves.bucket.get(name_of(key, name)))
            else:
                path.touch()
                os.truncate(path, size)


def _renamed(value: Any, folder: str, url: str) -> Any:
    """Return the same, with the true place in all sentences."""
    if isinstance(value, str):
        return value.replace(folder, url)
    if isinstance(value, tuple):
        return tuple(_renamed(one, folder, url) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        new = {field.name: _renamed(getattr(value, field.name), folder, url) for field in fields(value)}
        return replace(value, **new)
    return value
