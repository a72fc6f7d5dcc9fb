"""The worker's side: `init` puts a training job under protection, `restore` brings it back."""

import atexit
import json
import os
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn
from torch.optim import Optimizer

from jitckpt.bindings.interpose import Native, current_stream
from jitckpt.console import say
from jitckpt.data.loop import Batches, Loop
from jitckpt.encoding import strides
from jitckpt.encoding.staging import Staging
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import CheckpointError, JitckptError, NativeError, SaveError, TreeError
from jitckpt.events import EventLog
from jitckpt.faults import injection
from jitckpt.hooks import parameter_data
from jitckpt.hooks.torch_training import TrainingHooks
from jitckpt.ring import local_state
from jitckpt.ring.copies import Asker
from jitckpt.saves import directory_lock, final_state, folders, same_step, selection, start_record
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import host_state, parallel
from jitckpt.state.host_state import HostState, ModelState, Stateful
from jitckpt.state.module_numbers import ModuleNumbers
from jitckpt.state.parallel import StepBarrier
from jitckpt.state.shards import Layout, agree, any_rank, hear_first, through_first
from jitckpt.system import descriptors
from jitckpt.system.signals import comes_from_signal
from jitckpt.system.stacks import stack_writer
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.wire import environment, protocol
from jitckpt.worker import spare
from jitckpt.worker.checkpoint_path import CheckpointPath
from jitckpt.worker.draws import TWO_LINES, Draws
from jitckpt.worker.ends import at_end
from jitckpt.worker.ends.exceptions import ExceptionHook, ExitHook
from jitckpt.worker.in_place import proxy_faults
from jitckpt.worker.saving import found, snapshots
from jitckpt.worker.saving.beside import BesideTraining
from jitckpt.worker.saving.found import Found, several_optimizers
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.outside_changes import OutsideChanges
from jitckpt.worker.saving.periodic import PeriodicSaver, Settings
from jitckpt.worker.saving.saver import SaveFunction, Saver
from jitckpt.worker.saving.snapshots import Snapshots
from jitckpt.worker.self_check.checker import SelfChecker
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)

MAX_AHEAD = (32, 8)  # steps that the host may be ahead of the device: the most for which memory is there
KEPT_BESIDE = 4  # steps: replicas may be a step apart, and the host has begun one more
ROOM_TO_GROW = 4  # times what the rank-local state takes as the job begins
SETTLE_SECONDS = 0.05  # a device that moves on after all only costs another save
LAST_LOOK_SECONDS = 1.0
LAST_CHECK_SECONDS = 10.0
# Where no agent asks the other ranks: shortly before c10d's own watchdog would end the process.
DEFAULT_DIRECTORY = "ckpt"
# Set by whoever tries a job out: its saves go there, whatever the script says, and its final state's digests.

SHOWN_NAMES = 5
DEEPEST_WRAPPER = 5
UNEQUAL_TURNS = (
    "an optimizer has made another step before every optimizer has made one, so that nobody can tell where a "
    "minibatch of the loop ends. Write it as `for step in job.steps(n):`, which tells."
)
IRREGULAR = (
    "A scheduler is stepped after some optimizer steps only. If a failure comes between such an optimizer "
    "step and the scheduler's, the restart can't make that up. Write `for epoch in job.epochs(n):` and `for "
    "batch in job.batches(loader):`, or `for step in job.steps(n):`."
)
AROUND_OPTIMIZERS = (
    "optimizer",
    "chained_optimizers",
    "optimizers",
    "basic_optimizer",
    "optim",
    "base_optimizer",
)

P = ParamSpec("P")
_current: "Job | None" = None
_base_of_next_job: tuple[int, Path] | None = None


def init(
    save_checkpoint: SaveFunction | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Any = None,
    extra: Stateful | None = None,
    shard: int | None = None,
    shards: int | None = None,
    step_barrier: bool | None = None,
    save_every: int | None = None,
    keep: int = 2,
    local_state_limit: int = 64 << 20,
    self_check: bool | None = None,
) -> "Job":
    """Protect this rank's training; call it once, when all that it is given is built and on its device.

    Give `model` and `optimizer`, and jitckpt saves them by itself; or give `save_checkpoint`. Without the
    preloaded library or without a CUDA device the job runs unprotected, and a warning says so; `restore`
    works all the same.

    Args:
        save_checkpoint: a function of yours that gets a SaveContext and writes into its directory. It may be
            called while a collective hangs, so no collective works in it.
        checkpoint_dir: a directory that all ranks share (default: JITCKPT_CHECKPOINT_DIR, else "ckpt").
        model: its parameters come back from any replica of the shard, its buffers are the rank's own.
        optimizer: one, or a list. With several a minibatch is one step of each.
        scheduler: one, or a list; kept in both ways of use, as `scaler` and `extra` are.
        scaler: a gradient scaler.
        extra: any object with state_dict and load_state_dict. What state_dict() says when the optimizer step
            returns is kept, so advance it before.
        shard: which part of the state this rank holds, from 0, where replicas are split up over ranks
            (default: found from the model). Give it with `shards`, on all ranks or on none.
        shards: how many parts there are.
        step_barrier: let no rank begin an optimizer step before every rank's gradients are there, by an
            all-reduce of one element over all ranks (default: where there is more than one shard; and on
            several hosts where a rank keeps something of its own on its device, such as BatchNorm's
            statistics). Without it shards may be a step apart when a failure comes, and then no step is
            whole; and a host that is lost may have had the only copy of what its devices kept.
        save_every: save after each step that is a multiple of it, beside the training, for failures that no
            replica survives. Takes as much page-locked host memory as the state of this rank; one replica of
            each shard writes.
        keep: how many whole periodic saves stay.
        local_state_limit: bytes of host memory for what this rank alone knows of the last steps.
        self_check: after the first steps restore what a save would hold into copies of the objects, compare
            them, and compare replicas; a warning names what differs (default: JITCKPT_SELF_CHECK, else True).

    Returns:
        The job. Take its epochs, batches or steps in the place of your own.

    Raises:
        CheckpointError: The directory can't be used.
        TreeError: Some state can't be saved without pickle.
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a wrong value.
    """
    global _base_of_next_job, _current  # noqa: PLW0603
    if _current is not None:
        raise JitckptError(
            "jitckpt.init was called twice in this process; call close() on the first job before."
        )
    optimizers, wrappers = _optimizers(optimizer)
    schedulers = _listed("scheduler", scheduler, object)
    _check_arguments(save_checkpoint, model, optimizers, schedulers, extra, save_every=save_every, keep=keep)
    root = _root(checkpoint_dir)
    rank, world_size = _place()
    layout = None
    if shard is None or shards is None:
        if shard is not None or shards is not None:
            raise ValueError("Give jitckpt.init both shard and shards, or neither.")
        layout = _layout(rank, world_size, model, optimizers)
        shard, shards = (layout.shards[rank], layout.count) if layout else (0, 1)
    elif not 0 <= shard < shards:
        raise ValueError(f"shard is {shard}; with shards={shards} it must be from 0 to {shards - 1}.")
    _current = Job(
        root=root,
        named_directory=_named_directory(checkpoint_dir),
        identity=Identity(
            job=_job_id(root, rank),
            fingerprint=host_state.fingerprint(model, optimizers),
            world_size=world_size,
            rank=rank,
            shard=shard,
            shards=shards,
            layout="" if layout is None else layout.text,
        ),
        save_function=save_checkpoint,
        model=model,
        optimizers=optimizers,
        wrappers=wrappers,
        schedulers=schedulers,
        scaler=scaler,
        extra=extra,
        step_barrier=True if step_barrier is None and shards > 1 else step_barrier,
        periodic=Settings(save_every, keep, layout is None or layout.shards.index(shard) == rank),
        local_state_limit=local_state_limit,
        self_check=_self_check(self_check),
        needs_memory=environment.MEMORY_TIER.get() != "auto" or _lacks_replicas(layout, shards),
    )
    if _base_of_next_job is not None:
        _current.set_base(*_base_of_next_job)
        _base_of_next_job = None
    if layout is not None and rank == 0 and save_every is None and layout.alone():
        if descriptors.MEMORY not in os.environ:
            _current._warn(_without_replicas(layout))
        elif save_checkpoint is not None:
            _current._warn(
                "The memory tier can't protect a job that has a save function of its own: it keeps what "
                "jitckpt's own saver saves. Give jitckpt.init model and optimizer in its place."
            )
    return _current


