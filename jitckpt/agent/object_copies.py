"""The agent's side of the object store: what it lacks comes from there, and a process copies what is saved.

That process has its own interpreter, is nice, and nobody waits for it but the job's end.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jitckpt.console import say, show_size
from jitckpt.events import EventLog
from jitckpt.objects.bucket import Bucket
from jitckpt.objects.saves import ObjectSaves
from jitckpt.saves import folders
from jitckpt.saves.starts import Start
from jitckpt.wire.beside import FROM_COPIER, AllCopied, CopiedSave, CopyProblem, message_of
from jitckpt.wire.checked import ProtocolError

KEPT_STEPS = 2
ENDING_SECONDS = 5.0  # for a process that was told to end at once


@dataclass(frozen=True)
class WantedObjects:
    """deadline: seconds that the job's end waits for what is not copied yet."""

    url: str
    deadline: float


def newest_start(wanted: WantedObjects) -> int:
    """Return the number of the newest start that has begun there, 0 for none. Raises ObjectsError."""
    return ObjectSaves(Bucket(wanted.url)).starts().newest


def fetch(
    wanted: WantedObjects,
    directory: Path,
    ranks: Collection[int],
    log: EventLog,
    start: Start,
    *,
    world_size: int,
) -> None:
    """Copy back what these ranks lack to go on, and fence off those of earlier starts.

    world_size: ranks of the job; where others saved it, each needs all shards, to cut its own out of them.
    Raises JitckptError if it can't be known what they lack, or the job has gone on without this host.
    """
    saves = ObjectSaves(Bucket(wanted.url), start)
    saves.note_begun()
    fetched = saves.fetch(directory, ranks, world_size)
    if fetched is not None:
        log.write("fetched_from_objects", **asdict(fetched))
        say(f"step {fetched.step} has come from {wanted.url}: {show_size(fetched.bytes)}.")


def lacks_all(directory: Path) -> bool:
    """Return whether a directory has no finished save."""
    return not any(record.finished for record in folders.find(directory))


class ObjectCopies:
    """The process that copies this host's saves, over all starts of the workers. some: it has copied one."""

    def __init__(self, wanted: WantedObjects, directory: Path, ranks: Collection[int], log: EventLog) -> None:
        self._wanted, self._log = wanted, log
        self.ranks = frozenset(ranks)
        self.some = False
        self._ended = threading.Event()
        self._problem = ""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jitckpt.objects.copier"),
                *(wanted.url, str(directory), str(KEPT_STEPS), *map(str, sorted(ranks))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._hear, name="jitckpt-objects", daemon=True)
        self._reader.start()

    def begin(self, start: Start) -> None:
        """Tell the process that a start begins, whose it is from now on."""
        self._tell(f"start {start}".strip())

    def finish(self) -> None:
        """Wait until all is copied, for as long as was said; end the process."""
        self._tell("end")
        self._reader.join(self._wanted.deadline)
        if not self._ended.is_set():
            why = f": {self._problem}" if self._problem else ""
            text = f"not all that is saved is in {self._wanted.url} yet, the next start copies the rest{why}"
            self._log.write("warning", text=text)
            say(f"{text.rstrip('.')}.")
        self.close()

    def close(self) -> None:
        """End the process at once."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is told at the job's end
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = message_of(FROM_COPIER, line)
            except ProtocolError as error:
                self._log.write("warning", text=f"what copies saves says what makes no sense: {error}")
                continue
            match said:
                case CopiedSave(step):
                    self._problem = ""
                    self._log.write("copied_to_objects", **asdict(said))
                    if not self.some:
                        self.some = True
                        say(f"what is saved is copied to {self._wanted.url}, beginning with step {step}.")
                case CopyProblem(problem):
                    self._problem = problem
                    self._log.write("warning", text=problem)
                    say(f"nothing is copied to {self._wanted.url} for now: {problem}")
                case AllCopied():
                    self._ended.set()
