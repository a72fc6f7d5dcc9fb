"""Writes a rank's state when a save is ordered: one consistent minibatch, of a device at rest."""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.behind_proxy import DeviceStanding
from jitckpt.bindings.interpose import Native
from jitckpt.encoding import strides
from jitckpt.encoding.staging import Staging
from jitckpt.encoding.tensor_file import to_host
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import JitckptError, SaveError
from jitckpt.ring import local_state
from jitckpt.ring.local_state import LocalState
from jitckpt.saves import layout, starts
from jitckpt.saves.folders import KeptSaves, SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state import host_state
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import VariablesNow
from jitckpt.system.stacks import code_of
from jitckpt.tiers import own_shard
from jitckpt.wire import protocol
from jitckpt.worker.saving import main_thread, presented
from jitckpt.worker.saving.found import Found
from jitckpt.worker.saving.history import History, SharedSnapshot
from jitckpt.worker.saving.outside_changes import Replacement

NOT_TAKEN = (
    "The script's variables can't be taken in the middle of an iteration: {error}. They are saved as the "
    "iteration before has left them."
)
BY_THE_LIBRARY = 0  # the id of a save that no agent ordered
LOOK_SECONDS = 0.005
LOOKS = 20  # at a thread that does not stand still
STUCK_SECONDS = 10.0  # a device at rest that is still inside an optimizer step by then will not end it
# So long the training thread may take to come to its next device call, or to the next minibatch, where it can
# change what is to be saved without a device call.
PARK_SECONDS = 5.0
# A thread that was at one place for so long, while the device rests, waits for what will not come.
STANDING_SECONDS = 0.5
STANDS_SECONDS = 3.0  # a device that gets nothing done for so long waits for a rank that does not go on
OWN_STATE_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class SaveContext:
    """What a save function is told.

    Attributes:
        directory: an empty folder for its files, which gets its final name when all is written.
        step: the number of optimizer steps in the state to be saved. A counter of your own may be ahead of
            it, as the host is.
        rank: of the process, from 0.
        world_size: the number of ranks.
        shard: which part of the state the rank holds, from 0.
        shards: how many parts there are.
        host_state: what the host held after that step (it may be steps ahead of the device by now): "random",
            "extra", "buffers" and "attributes" (of the modules), "optimizers" (state_dicts of what lies on
            the host, keyed by the parameters' numbers), "schedulers", "scaler".
        reason: why the save was ordered.
    """

    directory: Path
    step: int
    rank: int
    world_size: int
    shard: int
    shards: int
    host_state: dict[str, Any]
    reason: str


SaveFunction = Callable[[SaveContext], object]


