"""Saves every so many steps, or when asked to, while the training goes on: for when no replica is left.

What the step has left on the device is copied into host memory on a stream of its own; the training's stream
waits for these copies before the next optimizer step, and not earlier. A thread writes the files, in the
format of all saves. It makes no device call: the device tells it, by a word, that the copies are there.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from jitckpt import layout, protocol, saves
from jitckpt.errors import JitckptError
from jitckpt.history import History
from jitckpt.host_state import HostState, Shared
from jitckpt.layout import Identity
from jitckpt.saver import document_of
from jitckpt.saves import SaveFolder
from jitckpt.tree_codec import Encoded, Json

LOOK_SECONDS = 0.01
ALIGNMENT = 16  # bytes; no element is wider
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

    number: int  # of the save, from 1
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
        self._write_word, self._report, self._warn = write_word, report, warn
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._saves = 0
        self._done: Tensor | None = None  # the number of the newest save whose copies are there
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._begun: _Begun | None = None
        self._newest = 0  # the step that was saved last
        self._cancelled = 0  # the newest step whose save is not to be
        self._ending = threading.Lock()  # a save is committed or cancelled
        self._committed: Path | None = None  # the newest
        self._writer: threading.Thread | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        every = self._settings.every
        return (every is not None and step % every == 0) or step == self._wanted_step()

    def step_ended(self, step: int, parts: Mapping[str, Encoded], shared: Shared) -> None:
        """Begin to copy the state after `step`, which is due; waits while the last save is written."""
        self.wait()
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
        self._saves += 1
        copies = self._copy(own, common)
        self._begun = _Begun(self._saves, step, local, on_host, own, copies, shared, time.monotonic())
        self._newest, self._committed = step, None

    def is_pending(self, step: int) -> bool:
        """Whether the state after `step` is being copied, and not yet given to the writer."""
        return self._begun is not None and self._begun.step == step

    def copy_again(self, shared: Shared) -> None:
        """Copy anew what is being copied: it was changed after its step, and is as it ought to be now."""
        begun = self._begun
        if begun is not None and self._settings.replica:
            self._saves += 1
            copies = begun.copies | self._copy(begun.own, shared.tensors())
            self._begun = replace(begun, number=self._saves, copies=copies, shared=shared)

    def cancel(self, step: int) -> None:
        """The state after `step` was changed while it was copied: let there be no save of it."""
        with self._ending:
            if self._saves and self._newest == step != self._cancelled:
                self._begun, self._cancelled = None, step
                if self._committed is not None:
                    saves.remove(self._committed)
                self._warn(
                    f"The periodic save of step {step} was given up: the script changed parameters or "
                    "optimizer state, outside of the optimizer step, while they were copied."
                )

    def step_begins(self) -> None:
        """Let the current stream wait for the copies: what it does next changes what they read."""
        if self._copied is not None:
            torch.cuda.current_stream(self._host.device).wait_event(self._copied)
            self._copied = None

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

    def wait(self) -> None:
        """Wait until nothing is being written."""
        while self._writer is not None and self._writer.is_alive():
            self._writer.join(LOOK_SECONDS)
            # A device call, so that a save after a failure finds this thread held like any other.
            torch.cuda.current_stream(self._host.device).query()
        self._writer = None

    def _copy(self, own: Mapping[str, Tensor], common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue copies of both; what this rank alone knows (buffers) is the first to change again."""
        size = sum(_aligned(tensor.nbytes) for tensor in (*own.values(), *common.values()))
        if self._staging.numel() != size:
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        if self._stream is None or self._done is None:
            self._done = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._stream = torch.cuda.Stream(self._host.device)
        current = torch.cuda.current_stream(self._host.device)
        self._stream.wait_stream(current)
        copies: dict[str, Tensor] = {}
        offset = 0
        with torch.cuda.stream(self._stream), torch.no_grad():
            for group in (own, common):
                for name, tensor in group.items():
                    place = self._staging[offset : offset + tensor.nbytes]
                    copies[name] = place.view(tensor.dtype).view(tensor.shape)
                    copies[name].copy_(tensor, non_blocking=True)
                    offset += _aligned(tensor.nbytes)
                if group is own and own:
                    current.wait_event(self._stream.record_event())
            self._copied = self._stream.record_event()
        # Of each save another number: in transparent mode the device may write that of the last one again.
        self._write_word(self._done.data_ptr(), self._saves, self._stream.cuda_stream)
        return copies

    def _write(self, begun: _Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        """The writing thread: no exception leaves it, the training goes on without this save."""
        kind: layout.Kind = "rank" if self._settings.replica else "local"
        saver: layout.SaverName = "builtin" if self._settings.replica else "ring"
        try:
            assert self._done is not None
            while self._done.item() != begun.number:
                time.sleep(LOOK_SECONDS)
            with SaveFolder(self._root, self._identity, begun.step, kind, saver, by=REASON) as folder:
                folder.add_tensors(layout.TENSORS_FILE, tensors)
                folder.add_json(layout.STATE_FILE, document)
                with self._ending:
                    if begun.step == self._cancelled:
                        return
                    path, size = folder.commit()
                    self._committed = path
            saves.remove_old(self._root, self._identity, self._settings.keep)
        except (JitckptError, OSError) as error:
            self._warn(f"The periodic save of step {begun.step} failed, and the training goes on: {error}")
            return
        rank, shard, seconds = self._identity.rank, self._identity.shard, time.monotonic() - begun.began
        self._report(protocol.PeriodicSave(rank, shard, begun.step, str(path), size, seconds))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
