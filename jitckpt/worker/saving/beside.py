"""What saves and snapshots have in common that are made while the training goes on.

What the step has left on the device is copied into host memory beside the training (host_copies.py). A thread
does the rest; it makes no device call, but where the training goes on to no next step, for copies that are
put off (in_spans.py).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from jitckpt.encoding.tensor_file import to_host
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.state.host_state import HostState, Shared
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.saver import document_of

LOOK_SECONDS = 0.001  # between two looks whether the copies are there
LAST_SECONDS = 1.0  # for what a writer is in the middle of


@dataclass(frozen=True)
class Begun:
    """What is under way: what the host held then, and the copies by name."""

    number: int  # of the copies
    step: int
    local: dict[str, Json]
    on_host: dict[str, Tensor]
    own: dict[str, Tensor]  # what this rank alone knows, on the device
    copies: dict[str, Tensor]
    shared: Shared
    began: float


class BesideTraining(ABC):
    """Called by the training thread alone; one step's state at a time."""

    def __init__(
        self,
        host: HostState,
        history: History,
        copies: HostCopies,
        *,
        replica: bool,
        reason: str,
        warn: Callable[[str], None],
    ) -> None:
        """replica: what replicas share is wanted, too. reason: what it is called, for threads and saves."""
        self._host, self._history, self._copies = host, history, copies
        self._replica, self._reason, self._warn = replica, reason, warn
        self._begun: Begun | None = None
        self._newest = -1  # the step that was begun last
        self._writer: threading.Thread | None = None
        self._stopping = threading.Event()

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is wanted."""

    @abstractmethod
    def _may_begin(self, step: int) -> bool:
        """Wait a while for what was begun before; return whether the next may begin."""

    def _of_replicas(self, shared: Shared) -> Mapping[str, Tensor]:
        """Return what this rank copies of that which replicas hold alike."""
        return shared.all_tensors() if self._replica else {}

    def _soon_gone(self, step: int) -> Mapping[str, Tensor]:
        """Return what else is to be copied of this step, which the next minibatch does away with."""
        return {}

    @abstractmethod
    def _write(self, begun: Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        """On a thread of its own, which no exception may leave: wait for the copies and put them away."""

    @abstractmethod
    def cancel(self, step: int) -> None:
        """The state after `step` was changed while it was copied: let it not be used."""

    @abstractmethod
    def wait(self) -> bool:
        """Wait until nothing is being written; return whether that is so."""

    def finish(self) -> None:
        """The training has ended: wait a while for what is being written."""
        self.wait()

    def stop(self) -> None:
        """Have the writer wait for nothing any more, and come to its end.

        Python ends its threads as the process ends. Where one is inside of torch then, C++ takes that for an
        error, and the process aborts.
        """
        self._stopping.set()
        self._copies.drop()
        if self._writer is not None:
            self._writer.join(LAST_SECONDS)

    def _are_there(self, begun: Begun) -> bool:
        """Wait for the copies, on the writer's thread; return whether they came before the end."""
        while not self._copies.are_there(begun.number):
            if self._stopping.wait(LOOK_SECONDS):
                return False
            self._copies.hurry()
        return True

    def step_ended(self, step: int, parts: Mapping[str, Encoded], shared: Shared) -> None:
        """Begin to copy the state after `step`, which is due; waits a while for the last one."""
        if not self._may_begin(step):
            return
        tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        own = {name: tensor for name, tensor in tensors.items() if name not in on_host}
        local = {
            "final": True,
            "trees": {name: part.tree for name, part in parts.items()},
            "missing": [],
            "left_out": [],
        }
        number, copies = self._copy(step, own, shared)
        self._begun = Begun(number, step, local, on_host, own, copies, shared, time.monotonic())
        self._newest = step

    def _copy(self, step: int, own: Mapping[str, Tensor], shared: Shared) -> tuple[int, dict[str, Tensor]]:
        """Begin to copy what lies on the device; return the number of the copies, and these by name."""
        return self._copies.begin({**own, **self._soon_gone(step)}, self._of_replicas(shared))

    def is_pending(self, step: int) -> bool:
        """Whether the state after `step` is being copied, and not yet given to the writer."""
        return self._begun is not None and self._begun.step == step

    def copy_again(self, shared: Shared) -> None:
        """Copy anew what is being copied: it was changed after its step, and is as it ought to be now."""
        begun = self._begun
        if begun is not None and self._replica:
            number, copies = self._copies.begin(begun.own, self._of_replicas(shared))
            self._begun = replace(begun, number=number, copies=copies, shared=shared)

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
        named = snapshot.shared.in_documents()
        if _places(named) != _places(begun.shared.in_documents()) or _was_taken_again(begun, snapshot.shared):
            self._begun = begun
            self.copy_again(snapshot.shared)
            begun, self._begun = self._begun, None
        document: dict[str, Json] = {"local": begun.local}
        tensors = begun.on_host | begun.copies
        if self._replica:
            document, common = document_of(
                self._host, self._history, snapshot, step=step, reason=self._reason, local=begun.local
            )
            for name, tensor in [*common.items()]:
                if name in named:
                    del common[name]  # it is among the copies, of this rank or of a replica
                elif tensor.device.type != "cpu":  # a scheduler has made it
                    common[name] = to_host(tensor)
            tensors |= common
        self._writer = threading.Thread(
            target=self._write,
            args=(begun, document, tensors),
            name=f"jitckpt-{self._reason}-save",
            daemon=True,
        )
        self._writer.start()


def _places(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def _was_taken_again(begun: Begun, shared: Shared) -> bool:
    """Whether a wrapper may have changed what it has on the device, after its optimizer's own step."""
    pairs = zip(begun.shared.optimizers, shared.optimizers, strict=True)
    return any(
        before.beside is not now.beside
        and any(one.device.type != "cpu" for one in now.beside.tensors.values())
        for before, now in pairs
    )