def jit_get_checkpoint_path(checkpoint_dir: str | os.PathLike[str]) -> CheckpointPath | None:
    """Return the folder of the save that this rank is to load, a Path; None on a fresh start.

    It is a save of this rank's shard, by any replica, of the newest step that is whole for every shard. The
    job's steps are counted on from it. Where there are several shards every rank has to call it, after
    `init`. Raises CheckpointError if there are saves but none can be used.
    """
    global _base_of_next_job  # noqa: PLW0603
    root = _root(checkpoint_dir)
    if _current is not None:
        identity = _current.identity
    else:
        rank, world_size = _place()
        identity = Identity("", "", world_size, rank, 0, 1)
    job = folders.read_job(root)
    if job is None:
        return None
    # Of replicas one alone may ask, which then sends what it loads to the others.
    choice = _choice(root, replace(identity, job=job), several_hosts=False)
    if choice is None:
        return None
    if _current is not None:
        _current.given_step = choice.step
        _current.set_base(choice.step, choice.save.path)
    else:
        _base_of_next_job = choice.step, choice.save.path
    return CheckpointPath(choice.save.path)


def is_current() -> bool:
    """Whether this process has a job that is not closed."""
    return _current is not None


def all_say(said: Any) -> list[Any]:
    """Return what all ranks say here, by rank: each has to call it. For plain values that JSON holds."""
    rank, world_size = _place()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [said]
    store = torch.distributed.distributed_c10d._get_default_store()
    told: list[Any] = json.loads(
        through_first(
            store,
            "said by all",
            rank,
            world_size,
            value=json.dumps(said),
            decide=lambda values: json.dumps([json.loads(value) for value in values]),
        )
    )
    return told


