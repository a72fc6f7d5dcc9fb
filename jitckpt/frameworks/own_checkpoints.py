"""Checkpoints of a framework's own that the script loads before its training begins.

Where every start loads the same one, a restart goes on from jitckpt's save of later. A script that looks for
its newest one loads another in a restart, and begins its loops where that says: no save of jitckpt's fits
these, so such a start is left to it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from jitckpt.frameworks import notes
from jitckpt.worker import agreements, frames

FILE = "loaded_by_script.json"
LEFT_TO_IT = (
    "the script has gone on from its own checkpoint ({method}), and the start before had not, or from "
    "another. Its loops begin where that says, which no save in {root} fits: nothing is restored from there, "
    "and nothing is protected. `jitckpt run --no-frameworks` leaves all starts to the script; to have "
    "jitckpt bring it back, start it so that it looks for no checkpoints of its own."
)
NOT_PROTECTED = "a restart in which the script goes on from its own checkpoint ({method})"

_loaded: list[str] = []  # in this start, and before its training began


def loaded(folder: str | os.PathLike[str]) -> None:
    """The script has loaded what lies there."""
    _loaded.append(repr(sorted(_files_in(folder))))


def _files_in(folder: str | os.PathLike[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the files there, each with its size and time; another rank may be removing some of them."""
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                file = os.stat(os.path.join(path, name))
                yield os.path.relpath(os.path.join(path, name), folder), file.st_size, file.st_mtime_ns


def are_others(root: Path) -> bool:
    """Whether the script has loaded others than in the start that has begun the job there; for all ranks."""
    file = root / FILE
    before = notes.read(file) or []
    said: list[bool] = agreements.all_say(before != _loaded)
    return said[0]  # hosts may have copies


def keep(root: Path, rank: int) -> None:
    """The job begins there, with what the script has loaded."""
    file = root / FILE
    if rank == 0 and (_loaded or file.exists()):
        notes.write(file, _loaded)


def left_out(frame: FrameType | None, method: str) -> str:
    """Return what is not protected, where the script's own code calls the method."""
    codes = [one.f_code for one in frames.scripts_frames(frame)]
    named = any(method in code.co_names for outer in codes for code in _inside(outer))
    return NOT_PROTECTED.format(method=method) if named else ""


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inside(one)
