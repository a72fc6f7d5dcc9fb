"""Saves every so many steps, or when asked to, while the training goes on: for when no replica is left.

A thread writes the files, in the format of all saves. Where the memory tier has a snapshot of the same step
it is written from that, and nothing is copied off the device for it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import JitckptError
from jitckpt.saves import folders, layout, starts
from jitckpt.saves.folders import KeptSaves, SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import HostState, Shared
from jitckpt.wire import protocol
from jitckpt.worker.saving.beside import Begun, BesideTraining
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.saver import as_it_is
from jitckpt.worker.saving.snapshots import Snapshots
from jitckpt.worker.saving.waiting import wait_in_device_calls

# So long the training waits for the file system: for the save before to be written, or a spoilt one to be
# removed.
PATIENCE_SECONDS = 30.0
REASON = "periodic"
FROM_MEMORY = 0  # in the place of a number of copies, which begin with 1


@dataclass(frozen=True)
class PeriodicSettings:
    """every: steps between saves, if any. keep: whole steps that stay. replica: write what replicas share."""

    every: int | None
    keep: int
    replica: bool


class PeriodicSaver(BesideTraining):
    """Saves to files."""

    def __init__(
        self,
        settings: PeriodicSettings,
        *,
        root: Path,
        identity: Identity,
        host: HostState,
        history: History,
        wanted_step: Callable[[], int],
        write_word: Callable[[int, int, int], None],
        report: Callable[[protocol.WorkerMessage], None],
        warn: Callable[[str], None],
        snapshots: Snapshots | None = None,
        nothing_before: Callable[[], bool] = lambda: False,
    ) -> None:
        """wanted_step: after which step the agent wants a save as well. snapshots: whose turn is before it.

        nothing_before: whether no step of the job was ever saved whole.
        write_word(address, value, stream): have the device write 8 bytes in the order of the stream.
        """
        super().__init__(
            host,
            history,
            HostCopies(host.device, write_word),
            replica=settings.replica,
            reason=REASON,
            warn=warn,
        )
        self._settings, self._root, self._identity = settings, root, identity
        self._wanted_step, self._report = wanted_step, report
        self._snapshots = snapshots if settings.replica else None
        self._kept = KeptSaves(root, identity)
        self._is_given_up = False  # the save that is being written is not waited for any more
        self._cancelled = -1  # the newest step whose save is not to be
        self._ending = threading.Lock()  # a save is committed or cancelled
        self._committed: Path | None = None  # the newest
        self._nothing_before = nothing_before
        self.has_saved = False  # its part of a step, once

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        every = self._settings.every
        return (every is not None and step % every == 0) or step == self._wanted_step()

    def _may_begin(self, step: int) -> bool:
        if not self.wait():
            return False
        self._committed = None
        return True

    def _copy(self, step: int, own: Mapping[str, Tensor], shared: Shared) -> tuple[int, dict[str, Tensor]]:
        if self._snapshots is not None and self._snapshots.is_made_of(step):
            return FROM_MEMORY, {}
        return super()._copy(step, own, shared)

    def copy_again(self, shared: Shared) -> None:
        if self._begun is not None and self._begun.number != FROM_MEMORY:  # the snapshot is copied again
            super().copy_again(shared)

    def settled(self, step: int) -> None:
        begun, snapshots = self._begun, self._snapshots
        if begun is None:
            return
        is_from_memory = (begun.step, begun.number) == (step, FROM_MEMORY)
        if is_from_memory and snapshots is not None:
            snapshots.hold(step)
        super().settled(step)
        if is_from_memory and snapshots is not None and self._writer is None:
            snapshots.hold(None)

    def cancel(self, step: int) -> None:
        if self._newest == step != self._cancelled:
            self._begun, self._cancelled = None, step
            remover = threading.Thread(target=self._remove, args=(step,), daemon=True)
            remover.start()
            remover.join(PATIENCE_SECONDS)  # the file system may block
            self._warn(
                f"The periodic save of step {step} was given up: the script changed parameters or "
                "optimizer state, outside of the optimizer step, while they were copied."
            )

    def _remove(self, step: int) -> None:
        with self._ending:
            if self._committed is not None and self._newest == step:
                with suppress(OSError):
                    if not starts.is_superseded(self._root, self._identity.start):
                        folders.remove(self._committed)
                self._kept.forget(step)

    def wait(self) -> bool:
        # Not for ever: the file system may block.
        until = time.monotonic() + (0.0 if self._is_given_up else PATIENCE_SECONDS)
        if not wait_in_device_calls(self._host.device, self._is_written, until):
            if not self._is_given_up:
                self._is_given_up = True
                self._warn(
                    f"The periodic save of step {self._newest} is not written after {PATIENCE_SECONDS:g} s "
                    f"more: the file system of {self._root} is too slow, or does not answer. The training "
                    "goes on without periodic saves until it is written."
                )
            return False
        self._writer, self._is_given_up = None, False
        return True

    def _is_written(self) -> bool:
        return self._writer is None or not self._writer.is_alive()

    def _write(self, begun: Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        kind: layout.Kind = "rank" if self._settings.replica else "local"
        saver: layout.SaverName = "builtin" if self._settings.replica else "ring"
        try:
            if begun.number == FROM_MEMORY and self._snapshots is not None:
                state = self._snapshots.read(begun.step, self._stopping)
                document, tensors = {**state.document, "reason": REASON}, state.tensors
            elif not self._are_there(begun):
                return
            with SaveFolder(
                self._root,
                as_it_is(self._identity, self._host),
                begun.step,
                kind,
                saver,
                by=REASON,
                nothing_before=self._nothing_before(),
            ) as folder:
                folder.add_tensors(layout.TENSORS_FILE, tensors)
                folder.add_json(layout.STATE_FILE, document)
                with self._ending:
                    if begun.step == self._cancelled:
                        return
                    path, size = folder.commit()
                    if begun.step == self._cancelled:
                        if not starts.is_superseded(self._root, self._identity.start):
                            folders.remove(path)
                        return
                    self._committed, self.has_saved = path, True
            self._kept.remove_old(self._settings.keep)  # whoever is the last one sees the step whole
        except (JitckptError, OSError) as error:
            self._warn(f"The periodic save of step {begun.step} failed, and the training goes on: {error}")
            return
        rank, shard, seconds = self._identity.rank, self._identity.shard, time.monotonic() - begun.began
        of_shard = self._settings.replica
        self._report(protocol.PeriodicSave(rank, shard, begun.step, str(path), size, seconds, of_shard))
