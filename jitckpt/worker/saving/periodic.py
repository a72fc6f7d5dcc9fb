"""Saves every so many steps, or when asked to, while the training goes on: for when no replica is left.

What the step has left on the device is copied into host memory beside the training (host_copies.py). A thread
writes the files, in the format of all saves. It makes no device call.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import JitckptError
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import KeptSaves, SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import HostState, Shared
from jitckpt.wire import protocol
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.saver import document_of

LOOK_SECONDS = 0.01
# So long the training waits for the file system: for the save before to be written, or a spoilt one to be
# removed.
PATIENCE_SECONDS = 30.0
REASON = "periodic"


@dataclass(frozen=True)
class Settings:
    """every: steps between saves, if any. keep: whole steps that stay. replica: write what replicas share."""

    every: int | None
    keep: int
    replica: bool


@dataclass(frozen=True)
class _Begun:
    """A save whose copies are under way: what the host held then, and the copies by name."""

    number: int  # of the copies
    step: int
    local: dict[str, Json]
    on_host: dict[str, Tensor]
    own: dict[str, Tensor]  # what this rank alone knows, on the device
    copies: dict[str, Tensor]
    shared: Shared
    began: float


class PeriodicSaver:
    """Called by the training thread alone; one save at a time."""

    def __init__(
        self,
        settings: Settings,
        *,
        root: Path,
        identity: Identity,
        host: HostState,
        history: History,
        wanted_step: Callable[[], int],
        write_word: Callable[[int, int, int], None],
        report: Callable[[protocol.Message], None],
        warn: Callable[[str], None],
    ) -> None:
        """wanted_step: after which step the agent wants a save as well.

        write_word(address, value, stream): have the device write 8 bytes in the order of the stream.
        """
        self._settings, self._root, self._identity = settings, root, identity
        self._host, self._history, self._wanted_step = host, history, wanted_step
        self._report, self._warn = report, warn
        self._kept = KeptSaves(root, identity)
        self._is_given_up = False  # the save that is being written is not waited for any more
        self._copies = HostCopies(host.device, write_word)
        self._begun: _Begun | None = None
        self._newest = -1  # the step that was saved last
        self._cancelled = -1  # the newest step whose save is not to be
        self._ending = threading.Lock()  # a save is committed or cancelled
        self._committed: Path | None = None  # the newest
        self._writer: threading.Thread | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        every = self._settings.every
        return (every is not None and step % every == 0) or step == self._wanted_step()

    def step_ended(self, step: int, parts: Mapping[str, Encoded], shared: Shared) -> None:
        """Begin to copy the state after `step`, which is due; waits a while for the last save."""
        if not self.wait():
            return
        tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        own = {name: tensor for name, tensor in tensors.items() if name not in on_host}
        common: dict[str, Tensor] = {}
        if self._settings.replica:
            common = shared.tensors()
        local = {
            "final": True,
            "trees": {name: part.tree for name, part in parts.items()},
            "missing": [],
            "left_out": [],
        }
        number, copies = self._copies.begin(own, common)
        self._begun = _Begun(number, step, local, on_host, own, copies, shared, time.monotonic())
        self._newest, self._committed = step, None

    def is_pending(self, step: int) -> bool:
        """Whether the state after `step` is being copied, and not yet given to the writer."""
        return self._begun is not None and self._begun.step == step

    def copy_again(self, shared: Shared) -> None:
        """Copy anew what is being copied: it was changed after its step, and is as it ought to be now."""
        begun = self._begun
        if begun is not None and self._settings.replica:
            number, copies = self._copies.begin(begun.own, shared.tensors())
            self._begun = replace(begun, number=number, copies=copies, shared=shared)

    def cancel(self, step: int) -> None:
        """The state after `step` was changed while it was copied: let there be no save of it."""
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
                folders.remove(self._committed)
                self._kept.forget(step)

    def step_begins(self) -> None:
        """Let the current stream wait for the copies: what it does next changes what they read."""
        self._copies.step_begins()

    def settled(self, step: int) -> None:
        """The host's state after `step` is complete: write it."""
        begun = self._begun
        if begun is None or begun.step != step:
            return
        self._begun = None
        snapshot = self._history.snapshot(step)
        if snapshot is None:
            self._warn(f"Step {step} was not saved: its state on the host is kept no more.")
            return
        document: dict[str, Json] = {"local": begun.local}
        tensors = begun.on_host | begun.copies
        if self._settings.replica:
            document, common = document_of(
                self._host, self._history, snapshot, step=step, reason=REASON, local=begun.local
            )
            tensors |= common
        self._writer = threading.Thread(
            target=self._write, args=(begun, document, tensors), name="jitckpt-periodic-save", daemon=True
        )
        self._writer.start()

    def wait(self) -> bool:
        """Wait until nothing is being written; return whether that is so, as the file system may block."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self._writer is not None and self._writer.is_alive():
            if self._is_given_up:
                return False
            if time.monotonic() > until:
                self._is_given_up = True
                self._warn(
                    f"The periodic save of step {self._newest} is not written after {PATIENCE_SECONDS:g} s "
                    f"more: the file system of {self._root} is too slow, or does not answer. The training "
                    "goes on without periodic saves until it is written."
                )
                return False
            self._writer.join(LOOK_SECONDS)
            # A device call, so that a save after a failure finds this thread held like any other.
            torch.cuda.current_stream(self._host.device).query()
        self._writer, self._is_given_up = None, False
        return True

    def _write(self, begun: _Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        """The writing thread: no exception leaves it, the training goes on without this save."""
        kind: layout.Kind = "rank" if self._settings.replica else "local"
        saver: layout.SaverName = "builtin" if self._settings.replica else "ring"
        try:
            while not self._copies.are_there(begun.number):
                time.sleep(LOOK_SECONDS)
            with SaveFolder(self._root, self._identity, begun.step, kind, saver, by=REASON) as folder:
                folder.add_tensors(layout.TENSORS_FILE, tensors)
                folder.add_json(layout.STATE_FILE, document)
                with self._ending:
                    if begun.step == self._cancelled:
                        return
                    path, size = folder.commit()
                    if begun.step == self._cancelled:
                        folders.remove(path)
                        return
                    self._committed = path
            self._kept.remove_old(self._settings.keep)  # whoever is the last one sees the step whole
        except (JitckptError, OSError) as error:
            self._warn(f"The periodic save of step {begun.step} failed, and the training goes on: {error}")
            return
        rank, shard, seconds = self._identity.rank, self._identity.shard, time.monotonic() - begun.began
        self._report(protocol.PeriodicSave(rank, shard, begun.step, str(path), size, seconds))