class Saver:
    """Carries out save orders, on the thread that calls it; never raises."""

    def __init__(
        self,
        *,
        root: Path,
        identity: Identity,
        native: Native,
        host: HostState,
        history: History,
        ring: int,
        save_function: SaveFunction | None,
        replacement: Callable[[int], Replacement],
        has_whole_copies: Callable[[int], bool],
        refused: Callable[[], str | None],
        staging: Staging,
        report: Callable[[protocol.WorkerMessage], None],
        keep: int,
        why_not: Callable[[int], str | None] = lambda step: None,
        found: Callable[[], Found | None] = lambda: None,
        memory: int | None = None,
        whole: int | None = None,
        nothing_before: Callable[[], bool] = lambda: False,
        as_it_stands: Callable[[FrameType | None], VariablesNow | None] = lambda frame: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """why_not: tells why a save function can't be called for the state after a step, if so.

        found: what a save function may read beside what the job was given.
        as_it_stands: tells of the script's variables in the middle of an iteration, by the innermost frame.
        nothing_before: whether no step of the job was ever saved whole.
        memory: the memory tier's of this rank. whole: as for own_shard.read, until a minibatch is done.
        """
        self._memory, self._whole = memory, whole
        self._why_not, self._nothing_before = why_not, nothing_before
        self._as_it_stands, self._warn = as_it_stands, warn
        self._found = found
        self._root, self._identity, self._native, self._host = root, identity, native, host
        self._history, self._ring, self._save_function = history, ring, save_function
        self._report, self._keep = report, keep
        self._kept = KeptSaves(root, identity)
        self._replacement, self._has_whole_copies, self._refused = replacement, has_whole_copies, refused
        self._staging = staging
        self._restored: tuple[int, Path | None] = (0, root)
        self._optimizers_given = bool(host.optimizers)
        self._is_held = False  # the thread that trains, by us

    def restored(self, step: int, path: Path | None) -> None:
        """The job went on from this save: until a minibatch is done it serves again. None: from memory."""
        self._restored = step, path

    def __call__(self, order_json: bytes) -> int:
        """Save as ordered and report how it went; returns 0 if a whole save was written, else 1."""
        save_id, step = 0, None
        begun = time.monotonic()
        try:
            order = protocol.decode(order_json)
            if not isinstance(order, protocol.Save):
                raise SaveError(f"An order of the type {order.type} came where a save order belongs.")
            save_id = order.save_id
            with _quiet():
                try:
                    while True:
                        step, runs = self._wait_for_rest(save_id, begun + order.deadline)
                        self._report(protocol.SaveBegun(save_id, self._identity.rank, step))
                        written = self._write(step, order, runs)
                        if written is not None:
                            break
                finally:  # others may have saved, and need this rank's part of that
                    if save_id == BY_THE_LIBRARY:
                        self._write_local_states(begun + order.deadline)
            path, size = written
            shard, rank, seconds = self._identity.shard, self._identity.rank, time.monotonic() - begun
            self._report(protocol.SaveEnded(save_id, rank, shard, step, str(path), size, seconds))
        except BaseException as error:  # a save function may raise anything, SystemExit too
            self._report(self._failure(save_id, step, error))
            return 1
        return 0

    def _wait_for_rest(self, save_id: int, deadline: float) -> tuple[int, bool]:
        """Return the newest step that the device has finished, once it is in no optimizer step.

        And once nothing is still to come of it on the host, such as a scheduler's step. In a backward pass
        that is so although the training thread makes no call: autograd's thread waits at the gate, and it
        for that thread. So it is, too, where the thread sleeps or works on the host between two minibatches,
        if all that can come is foreseen; then it may run on during the save, and True is returned beside the
        step. A save function is not called then: nobody knows which objects of the training it reads.
        """
        begun = since = time.monotonic()
        stands_at: object = None
        has_told = False
        while True:
            if (reason := self._refused()) is not None:
                raise SaveError(reason)
            standing = behind_proxy.standing()
            if standing is DeviceStanding.LOST:
                raise SaveError(
                    "The device is lost, or was being brought back from a failure, or has not ended a "
                    "minibatch since, so its state may be that of no minibatch."
                )
            progress = self._native.progress()
            now = time.monotonic()
            no_step_yet = progress.host_begun == self._restored[0]
            step = progress.device_ended
            if self._save_function is not None and not no_step_yet and (reason := self._why_not(step)):
                raise SaveError(reason)
            settled = no_step_yet or self._history.is_settled(step)
            if progress.step_thread_parked and not self._history.waits_for_boundary:
                settled = True
            if (place := self._history.place()) != stands_at:
                stands_at, since = place, now
            waits = now < min(since + STANDING_SECONDS, begun + PARK_SECONDS) and self._may_come(step)
            settled = settled and not waits
            if waits and not has_told and self._history.goes_on(step):
                has_told = True
                self._report(protocol.SaveWaits(save_id, self._identity.rank, step))
            runs = not (settled or waits or self._save_function) and self._history.is_foreseen(step)
            between_steps = progress.device_begun == step or self._has_whole_copies(step)
            # What the script changes on the device after the step may be half done, its copies on their way.
            whole = between_steps and (no_step_yet or self._replacement(step).problem is None)
            rests = between_steps and (((settled or runs) and whole) or now >= begun + PARK_SECONDS)
            if rests and standing is DeviceStanding.INTACT:
                break
            if now >= min(deadline, begun + STUCK_SECONDS + PARK_SECONDS):
                raise SaveError(
                    f"The device did not come to the end of optimizer step {progress.device_begun} in "
                    f"{now - begun:.1f} s, so its state is that of no minibatch."
                )
            time.sleep(LOOK_SECONDS)
        if step == 0:
            raise SaveError("No minibatch is finished yet: there is nothing to save, and nothing is lost.")
        return step, runs

    def _may_come(self, step: int) -> bool:
        of_script = self._history.goes_on(step) or self._history.may_come(step)
        found = self._found()
        return of_script or (found is not None and found.may_come(step))

    def _write(self, step: int, order: protocol.Save, runs: bool) -> tuple[Path, int] | None:
        """Write the state after `step`; None if the job has gone on meanwhile, then nothing is left of it.

        runs: the training thread may run on until its next device call. What it does, it does with the GIL:
        a scheduler's step that began before the snapshot was complete is still being made then, or has
        changed what a later snapshot says.
        """
        if step == self._restored[0]:
            return (self._restored[1], 0) if self._restored[1] else self._write_from_memory(step)
        replacement = self._replacement(step)
        if replacement.problem is not None:
            raise SaveError(replacement.problem)
        if replacement.copies and self._save_function is not None:
            raise SaveError(
                f"The script has changed parameters or optimizer state since optimizer step {step}, outside "
                "of the step, and a save function would read them as they are now."
            )
        if self._save_function is None:
            return self._write_files(step, order, runs, replacement.copies)
        thread = self._history.thread
        with main_thread.held(thread) as came:
            if (
                came is not None
                and came.is_set()
                and not self._host.changing_code.isdisjoint(code_of(thread))
            ):
                return None  # it is half-way through a scheduler's step
            self._is_held = came is not None
            return self._write_files(step, order, runs, {})

    def _write_from_memory(self, step: int) -> tuple[Path, int]:
        """No minibatch is done since the job went on from this step in the memory tier: write that."""
        if self._memory is None:
            raise SaveError(f"Step {step} is in memory that this rank does not have.")
        start = self._identity.start
        return own_shard.write_save(self._memory, self._root, step, start, whole=self._whole)

    def _write_files(
        self, step: int, order: protocol.Save, runs: bool, copies: Mapping[str, Tensor]
    ) -> tuple[Path, int] | None:
        if order.save_id != BY_THE_LIBRARY:  # then ranks are steps apart, and some still write
            self._kept.remove_old(max(1, self._keep - 1))  # this one will be one more
        snapshot = self._history.snapshot(step)
        if snapshot is None or (runs and self._history.is_changing()):
            return None
        goes_on = self._history.goes_on(step)
        standing = self._standing() if goes_on else None
        local = next((state for state in local_state.read(self._ring) if state.step == step), None)
        if local is None:
            raise SaveError(f"This rank's own state after step {step} is not whole in memory.")
        of_rank = local.document()
        if standing is not None:
            of_rank, local = _with_variables(local, standing)
        if goes_on and not self._history.goes_on(step):
            return None  # the iteration has ended: there is no need to be content with less
        document, tensors = document_of(
            self._host, self._history, snapshot, step=step, reason=order.reason, local=of_rank
        )
        if (found := self._found()) is not None:
            document["unsettled"] = document["unsettled"] or found.may_lack(step)
        tensors |= local.tensors
        saver: layout.SaverName = "builtin" if self._save_function is None else "callback"
        identity = as_it_is(self._identity, self._host)
        is_first = self._nothing_before()
        with SaveFolder(self._root, identity, step, "rank", saver, nothing_before=is_first) as folder:
            if self._save_function is None:
                tensors |= snapshot.shared.tensors() | {**copies}
            else:
                on_host = {name: to_host(tensors[name]) for name in tensors}
                state = host_state.spelled_out(document, on_host)
                with self._presented(step, snapshot, document, on_host):
                    self._call(self._save_function, folder.path, step, order.reason, state)
            files = layout.state_files(saver)
            folder.add_tensors(files.tensors, tensors, self._staging)
            folder.add_json(files.document, document)
            folder.add_existing()
            now = self._history.snapshot(step)
            if now is None or not now.says_the_same_as(snapshot) or goes_on != self._history.goes_on(step):
                return None
            progress = self._native.progress()
            if progress.device_ended != step or not (
                progress.device_begun == step or self._has_whole_copies(step)
            ):
                return None
            if (problem := self._refused() or self._replacement(step).problem) is not None:
                raise SaveError(problem)
            if behind_proxy.standing() is not DeviceStanding.INTACT:
                return None
            return folder.commit()

    def _standing(self) -> VariablesNow | None:
        """Return what the script's variables are now; None if the training thread does not stand still.

        It is held in Python code, or is inside of a call that it does not come back from meanwhile.
        """
        try:
            for _ in range(LOOKS):
                with main_thread.held(self._history.thread):
                    place = self._history.place()
                    found = self._as_it_stands(sys._current_frames().get(self._history.thread))
                    if found is None or self._history.place() == place:
                        return found
                time.sleep(LOOK_SECONDS)
        except Exception as error:  # not said before the thread goes on: it may have what that needs
            self._warn(NOT_TAKEN.format(error=f"{type(error).__name__}: {error}"))
        return None

    @contextmanager
    def _presented(
        self, step: int, snapshot: SharedSnapshot, document: dict[str, Json], on_host: dict[str, Tensor]
    ) -> Iterator[None]:
        """Let the training's objects say what they did after this step, while a save function reads them."""
        progress = self._native.progress()
        held = self._is_held or progress.step_thread_parked or self._history.is_in_backward()
        reason = presented.why_not(self._host, snapshot)
        if not held:
            reason = (
                "The thread that trains works on the host, and is not Python's main thread, so it can't be "
                "held: what a save function reads of the host's state would not be of the step that the "
                "device has ended. Train in the main thread."
            )
        if reason is None:
            with ExitStack() as stack:
                stack.enter_context(presented.presented(self._host, snapshot, document, on_host))
                if (found := self._found()) is not None:
                    stack.enter_context(found.presented(step, self._optimizers_given))
                yield
            return
        if progress.host_begun != step:
            raise SaveError(reason)
        yield  # the host is at the same step

    def _call(
        self, save_function: SaveFunction, directory: Path, step: int, reason: str, state: dict[str, Any]
    ) -> None:
        identity = self._identity
        context = SaveContext(
            directory=directory,
            step=step,
            rank=identity.rank,
            world_size=identity.world_size,
            shard=identity.shard,
            shards=identity.shards,
            host_state=state,
            reason=reason,
        )
        with torch.cuda.stream(torch.cuda.Stream(self._host.device)):
            save_function(context)

    def _write_local_states(self, deadline: float) -> None:
        """No agent will. All: replicas' saves are as far apart as their hosts were ahead of their devices."""
        for state in self._whole_local_states(deadline):
            local_state.write_save(self._ring, self._root, state.step)

    def _whole_local_states(self, deadline: float) -> list[LocalState]:
        """Return all own states, once the device gets no further with what the host has given it.

        It may only have been slow: then it still comes to steps that others save, and puts what it alone
        knows of them into the ring.
        """
        seen: object = None
        since = time.monotonic()
        while True:
            progress, states = self._native.progress(), local_state.read(self._ring)
            missing = [(state.step, state.missing) for state in states if state.missing]
            now = time.monotonic()
            if seen != (progress.device_begun, progress.device_ended, missing):
                seen, since = (progress.device_begun, progress.device_ended, missing), now
            comes = progress.device_ended < progress.host_ended or missing
            if not comes or now >= min(deadline, since + STANDS_SECONDS):
                return states
            time.sleep(OWN_STATE_LOOK_SECONDS)

    def _failure(self, save_id: int, step: int | None, error: BaseException) -> protocol.SaveFailed:
        text = "".join(traceback.format_exception(error))
        reason = str(error) if isinstance(error, JitckptError) else f"The save function raised {error!r}."
        folder = self._root if step is None else self._root / layout.step_folder(step)
        path = folder / f"error-{layout.rank_folder('rank', self._identity.rank)}.txt"
        try:
            if not starts.is_superseded(self._root, self._identity.start):
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        except OSError as failure:
            reason += f" Its traceback can't be kept in {path}: {failure.strerror}."
        return protocol.SaveFailed(save_id, self._identity.rank, reason, text)


def as_it_is(identity: Identity, host: HostState) -> Identity:
    """Return whose a save of now is; what the training has built otherwise the names in the save tell."""
    return identity.restructured() if identity.fingerprint and host.is_restructured else identity


def _with_variables(local: LocalState, standing: VariablesNow) -> tuple[dict[str, Json], LocalState]:
    """Return a rank's own state with the script's variables as they are now, and its document."""
    trees, tensors = {**local.trees}, {**local.tensors}
    for name, (tree, of_part) in standing.parts.items():
        if name in trees:  # else it is too large
            trees[name] = tree
            tensors |= of_part
    local = replace(local, trees=trees, tensors=tensors)
    return local.document() | {"stood": {"at": standing.at, "unchanged": standing.unchanged}}, local


def document_of(
    host: HostState, history: History, snapshot: SharedSnapshot, *, step: int, reason: str, local: Json
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return the JSON document of a save, and the tensors on the host that it names but those of `local`."""
    on_host = [optimizer.on_host() for optimizer in snapshot.shared.optimizers]
    document = {
        "step": step,
        "reason": reason,
        "optimizers": [encoded.tree for encoded in on_host],
        "progress": snapshot.progress.tree,
        "scheduler_steps_due": snapshot.scheduler_steps_due,
        "usual_scheduler_steps": history.usual_scheduler_steps,
        "unsettled": history.may_lack(step),
        "scaler": host.scaler_state(snapshot.scaler_update_due),
        "kept": host.kept.document(),
        "at_boundary": not history.waits_for_boundary or history.is_settled(step),
        "local": local,
        "frozen": list(snapshot.shared.held.frozen),
        "cuts": dict(snapshot.shared.held.cuts),
        "aliases": dict(snapshot.shared.held.aliases),
        "gradients": snapshot.shared.gradients.there(),
        "strides": strides.others_than_rows(snapshot.shared.tensors()),
    }
    tensors: dict[str, Tensor] = {}
    for encoded in (*on_host, snapshot.progress):
        tensors |= encoded.tensors
    return document, tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection: it could free device memory, on the wrong side of the gate."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