def _harmless(method: Callable[Concatenate["Job", P], None]) -> Callable[Concatenate["Job", P], None]:
    """Have whatever fails in a method fail jitckpt alone: the training goes on without it.

    What a signal's handler raises meanwhile (torch's, when a loader's worker has died) is the training's.
    Should it go on after that, the method was left in the middle.
    """

    @wraps(method)
    def guarded(job: "Job", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if job._interrupted is not None:
            job._switch_off(job._interrupted)
        if job._off is None:
            try:
                method(job, *args, **kwargs)
            except Exception as error:
                if comes_from_signal(error):
                    job._interrupted = f"a signal's handler raised {error!r} where the state is taken."
                    raise
                job._switch_off(str(error) or repr(error))

    return guarded


class Job:
    """A protected training job, as `init` returns it."""

    _module_numbers: ModuleNumbers | None = None
    _snapshots: Snapshots | None = None
    _beside: Sequence[BesideTraining] = ()  # what saves while the training goes on
    _interrupted: str | None = None  # a signal's handler has raised in the middle of a hook
    given_step: int | None = None  # by jit_get_checkpoint_path: what the script has loaded

    def __init__(
        self,
        *,
        root: Path,
        named_directory: str,
        identity: Identity,
        save_function: SaveFunction | None,
        model: nn.Module | None,
        optimizers: list[Optimizer],
        wrappers: Mapping[int, Sequence[object]],
        schedulers: list[Stateful],
        scaler: Any,
        extra: Stateful | None,
        step_barrier: bool | None,
        periodic: Settings,
        local_state_limit: int,
        self_check: str = NO_SELF_CHECK,
        needs_memory: bool = True,
    ) -> None:
        """step_barrier: None for where what the device keeps has to be on another host before the step.

        needs_memory: the memory tier is to be used, if there is one.
        """
        self.root, self.identity = root, identity
        self._named_directory = named_directory
        self._save_function = save_function
        self._native: Native | None = None
        self._hooks: TrainingHooks | None = None
        self._draws: Draws | None = None
        self._saver: Saver | None = None
        self._barrier: StepBarrier | None = None
        self._copies: Asker | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._exception_hook: ExceptionHook | None = None
        self._exit_hook: ExitHook | None = None
        self._periodic_settings = periodic
        self._periodic: PeriodicSaver | None = None
        self._base = 0
        self._given = _given_by_agent(identity.rank, needs_memory)
        self._agent_fd = -1 if self._given is None else self._given.agent
        self._events = EventLog(root)
        self._events.restart = environment.RESTART.get()
        self._off: str | None = None  # why no state is saved any more
        self._said: set[str] = set()
        self._first_step_reported = self._is_restored = self._has_named_unexpected = False
        self._restored_parts: Mapping[str, Any] | None = None  # what this rank alone knew
        self._progress_as_loop_began: Encoded | None = None
        self._buffer_versions = b""  # as the newest step ended
        self._loop = Loop(
            begins=self._loop_begins,
            boundary=self._boundary,
            write_again=self._write_again,
            put_back=self._put_back,
            warn=self._warn_on_first,
        )
        self._self_check = self_check
        self._checker: SelfChecker | None = None
        self._last_check: SelfChecker | None = None  # nothing but its thread may still be at work
        self._is_bare = not optimizers  # they are found as they make their steps
        self._found: Found | None = None
        device, problem = _device_of(model)
        self._host = HostState(
            model=model,
            optimizers=optimizers,
            wrappers=wrappers,
            schedulers=schedulers,
            scaler=scaler,
            extra=extra,
            device=device,
            loop=self._loop,
        )
        self._host.progress()  # whatever can't be saved is refused here and now
        tensors = [tensor for part in self._host.local().values() for tensor in part.tensors.values()]
        self._max_ahead = _max_ahead(sum(tensor.nbytes for tensor in tensors), local_state_limit)
        if step_barrier is None:
            step_barrier = _on_some_rank(identity, any(tensor.device.type != "cpu" for tensor in tensors))
        self._history = History(self._host)
        try:
            native = Native()
        except NativeError as error:
            problem = str(error)
        if problem is not None:
            warnings.warn(f"jitckpt: this job runs unprotected. {problem}", RuntimeWarning, stacklevel=3)
            return
        if step_barrier and identity.world_size > 1:
            self._barrier = StepBarrier()
        self._start(native, model, optimizers, scaler, local_state_limit)
        self._watch_from(self._base)

    @property
    def loop(self) -> Loop:
        """Where the training's loops are; for a framework, which has loops of its own."""
        return self._loop

    @property
    def is_protected(self) -> bool:
        """Whether there is a device and a library to protect it."""
        return self._native is not None

    def steps(self, number: int) -> Iterator[int]:
        """Iterate range(number) from where the job is, after `restore` if the script has not called it.

        One iteration is one minibatch, whatever optimizers make steps in it; one without an optimizer step
        belongs to the next. What is counted are iterations.

        Args:
            number: how many iterations the whole training has.
        """
        return self._loop.steps(number)

    def epochs(self, number: int) -> Iterator[int]:
        """Iterate range(number) from the epoch in which the job is; in it use `batches`, or `steps`.

        An epoch whose batches are all done, but whose end (an evaluation, a scheduler's step) is not followed
        by an optimizer step yet, comes again without batches: that end is made again, with all as it was.

        Args:
            number: how many epochs the whole training has.
        """
        return self._loop.epochs(number)

    def batches(self, loader: Iterable[Any]) -> Batches:
        """Return the loader's batches, of which a restart leaves out those that are done.

        One iteration is one minibatch, as with `steps`.

        Args:
            loader: torch's DataLoader; or one with state_dict and load_state_dict; or any other iterable,
                which is read again.
        """
        return self._loop.batches(loader)

    def restore(self) -> int:
        """Bring the job back to the newest saved step; returns the optimizer steps done, 0 on a fresh start.

        `steps`, `epochs` and `batches` know themselves where to go on.
        With a save function of your own, load what it wrote first (jit_get_checkpoint_path tells where from):
        here come back random numbers, `extra`, buffers, schedulers, scaler and the optimizers' host part.
        Raises CheckpointError if there are saves but none fits, or the save does not fit the model.
        """
        begun = time.monotonic()
        self._is_restored = True
        memory = None if self._snapshots is None else self._snapshots.found(self.identity)
        choice = _choice(self.root, self.identity, several_hosts=_on_several_hosts(), memory=memory)
        if self.given_step is not None and self.given_step != (choice.step if choice else 0):
            raise CheckpointError(
                f"jit_get_checkpoint_path gave rank {self.identity.rank} step {self.given_step}, but of that "
                "step another rank's part can't be loaded any more. Move that step's folder away: the "
                "same command then goes on from an older one."
            )
        self._tell_start(choice)
        if choice is None:
            folders.set_aside_after(self.root, 0, self.identity.rank)  # what an earlier try left
            if self._snapshots is not None:
                self._snapshots.restored(0)
            return 0
        for reason in choice.reasons:
            self._warn(f"A save was passed over: {reason}")
        if choice.newest > choice.step and self.identity.rank == 0:
            self._warn(
                f"Step {choice.step} is the newest that is whole for every shard; of step {choice.newest} a "
                f"part is lost, so at least {choice.newest - choice.step} minibatches are done again."
            )
        try:
            self._load(choice)
        except KeyError as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: it lacks {error}.") from error
        except (SaveError, TreeError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: {error}") from error
        folders.set_aside_after(self.root, choice.step, self.identity.rank)
        self.set_base(choice.step, None if choice.in_memory else choice.save.path)
        if self._snapshots is not None:
            self._snapshots.restored(choice.step if choice.in_memory else 0)
        seconds = time.monotonic() - begun
        path, source = str(choice.save.path), choice.save.rank
        rank = self.identity.rank
        self._report(protocol.Restored(rank, choice.step, path, source, seconds, choice.reason))
        return choice.step

    def _tell_start(self, choice: Choice | None) -> None:
        """The first start of a run says what it goes on from, and how it differs from the run before."""
        if self.identity.rank != 0 or self._events.restart > 0:
            return
        now = start_record.settings([one.optimizer for one in self._host.optimizers])
        try:
            if choice is not None and choice.save.metadata is not None:
                saved, job = choice.save.metadata.time, self.identity.job
                for sentence in start_record.told(self.root, choice.step, saved, job, now):
                    say(sentence)
            start_record.note_start(self.root, now)
        except (OSError, SaveError) as error:
            self._warn(f"How this start was made can't be noted in {self.root}: {error}")

    def set_base(self, step: int, path: Path | None) -> None:
        """Count the steps on from `step`, whose state was loaded from the save in `path`, or from memory."""
        self._base = step
        if self._native is not None and self._hooks is not None and self._saver is not None:
            self._saver.restored(step, path)
            self._hooks.step = step
            self._native.set_base(step)
            self._watch_from(self._base)

    def steps_on_device(self) -> int:
        """Return how many optimizer steps of the job the device has finished; 0 without protection."""
        return 0 if self._native is None else self._native.progress().device_ended

    def close(self) -> None:
        """End the protection; happens by itself when the process ends."""
        self._end(at_exit=False)
        directory_lock.release(self.root)

    def _end(self, *, at_exit: bool) -> None:
        global _current  # noqa: PLW0603
        if _current is self:
            _current = None
        if self._native is None or self._hooks is None:
            return
        atexit.unregister(self._at_exit)
        for one in self._beside:
            one.settled(self._hooks.step)
            one.wait()
        if self._checker is not None:
            self._checker.settled(self._hooks.step)
            self._last_check = self._checker
        if self._last_check is not None:
            self._last_check.wait(LAST_CHECK_SECONDS)
        # A training of few steps ends before the library has looked at the device again.
        until = time.monotonic() + LAST_LOOK_SECONDS
        while self._hooks.step > self._base and not self._first_step_reported and time.monotonic() < until:
            self._report_first_step()
            time.sleep(0.01)
        if rehearsal := environment.REHEARSAL_DIR.get():
            state = final_state.of(self._hooks.step, self._host)
            final_state.write(Path(rehearsal) / final_state.FOLDER, self.identity.rank, state)
        if at_exit and self._agent_fd >= 0 and self.identity.world_size > 1:
            self._stay()
        self._hooks.detach()
        self._unwatch()
        if self._draws is not None:
            self._draws.end()
        if not at_exit:
            self._loop.close()
        if self._exception_hook is not None:
            self._exception_hook.remove()
        if self._exit_hook is not None:
            self._exit_hook.remove()
        self._report(protocol.Finished(self.identity.rank, self._hooks.step, at_exit))
        self._native.stop()  # a save that is under way still reports
        self._native = None

    def _stay(self) -> None:
        """Wait, with the state, until the scripts of all ranks are at their ends: another may yet fail."""
        if self._exit_hook is None or self._exit_hook.status != 0:
            return  # its end is a failure
        self._report(protocol.AtEnd(self.identity.rank))
        at_end.stay(lambda: self._agent_fd < 0 or local_state.may_end(self._ring.descriptor))

    # What the hooks tell (jitckpt.hooks.torch_training.Listener).

    @_harmless
    def minibatch_begun(self, step: int) -> None:
        pending = any(one.is_pending(step - 1) for one in self._beside)
        changed = self._outside.minibatch_begun(step, look=pending)
        self._history.settle(step - 1)
        if changed and self._host.model is not None:
            self._history.hold(step - 1, self._host.model.held())
        if self._found is not None:
            self._found.settle(step - 1)
        for one in self._beside:
            if one.is_pending(step - 1) and changed and self._outside.is_counted(step):
                one.copy_again(self._history.shared(step - 1))
            elif one.is_pending(step - 1) and changed:
                one.cancel(step - 1)
            if self._outside.tells_apart:
                one.step_begins()  # what comes now may change what it copies
            one.settled(step - 1)
        self._settle_check(step - 1)
        if self._history.is_irregular:
            self._warn_once(IRREGULAR)

    @_harmless
    def passed_again(self, step: int) -> None:
        self._history.settle_again(step - 1)  # the pass before was an evaluation's, perhaps

    @_harmless
    def forward_ended(self, step: int) -> None:
        if self._draws is not None:
            self._draws.forward_ended()
        if not self._recorder.write_again(step, final=False):
            self._write_local(step, final=False)
        if self._copies is not None and self._barrier is None:
            self._copies.wait(step)  # the next collective may be the last that the others need

    def end_steps_at_boundary(self) -> None:
        """A minibatch ends as the loop goes on, and not with the optimizers' own steps."""
        if self._hooks is not None:
            self._hooks.only_at_boundary = True

    def put_back(self) -> None:
        """Put back once more what this rank alone knew after the restored step."""
        if self._restored_parts is not None:
            self._host.restore_local(self._restored_parts)

    def write_before_step(self) -> None:
        """Write what this rank alone knows once more: it knows more since the forward pass."""
        if self._hooks is not None:
            self.forward_ended(self._hooks.step + 1)

    def step_begun(self, step: int) -> None:
        assert self._native is not None
        self._step_begins(step)
        if self._barrier is not None:
            self._native.step_enter()
            self._barrier.enqueue()
        self._native.step_begin(step, self._stream())
        if self._loop.is_used:
            self._native.await_boundary(True)

    @_harmless
    def _step_begins(self, step: int) -> None:
        assert self._hooks is not None
        if self._draws is not None:
            self._draws.step_begins()
        if self._save_function is not None:
            self._find(step)
        is_unknown = self._outside.step_begun(step)
        for one in self._beside:
            one.step_begins()
            if is_unknown:
                one.cancel(step - 1)
        if self._checker is not None:
            self._checker.step_begins()
            if self._checker.is_done:
                self._last_check, self._checker = self._checker, None
        if self._barrier is not None and self._copies is not None:
            # Without this rank's part in the barrier no other makes the step.
            self._copies.wait(step, partial(self._ring.is_written, step))

    @_harmless
    def closure_again(self, step: int) -> None:
        self._outside.closure_again(step)

    def unequal_turns(self, step: int) -> None:
        self._switch_off(UNEQUAL_TURNS)

    def step_ended(self, step: int) -> None:
        assert self._native is not None
        self._step_ends(step)
        self._native.step_end(step, self._stream())
        self._step_is_over(step)

    @_harmless
    def _step_ends(self, step: int) -> None:
        if self._host.model is not None and self._host.model.follow():
            self._say_structure(step, self._host.model)
        if step == self._base + 1:
            if self._host.model is not None:
                self._host.model.look_again()
            self._write_local(step, final=True)
        elif not self._recorder.write_again(step, final=True):
            self._write_local(step, final=True)
        shared = self._host.shared()
        self._history.add(step, shared)
        parameters = [] if self._host.model is None else [self._host.model.memory]
        watched = [*parameters, *(part.device for part in shared.optimizers)]
        self._outside.ended(step, watched, shared.all_tensors)
        if self._loop.is_used:
            self._buffer_versions = self._host.buffer_versions()
        if self._module_numbers is not None:
            for one in self._module_numbers.changed():
                self._warn_once(
                    f"A save lacks {one}, which changes while the model trains: after a restart it is as the "
                    "script builds it. If that matters, and `extra` does not hold it, make it a buffer."
                )
        if (refusal := self._host.refusal()) is not None:
            self._switch_off(refusal)
        for problem in self._host.problems():
            self._warn_once(
                f"{problem}, and can't be saved without pickle: after a restart it is as the script builds "
                "it. Keep what matters in `extra`, or let its state_dict say it."
            )

        if self._found is not None:
            self._found.add(step)
            self._found.forget_before(step - self._max_ahead - KEPT_BESIDE)

    @_harmless
    def _step_is_over(self, step: int) -> None:
        if not self._loop.is_used:
            self._save_periodically(step)
        if self._checker is not None:
            self._checker.step_ended(step, self._host.local, self._history.shared(step))
        self._history.forget_before(
            step - self._max_ahead - KEPT_BESIDE
        )  # the device has come further than that
        if not self._first_step_reported:
            self._report_first_step()

    def _say_structure(self, step: int, model: ModelState) -> None:
        """Parameters have come or gone, and a start builds the model as the script does."""
        new, gone = model.structure()
        changes = [f"has got {', '.join(new[:SHOWN_NAMES])}"] if new else []
        changes += [f"has lost {', '.join(gone[:SHOWN_NAMES])}"] if gone else []
        if changes:
            self._warn_once(
                f"After step {step} the model {' and '.join(changes)}, which your script builds otherwise. "
                "A restart can go on from later saves only if the script builds the model as it is now "
                "before it calls jitckpt.init; else it is refused there."
            )

    def _switch_off(self, reason: str) -> None:
        """Take no save any more: what can't be saved whole is not saved."""
        if self._off is None:
            self._off = reason
            step = self._base + 1 if self._hooks is None else self._hooks.step + 1
            self._warn(
                f"No state of this rank is saved from step {step} on: {reason} The training goes on; after a "
                "failure the job goes back to a save from before."
            )

    @_harmless
    def _watch_from(self, step: int) -> None:
        """The parameters are as the script has built them, or as they were after `step`."""
        self._outside.begins(step, {} if self._host.model is None else self._host.model.memory)

    def minibatch_ended(self, step: int) -> None:
        assert self._native is not None
        self._settle_at_boundary(step)
        self._native.await_boundary(False)

    @_harmless
    def _settle_at_boundary(self, step: int) -> None:
        changed = self._outside.minibatch_begun(step + 1, boundary=True)
        self._history.settle(step)
        if changed and self._host.model is not None:
            self._history.hold(step, self._host.model.held())
        self._write_at_boundary(step)
        self._save_periodically(step)
        for one in self._beside:
            if self._outside.tells_apart:
                one.step_begins()  # what comes now may change what it copies
            one.settled(step)
        if self._found is not None:
            self._found.settle(step)
        self._settle_check(step)

    def _settle_check(self, step: int) -> None:
        if self._checker is not None:
            if self._outside.tells_apart:
                self._checker.step_begins()
            self._checker.settled(step)

    def drawn_ahead(self) -> None:
        self._warn_once(
            "The loop draws its next batch between a forward pass and the optimizer step, so after a failure "
            f"that batch would be left out. Draw it at the top of the loop: write {TWO_LINES}, or next() as "
            "the first thing in an iteration."
        )

    def steps_again(self) -> None:
        self._warn_once(
            "Several optimizer steps are made in one iteration, before it was one: a failure between these "
            "would go on with the next iteration. From the next one on they are taken as one."
        )

    def several_steps(self) -> None:
        if self._periodic_settings.every is None:
            self._warn_once(
                "Several optimizer steps are made in one iteration. A failure between them, in which no rank "
                "comes to the end of the iteration, leaves nothing to save: the job goes back to an older "
                "save. Give jitckpt.init save_every=..., so that there is one."
            )

    # What the loop tells and asks (jitckpt.data.loop.Loop).

    def _loop_begins(self) -> None:
        if not self._is_restored:
            self.restore()
        self._history.waits_for_boundary = True
        if self._native is not None:
            self._watch_from(self._base)  # what the script has done since init is in every start
        if self._restored_parts is not None:
            self._progress_as_loop_began = self._host.progress()

    def _boundary(self) -> bool:
        return self._hooks is not None and self._hooks.boundary()

    @_harmless
    def _write_again(self) -> None:
        """Write what this rank alone knows after the newest step again, if the loop's end has changed it."""
        if self._hooks is not None and self._hooks.step > self._base:
            step, unchanged = self._hooks.step, self._host.unchanged()
            if self._loop.last_boundary:
                self._loop.told_boundary(step)
            self._recorder.write_if_changed(step, self._host.local(), unchanged)

    def _write_at_boundary(self, step: int) -> None:
        """Write the same again if the script has changed it after its optimizer step.

        From the first time on it is done in every minibatch: then it tells whether a rank came to its end.
        """
        changed = self._host.buffer_versions() != self._buffer_versions
        if not (changed or self._loop.last_boundary) and self._recorder.is_as_written():
            return
        if changed or self._loop.last_boundary or not self._recorder.is_taken(self._host.local()):
            self._loop.told_boundary(step)
            self._write_local(step, final=True)

    def _put_back(self) -> None:
        if self._restored_parts is not None and self._progress_as_loop_began is not None:
            self._host.restore_local(self._restored_parts)
            self._host.restore_progress(self._progress_as_loop_began)

    def _save_periodically(self, step: int) -> None:
        for one in self._beside:
            if one.is_due(step):
                one.step_ended(step, self._host.local(), self._history.shared(step))

    def _find(self, step: int) -> None:
        """Find what a save function may read although init was not given it; optimizers make steps."""
        assert self._hooks is not None
        watched = self._hooks.watched
        if self._hooks.unexpected is not None and not self._has_named_unexpected:
            self._has_named_unexpected = True
            self._warn(f"No save can be made: {several_optimizers(self._hooks.unexpected)}")
        if len(watched) > len(self._host.optimizers):
            known = [state.optimizer for state in self._host.optimizers]
            for optimizer in watched:
                if all(optimizer is not one for one in known):
                    self._host.add_optimizer(optimizer)
        if step == self._base + 1:
            self._found = found.look(
                [one.scheduler for one in self._host.schedulers], self._hooks.found_scaler
            )
            if self._found is not None:
                self._host.changing_code |= self._found.host.changing_code
                assert self._saver is not None
                self._saver.found = self._found
            if self._host.model is None and (names := found.buffers_of(watched)):
                self._warn(
                    f"jitckpt.init was not given the model, which has buffers ({', '.join(names[:3])}): a "
                    "save function may read them as the forward pass of the next minibatch has left them. "
                    "Give jitckpt.init the model (model=...), and restore() puts them back as they were."
                )

    def _why_not_call(self, step: int) -> str | None:
        """Return why a save function can't be called for the state after a step, if so."""
        assert self._hooks is not None
        if self._hooks.unexpected is not None:
            return several_optimizers(self._hooks.unexpected)
        if (
            self._is_bare
            and step == self._base + 1
            and not (self._hooks.is_learned and len(self._hooks.watched) == 1)
            and len(parallel.all_of(Optimizer)) > 1
        ):
            return (
                f"After step {step}, the first one, it is not known yet which optimizers make up a "
                "minibatch: give them to jitckpt.init (optimizer=...)."
            )
        return None

    def _post(self, step: int, digests: Mapping[str, str]) -> tuple[int, Mapping[str, str]] | None:
        """Tell the replicas of this rank's state what it is, or hear it of the first one that told."""
        if not torch.distributed.is_initialized():
            return None
        store = torch.distributed.distributed_c10d._get_default_store()
        key = f"jitckpt/self-check/{self._events.restart}/{self.identity.shard}/{step}"
        told = store.compare_set(key, "", json.dumps([self.identity.rank, digests]))
        rank, others = json.loads(told)
        return None if rank == self.identity.rank else (rank, others)

    def _is_first_to_say(self) -> bool:
        """Whether no replica of this rank has said before that they differ."""
        store = torch.distributed.distributed_c10d._get_default_store()
        said: int = store.add(f"jitckpt/self-check/{self._events.restart}/{self.identity.shard}/said", 1)
        return said == 1

    def _write_local(self, step: int, final: bool) -> None:
        self._recorder.write(step, final, self._host.local(), self._host.unchanged())

    def _start(
        self,
        native: Native,
        model: nn.Module | None,
        optimizers: list[Optimizer],
        scaler: Any,
        local_state_limit: int,
    ) -> None:
        ring_fd = local_state.create() if self._given is None else self._given.state
        slots = self._max_ahead + KEPT_BESIDE
        ring = self._ring = local_state.Ring(ring_fd, self.identity, slots, local_state_limit)
        self._recorder = local_state.Recorder(ring, native.write_area, self._warn)
        assert self._host.device is not None
        self._stream = partial(current_stream, self._host.device)
        self._outside = OutsideChanges(Mirror(native.write_word, self._stream), self._warn)
        if self._given is not None and self._given.copies is not None:
            self._copies = Asker(self._given.copies, self._warn)
        self._saver = Saver(
            root=self.root,
            identity=self.identity,
            native=native,
            host=self._host,
            history=self._history,
            ring=ring_fd,
            save_function=self._save_function,
            replacement=self._outside.replacement,
            has_whole_copies=self._outside.has_all_of,
            refused=lambda: self._off,
            staging=Staging(environment.STAGING.get(), pinned=True),
            report=self._report,
            keep=self._periodic_settings.keep,
            why_not=self._why_not_call,
            memory=None if self._given is None else self._given.memory,
        )
        if self._save_function is None:
            self._periodic = PeriodicSaver(
                self._periodic_settings,
                root=self.root,
                identity=self.identity,
                host=self._host,
                history=self._history,
                wanted_step=ring.wanted_step,
                write_word=native.write_word,
                report=self._report,
                warn=self._warn,
            )
            self._beside = [self._periodic]
            self._begin_snapshots(native)
            if model is not None and self._self_check != NO_SELF_CHECK:
                self._checker = SelfChecker(
                    model=model,
                    host=self._host,
                    history=self._history,
                    rank=self.identity.rank,
                    full=self._self_check == FULL_SELF_CHECK,
                    write_word=native.write_word,
                    post=self._post if self.identity.world_size > 1 else None,
                    may_say=self._is_first_to_say,
                    found_scaler=lambda: None if self._hooks is None else self._hooks.found_scaler,
                    report=self._report,
                    warn=self._warn,
                )
        native.start(
            agent_fd=self._agent_fd,
            hang_timeout=environment.HANG_TIMEOUT.get(),
            hang_floor=environment.HANG_FLOOR.get(),
            settle=SETTLE_SECONDS,
            max_ahead=self._max_ahead,
            save=self._saver,
        )
        self._native = native
        self._unwatch = parameter_data.watch(self._outside.taken)
        if model is not None:
            self._module_numbers = ModuleNumbers(host_state.unwrapped(model))
        self._draws = Draws(model, lambda: self._loop.is_used, self._warn_on_first)
        self._hooks = TrainingHooks(
            self,
            model=model,
            optimizers=optimizers,
            scaler=scaler,
            on_phase=self._injector(native),
            every_optimizer=True,
            every_scaler=True,
        )
        self._report(
            protocol.Registered(
                rank=self.identity.rank,
                pid=os.getpid(),
                world_size=self.identity.world_size,
                shard=self.identity.shard,
                shards=self.identity.shards,
                fingerprint=self.identity.fingerprint,
                saver="builtin" if self._save_function is None else "callback",
                checkpoint_dir=str(self.root),
                named_directory=self._named_directory,
                stack_signal=stack_writer().signal_number,
                stack_fd=stack_writer().descriptor,
            )
        )
        if self.identity.world_size > 1 and self._agent_fd >= 0:
            for name, ranks in parallel.named_groups():
                self._report(protocol.Group(self.identity.rank, name, list(ranks)))
        atexit.register(self._at_exit)
        self._exception_hook = ExceptionHook(self._report_exception)
        self._exit_hook = ExitHook()

    def _begin_snapshots(self, native: Native) -> None:
        """Use the memory tier, if the agent has given one."""
        if self._given is None or self._given.memory is None:
            return
        timeline = uuid.uuid4().hex
        if torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()
            timeline = hear_first(store, "timeline", self.identity.rank, timeline)
        self._snapshots = Snapshots(
            snapshots.given(self._given.memory),
            identity=self.identity,
            timeline=timeline,
            host=self._host,
            history=self._history,
            write_word=native.write_word,
            warn=self._warn,
        )
        self._beside = [*self._beside, self._snapshots]

    def _load(self, choice: Choice) -> None:
        saved = choice.in_memory or folders.read(choice.save)
        document, tensors = saved.document, saved.tensors
        tensors = strides.all_laid_out(tensors, document["strides"])
        builtin = choice.save.metadata is not None and choice.save.metadata.saver == "builtin"
        if builtin:
            self._host.restore_parameters(tensors, document["frozen"])
        self._host.restore_shared(document, tensors, whole=builtin)
        self._history.expect_scheduler_steps(document["usual_scheduler_steps"])
        if document["unsettled"]:
            self._warn(
                f"The failure came after step {choice.step} and before the next minibatch. What the script "
                "does there now and then (an evaluation, a scheduler's step) was not done and is not made up."
            )
        local, local_tensors = document["local"], tensors
        if choice.local is None:
            self._warn(
                f"Rank {self.identity.rank} left no state of its own after step {choice.step}: random "
                f"numbers, extra and buffers come from rank {choice.save.rank}, so this run will differ from "
                "an undisturbed one."
            )
        elif choice.local is not choice.save:
            own_state = folders.read(choice.local)
            local = own_state.document["local"]
            local_tensors = tensors | own_state.tensors
            replaced = [*local["missing"], *local["left_out"]]
            local["trees"] = {
                name: local["trees"].get(name, tree) for name, tree in document["local"]["trees"].items()
            }
            if replaced:
                self._warn(
                    f"What rank {self.identity.rank} did not keep of its own state "
                    f"({', '.join(replaced[:5])}) comes from rank {choice.save.rank}."
                )
        parts = host_state.local_parts(local, local_tensors, self._host.device)
        self._host.restore_local(parts)
        self._restored_parts = parts
        self._restore_loop(choice, document, tensors, parts)

    def _restore_loop(
        self,
        choice: Choice,
        document: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        parts: Mapping[str, Any],
    ) -> None:
        if "loop" not in parts:
            self._loop.count_from(choice.step)
            return
        of_saver = host_state.local_parts(document["local"], tensors, None).get("loop")
        drawn = self._loop.restore(parts["loop"], of_saver, choice.step)
        if not drawn:
            self._warn(
                f"Rank {self.identity.rank} may have failed between its optimizer step {choice.step} and the "
                "end of that iteration. The script draws random numbers there, and those are lost: this run "
                "may differ from an undisturbed one. At the end of an epoch of job.epochs it would be exact."
            )
        if not document.get("at_boundary", True):
            self._warn_on_first(
                f"The state after step {choice.step} was saved before the script came to the end of that "
                "iteration, so what it still did there (an evaluation, a scheduler's step) is left out. At "
                "the end of an epoch of job.epochs it would be made again."
            )

    def _injector(self, native: Native) -> Callable[[int, str], None] | None:
        specs = injection.from_environment(environment.FAULTS.get(), self.identity.rank)
        if not specs:
            return None
        arm_device = proxy_faults.taken_over() or injection.arm_device
        return injection.Injector(specs, self._report_fault, native.arm_fault, arm_device).on_phase

    def _report_fault(self, spec: injection.FaultSpec) -> None:
        self._report(protocol.Fault(self.identity.rank, str(spec), spec.step, spec.phase))

    def _report_exception(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        self._report(protocol.Raised(self.identity.rank, text))

    def _report_first_step(self) -> None:
        if self._native is not None and self._native.progress().device_ended > self._base:
            self._first_step_reported = True
            if self._agent_fd >= 0:
                self._report_loaded()
            self._report(protocol.FirstStep(self.identity.rank, self._base + 1))

    def _report_loaded(self) -> None:
        modules = spare.importable_modules(sys.modules)
        changed = [list(pair) for pair in spare.changed_environment(os.environ).items()]
        for begin in range(0, len(modules), spare.MODULES_IN_A_MESSAGE):
            part = modules[begin : begin + spare.MODULES_IN_A_MESSAGE]
            self._report(protocol.Loaded(self.identity.rank, part, changed if begin == 0 else []))

    def _report(self, message: protocol.Message) -> None:
        """Tell the agent; without one, or after its death, the checkpoint directory's events."""
        if self._native is not None and self._agent_fd >= 0:
            try:
                self._native.report(protocol.encode(message))
                return
            except NativeError:
                self._agent_fd = -1  # the agent is dead; the library has the state saved all the same
        self._events.write(message.type, **asdict(message))

    def _warn(self, text: str) -> None:
        warnings.warn(f"jitckpt: {text}", RuntimeWarning, stacklevel=3)
        self._report(protocol.Warning(self.identity.rank, text))

    def _warn_on_first(self, text: str) -> None:
        """For what all ranks see alike."""
        if self.identity.rank == 0:
            self._warn(text)

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn_on_first(text)

    def _at_exit(self) -> None:
        if hasattr(sys, "last_value"):  # an exception ends the process: it has not finished
            if self._native is not None:
                self._native.stop()
        else:
            self._end(at_exit=True)


def _max_ahead(local_bytes: int, limit: int) -> int:
    """Return how many steps the host may be ahead: what this rank alone knows is kept for each of them."""
    if environment.FAULTS.get():
        return MAX_AHEAD[-1]  # the steps of rehearsed failures are the host's: it stays near to its device
    return next(
        (
            steps
            for steps in MAX_AHEAD
            if local_state.area_bytes(limit, steps + KEPT_BESIDE)
            >= ROOM_TO_GROW * max(local_bytes, local_state.PAGE)
        ),
        MAX_AHEAD[-1],
    )


def _listed(what: str, given: Any, kind: type) -> list[Any]:
    found = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(
                f"{what} is a {type(item).__name__}; it must be a {kind.__name__} or a list of them."
            )
    return found


def _optimizers(given: Any) -> tuple[list[Optimizer], dict[int, list[object]]]:
    """Return the optimizers of torch's among or inside of what was given, and by id() what is around each."""
    found: list[Optimizer] = []
    around: dict[int, list[object]] = {}

    def look(one: object, wrappers: list[object]) -> None:
        # Some wrappers are optimizers by their class alone and never were made as such.
        if isinstance(one, Optimizer) and "param_groups" in vars(one) and "state" in vars(one):
            if not any(one is known for known in found):
                found.append(one)
                around[id(one)] = wrappers
            return
        for name in AROUND_OPTIMIZERS:
            inner = getattr(one, name, None)
            listed = inner if isinstance(inner, list | tuple) else [inner]
            if inner is not None and len(wrappers) < DEEPEST_WRAPPER and not isinstance(inner, str):
                for part in listed:
                    look(part, [*wrappers, one])
                return
        raise TypeError(
            f"optimizer is a {type(one).__name__}; it must be a torch.optim.Optimizer, a list of them, or an "
            f"object that has them as {', '.join(AROUND_OPTIMIZERS)}."
        )

    for one in [] if given is None else given if isinstance(given, list | tuple) else [given]:
        look(one, [])
    return found, around


def _check_arguments(
    save_checkpoint: object,
    model: object,
    optimizers: list[Any],
    schedulers: list[Any],
    extra: object,
    *,
    save_every: int | None,
    keep: int,
) -> None:
    if save_checkpoint is None and (model is None or not optimizers):
        raise TypeError("jitckpt.init needs save_checkpoint=..., or model=... and optimizer=...")
    if save_checkpoint is not None and not callable(save_checkpoint):
        raise TypeError(f"save_checkpoint is a {type(save_checkpoint).__name__}; it must be a function.")
    if save_every is not None and (save_every < 1 or save_checkpoint is not None):
        raise ValueError(
            f"save_every is {save_every}; it must be at least 1, and it is for jitckpt's own saves: a save "
            "function can't run beside the training."
        )
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one save has to stay.")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if save_checkpoint is None and isinstance(model, nn.Module):
        for name, parameter in parallel.parameters(model).items():
            kind = type(parallel.local(parameter))
            if kind is not torch.Tensor:
                raise TypeError(
                    f"The parameter {name} is a {kind.__name__}; jitckpt's own saver knows plain tensors and "
                    "DTensors of them: give jitckpt.init a save function (save_checkpoint=...)."
                )
    for name, one in [("scheduler", scheduler) for scheduler in schedulers] + [("extra", extra)]:
        if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(f"{name} is a {type(one).__name__}, which has no state_dict and load_state_dict.")


def _self_check(given: bool | None) -> str:
    """Return which check to make; a rehearsal asks for all of it."""
    wanted = environment.SELF_CHECK.get()
    if given is None or (given and wanted == FULL_SELF_CHECK):
        return wanted
    return SAMPLED_SELF_CHECK if given else NO_SELF_CHECK


def _root(checkpoint_dir: str | os.PathLike[str] | None) -> Path:
    """Return the checkpoint directory to use."""
    if rehearsal := environment.REHEARSAL_DIR.get():
        return rehearsal.absolute() / DEFAULT_DIRECTORY
    named = _named_directory(checkpoint_dir)
    # A script may make each start a working directory of its own.
    return Path(environment.FIRST_DIRECTORIES.get().get(named, named)).absolute()


def _named_directory(checkpoint_dir: str | os.PathLike[str] | None) -> str:
    return os.fspath(checkpoint_dir or environment.CHECKPOINT_DIR.get())


def _check_directory(root: Path, rank: int) -> None:
    """See to it that all ranks of a host have one checkpoint directory."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    status = root.stat()
    own = json.dumps([status.st_dev, status.st_ino, str(root)])
    host, place = os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_RANK", rank))
    told = json.loads(hear_first(store, f"checkpoint directory of host {host}", place, own))
    if told[:2] != [status.st_dev, status.st_ino]:
        raise CheckpointError(
            f"Rank {rank} has the checkpoint directory {root}, the first of its host {told[2]}. All have "
            "to have the same: give an absolute path, or change the working directory after jitckpt.init."
        )


def _job_id(root: Path, rank: int) -> str:
    """Return the job's id; each of several hosts may have a checkpoint directory of its own."""
    told = _told_by_first("job", rank, folders.open_directory(root) if rank == 0 else "")
    found = folders.open_directory(root, told)
    _check_directory(root, rank)
    if (unlocked := directory_lock.hold(root, _run_id(rank))) is not None and rank == 0:
        warnings.warn(f"jitckpt: {unlocked}", RuntimeWarning, stacklevel=4)
    if told not in (None, found):
        raise CheckpointError(
            f"{root} of rank {rank} belongs to another job than that of rank 0. Choose another checkpoint "
            "directory, or move one of them away."
        )
    return found


def _run_id(rank: int) -> str:
    """Return which run this process is of, as all its ranks and agents call it."""
    run = environment.RUN.get()
    if run is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
        run = hear_first(store, "run", rank, uuid.uuid4().hex)
    if run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        run = "/".join(
            os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        )
    return run or uuid.uuid4().hex


def _choice(
    root: Path, identity: Identity, *, several_hosts: bool, memory: OwnShard | None = None
) -> Choice | None:
    """Return what this rank goes on from; None for a fresh start. Raises CheckpointError.

    Where what this rank could see does not decide for all, they agree: then every rank has to call it.
    """
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if initialised and (identity.shards > 1 or several_hosts or memory is not None):
        store = torch.distributed.distributed_c10d._get_default_store()
        return same_step.together(store, root, identity, memory)
    if identity.shards > 1:
        return selection.choose(folders.find(root), identity, folders.verify)
    return same_step.alone(root, identity)


def _on_several_hosts() -> bool:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def _told_by_first(what: str, rank: int, value: str) -> str | None:
    """Return what rank 0 gives as `value`; None where all ranks are on one host, which needs no agreement."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (_on_several_hosts() and initialised):
        return None
    return hear_first(torch.distributed.distributed_c10d._get_default_store(), what, rank, value)


def _on_some_rank(identity: Identity, value: bool) -> bool:
    """Return whether it is so on some rank, where there are several hosts."""
    if not environment.COPIES_FD.is_set() or not torch.distributed.is_initialized():
        return False
    store = torch.distributed.distributed_c10d._get_default_store()
    return any_rank(store, "a device keeps a state of its own", identity.rank, identity.world_size, value)


def _layout(
    rank: int, world_size: int, model: nn.Module | None, optimizers: list[Optimizer]
) -> Layout | None:
    """Return which rank holds which part of the state; None where there is nothing to find that out from."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if model is None or not initialised or world_size == 1:
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    held = parallel.holding(host_state.unwrapped(model), optimizers)
    return agree(store, rank, world_size, held)


def _without_replicas(layout: Layout) -> str:
    ranks = layout.alone()
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return (
        f"Part of this job's state has no replica: {len(ranks)} of its {len(layout.shards)} ranks ({shown}) "
        f"hold alone what they hold ({layout.text}). When one of these is lost, its part can't be saved any "
        "more, and the job goes back to an older step: start it with `jitckpt run --memory-tier auto`, which "
        "keeps it in host memory after each step, or give jitckpt.init save_every=..., so that there is one."
    )


def _lacks_replicas(layout: Layout | None, shards: int) -> bool:
    """Return whether some rank's state has no replica (on another host, where there are several)."""
    if layout is None:
        return shards > 1
    count = len(layout.shards)
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    each = count // hosts if hosts > 1 and count % hosts == 0 else 1
    places: dict[int, set[int]] = {}
    for rank, shard in enumerate(layout.shards):
        places.setdefault(shard, set()).add(rank // each)
    return any(len(on) == 1 for on in places.values())


def _given_by_agent(rank: int, needs_memory: bool) -> descriptors.Given | None:
    """Return what the agent has given this process; None, with a warning, if that is not there to be used."""
    try:
        given = descriptors.claim(rank)
        return given if given is None or needs_memory else replace(given, memory=None)
    except descriptors.NotOursError as error:
        warnings.warn(
            f"jitckpt: {error} So rank {rank} runs as without an agent: it saves by itself when it is sent "
            "SIGTERM or sees a hang, nothing is kept of what only this rank knows (random numbers, data "
            "position) if it dies, and an exception of its own ends it without a save by the others. Have "
            "`jitckpt run --nproc-per-node N` start each rank's Python itself.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _device_of(model: nn.Module | None) -> tuple[torch.device | None, str | None]:
    """Return the job's device, and why there is nothing to protect if so."""
    if not torch.cuda.is_available():
        return None, "There is no CUDA device; `jitckpt run` or `jitckpt exec` brings one without a GPU."
    if model is None:
        return torch.device("cuda", torch.cuda.current_device()), None
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        places = ", ".join(sorted(map(str, devices))) or "nowhere"
        return None, f"Its model is on {places}; jitckpt protects models on one CUDA device a process."
    return devices.pop(), None
