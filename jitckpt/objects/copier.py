"""A process that copies a host's saves into an object store, while the training goes on and beside its agent.

Arguments: the URL, the checkpoint directory, the steps to keep there, then this host's ranks. On its standard
output it says in a line each (wire/beside.py) what it has copied and what is wrong. On its standard input, a
line each: "start N R", a start of the job with this number and revision has begun here; "end": copy what is
there, and end. The end of the input: end at once. What is half copied then, the next one goes on with.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from jitckpt.errors import JitckptError, SaveError
from jitckpt.objects.bucket import Bucket
from jitckpt.objects.saves import Key, ObjectSaves, name_of
from jitckpt.saves import folders, layout, starts
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.starts import Start
from jitckpt.system import regular_file
from jitckpt.wire.beside import AllCopied, CopiedSave, CopyProblem, FromCopier, line_of
from jitckpt.wire.protocol import shortened

LOOK_SECONDS = 1.0
LONGEST_PAUSE = 60.0  # seconds between two tries with a store that does not answer
NICE = 10
MOST_TEXT = 4000  # characters of a problem

Say = Callable[[FromCopier], None]


class ObjectCopier:
    """Compares what is in a directory with what is in the store, and makes the store like it."""

    def __init__(
        self, saves: ObjectSaves, directory: Path, keep: int, ranks: Collection[int], say: Say
    ) -> None:
        self._saves, self._directory, self._keep, self._say = saves, directory, keep, say
        self._ranks = frozenset(ranks)
        self._copied: dict[Key, bytes] = {}  # with the metadata that it had
        self._damaged: set[Path] = set()
        self._looked = False  # what was in the store as this began is in `_copied`
        self._noted: set[tuple[int, int]] = set()  # where starts went on, as far as the store knows

    def begin(self, start: Start) -> None:
        """Be of this start from now on, and look again at what others have done there meanwhile."""
        if start != self._saves.start:
            self._saves.start = start
            self._looked = False

    def look(self) -> None:
        """Copy what is new, newest step first. Raises JitckptError if the store can't be used."""
        job = folders.read_job(self._directory)
        own = [
            record
            for record in folders.find(self._directory)
            if record.rank in self._ranks and record.metadata
        ]
        if job is None or not own:
            return
        if not self._looked:
            self._begin(job)
        self._note_starts()
        self._remove_after(max(record.step for record in own))
        copied = [self._copy(record) for record in own if record.path not in self._damaged]
        if any(copied):
            self._prune()

    def _begin(self, job: str) -> None:
        """See what is there of an earlier run."""
        self._saves.claim(job)
        self._saves.note_begun()
        self._copied.clear()
        for key, files in self._saves.files().items():
            if key[2] in self._ranks and layout.METADATA_FILE in files:
                self._copied[key] = self._saves.bucket.get(name_of(key, layout.METADATA_FILE))
        self._looked = True

    def _note_starts(self) -> None:
        """Tell the store where starts have gone on, before it has anything of them."""
        if self._saves.start.number:
            for number, step in sorted(starts.read(self._directory).went_on_from.items() - self._noted):
                self._saves.note_going_on(number, step)
                self._noted.add((number, step))

    def _remove_after(self, newest: int) -> None:
        """Remove what is of later steps: the job has gone on from an older one, and they are set aside."""
        for key in [key for key in self._copied if key[0] > newest]:
            self._saves.remove(key)
            del self._copied[key]

    def _copy(self, record: SaveRecord) -> bool:
        key: Key = (record.step, record.kind, record.rank)
        try:
            metadata = regular_file.content_of(record.path / layout.METADATA_FILE)
        except FileNotFoundError:
            return False
        if self._copied.get(key) == metadata:
            return False
        begun = time.monotonic()
        try:
            done = self._saves.upload(record)
        except starts.Superseded:
            raise
        except SaveError as error:
            self._damaged.add(record.path)
            self._say(CopyProblem(shortened(str(error), MOST_TEXT)))
            return False
        if done is not None:
            self._copied[key] = metadata
            seconds = time.monotonic() - begun
            self._say(CopiedSave(record.step, record.rank, record.kind, done.bytes, done.there, seconds))
        return done is not None

    def _prune(self) -> None:
        """Remove own saves that are older than the newest steps that are whole there."""
        steps = {key[0] for key in self._copied}
        if len(steps) <= self._keep:
            return
        files = self._saves.files()
        whole = [step for step, _ in self._saves.whole_steps(files)][: self._keep]
        if len(whole) < self._keep:
            return
        for key in [key for key in files if key[0] < whole[-1] and key[2] in self._ranks]:
            self._saves.remove(key, files[key])
            self._copied.pop(key, None)


def main() -> None:
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"):  # sent to all of the job; the agent decides
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    os.nice(NICE)
    url, directory, keep, *ranks = sys.argv[1:]
    ended, woken, lock = threading.Event(), threading.Event(), threading.Lock()
    newest = [Start()]

    def say(said: FromCopier) -> None:
        with lock:
            sys.stdout.buffer.write(line_of(said))
            sys.stdout.buffer.flush()

    def hear() -> None:
        for line in sys.stdin:
            if line.strip() == "end":
                ended.set()
            else:
                newest[0] = Start.parse(line.removeprefix("start"))
            woken.set()
        os._exit(1)  # the agent was killed, or waits no longer

    threading.Thread(target=hear, daemon=True).start()
    problem, pause = "", LOOK_SECONDS
    copier: ObjectCopier | None = None
    while True:
        woken.clear()
        last = ended.is_set()
        try:
            if copier is None:
                copier = ObjectCopier(
                    ObjectSaves(Bucket(url)), Path(directory), int(keep), [*map(int, ranks)], say
                )
            copier.begin(newest[0])
            copier.look()
            problem, pause = "", LOOK_SECONDS
            if last:
                say(AllCopied())
                return
        except JitckptError as error:
            if str(error) != problem:
                problem = str(error)
                say(CopyProblem(shortened(problem, MOST_TEXT)))
            pause = min(LONGEST_PAUSE, 2 * pause)
        woken.wait(pause) if not last else time.sleep(min(pause, LOOK_SECONDS * 4))


if __name__ == "__main__":
    main()
