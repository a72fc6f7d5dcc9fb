"""The worker's side: `init` puts a training job under protection, `restore` brings it back."""

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from jitckpt.bindings.interpose import Native
from jitckpt.console import say
from jitckpt.data.loop import Batches, Loop
from jitckpt.decisions import elastic
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.errors import (
    JitckptError,
    NativeError,
)
from jitckpt.events import EventLog
from jitckpt.saves import directory_lock, folders
from jitckpt.saves.layout import Identity
from jitckpt.state import host_state, kept
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import VariablesNow
from jitckpt.state.parallel import DeviceBarrier
from jitckpt.state.plain_attributes import PlainAttributes
from jitckpt.state.schedules import Stateful
from jitckpt.state.shards import Layout
from jitckpt.wire import environment
from jitckpt.worker import agreements, arguments, directory, memory_use, resharding, told_at_start
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.checkpoint_path import CheckpointPath
from jitckpt.worker.epoch_head import EpochHead
from jitckpt.worker.protection import Protection
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.restore import Restore
from jitckpt.worker.restored_state import RestoredState
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.periodic import PeriodicSettings
from jitckpt.worker.saving.saver import SaveFunction
from jitckpt.worker.scripts_epochs import ScriptsEpochs
from jitckpt.worker.scripts_state import ScriptsState
from jitckpt.worker.steps_ahead import max_ahead
from jitckpt.worker.unprotected import Unprotected

CALLED_TWICE = "jitckpt.init was called twice in this process; call close() on the first job before."
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
    memory: str | Mapping[str, Any] | None = None,
    accumulation: int = 1,
    keep_found: bool = True,
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
        extra: any object with state_dict and load_state_dict. Kept is what state_dict() says at the end of an
            iteration of `batches` or `steps`, in other loops as the optimizer step returns. Where it changes
            between forward pass and step, give step_barrier=True, too.
        shard: which part of the state this rank holds, from 0, where replicas are split up over ranks
            (default: found from the model). Give it with `shards`, on all ranks or on none.
        shards: how many parts there are.
        step_barrier: let no rank begin an optimizer step before every rank's gradients are there, by an
            all-reduce of one element over all ranks (default: where there is more than one shard; and on
            several hosts where a rank keeps something of its own on its device, such as BatchNorm's
            statistics). Without it shards may be a step apart when a failure comes, and then no step is
            whole; and a host that is lost may have had the only copy of what its devices kept.
        save_every: save after each step that is a multiple of it, beside the training, for failures that no
            replica survives. Takes as much page-locked host memory as this rank's state, or, where the memory
            tier has the step, as much host memory while it is written. One replica of each shard writes.
        keep: how many whole periodic saves stay.
        local_state_limit: bytes of host memory for what this rank alone knows of the last steps.
        self_check: after the first steps restore what a save would hold into copies of the objects, compare
            them, and compare replicas; a warning names what differs (default: JITCKPT_SELF_CHECK, else True).
        memory: keep the whole state in host memory, too, for jobs without replicas: "auto", "off", "peer" or
            "peer=3" as for `jitckpt run --memory-tier`, which goes before it; or a dict of tier, every, limit
            (MiB) and keep (seconds), as for the options of these names.
        accumulation: how many micro-batches each rank makes in an optimizer step when no host is missing;
            while some are (`jitckpt run --min-hosts`) job.accumulation_steps says how many.
        keep_found: where jitckpt saves by itself, keep also what it was not given and finds as it is called:
            torch's schedulers of these optimizers, a GradScaler, and generators of random numbers that the
            script has in its variables. False for a script that brings them back itself.

    Returns:
        The job. Take its epochs, batches or steps in the place of your own.

    Raises:
        CheckpointError: The directory can't be used.
        TreeError: Some state can't be saved without pickle.
        TypeError: An argument is of a wrong type.
        ValueError: An argument has a wrong value.
    """
    global _current  # noqa: PLW0603
    if _current is not None:
        raise JitckptError(CALLED_TWICE)
    optimizers, wrappers = arguments.unwrapped(optimizer)
    schedulers = arguments.listed("scheduler", scheduler, object)
    arguments.check(save_checkpoint, model, optimizers, schedulers, extra, save_every=save_every, keep=keep)
    arguments.check_accumulation(accumulation)
    finds = keep_found and save_checkpoint is None
    root = directory.root_of(checkpoint_dir)
    identity, layout = _who(root, model, optimizers, arguments.said_shard(shard, shards))
    use = memory_use.of_job(memory, identity, layout, model, optimizers)
    _current = Job(
        Arguments(
            root=root,
            named_directory=directory.named_directory(checkpoint_dir),
            identity=identity,
            save_function=save_checkpoint,
            model=model,
            optimizers=optimizers,
            wrappers=wrappers,
            schedulers=schedulers,
            scaler=scaler,
            extra=extra,
            periodic=PeriodicSettings(save_every, keep, layout is None or layout.is_first(identity.rank)),
            local_state_limit=local_state_limit,
            self_check=arguments.self_check(self_check),
            accumulation=accumulation,
            kept=kept.find(model, optimizers, schedulers, scaler, extra) if finds else None,
            replicas=use.replicas_of(identity.rank),
            cut_among=use.cut_among,
        ),
        step_barrier=True if step_barrier is None and identity.shards > 1 else step_barrier,
        memory=use.needed,
    )
    _count_on(_current)
    reporter, has_tier = _current._reporter, _current.memory is not None
    told_at_start.of_batch(reporter, identity, accumulation)
    told_at_start.of_memory(reporter, identity, use, has_tier=has_tier)
    told_at_start.of_risk(reporter, identity, layout, save_checkpoint, save_every, has_tier=has_tier)
    return _current


def _count_on(job: "Job") -> None:
    """Count the steps of a job on from the save that the script has loaded before jitckpt.init, if it has."""
    global _base_of_next_job  # noqa: PLW0603
    if _base_of_next_job is not None:
        job.set_base(*_base_of_next_job)
        _base_of_next_job = None


def jit_get_checkpoint_path(checkpoint_dir: str | os.PathLike[str]) -> CheckpointPath | None:
    """Return the folder of the save that this rank is to load, a Path; None on a fresh start.

    It is a save of this rank's shard, by any replica, of the newest step that is whole for every shard. The
    job's steps are counted on from it. Where there are several shards every rank has to call it, after
    `init`. Raises CheckpointError if there are saves but none can be used.
    """
    global _base_of_next_job  # noqa: PLW0603
    root = directory.root_of(checkpoint_dir)
    if _current is not None:
        identity = _current.identity
    else:
        rank, world_size = agreements.place()
        identity = Identity("", "", world_size, rank, 0, 1)
    job = folders.read_job(root)
    if job is None:
        return None
    # Of replicas one alone may ask, which then sends what it loads to the others.
    choice = agreements.choice(root, replace(identity, job=job), several_hosts=False, warn=_warn)
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


class Job:
    """A protected training job, as `init` returns it."""

    given_step: int | None = None  # by jit_get_checkpoint_path: what the script has loaded
    made_up = False  # who drives the loop does again what follows the restored step
    # Whether the script has brought itself back, for all ranks alike; asked where there is a save.
    is_left_to_script: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, given: Arguments, *, step_barrier: bool | None, memory: Wanted | None) -> None:
        """step_barrier: None for where what the device keeps has to be on another host before the step.

        memory: what is wanted of the memory tier, if it is to be used.
        """
        self.root, self.identity = given.root, given.identity
        by_agent = memory_use.given_by_agent(self.identity.rank, memory)
        self.memory = None if by_agent is None or by_agent.memory is None else memory
        self._events = EventLog(self.root)
        self._events.restart = environment.RESTART.get()
        self._reporter = Reporter(self._events, self.identity.rank, by_agent is not None)
        self._base = 0
        self._accumulation = given.accumulation
        self._is_restored = False
        self._protection: Protection | Unprotected = Unprotected()
        self._script = self._make_script(given)
        self._loop = self._make_loop(given)
        device, problem = arguments.device_of(given.model)
        self._host = _host_of(given, device, self._loop)
        self._restored = RestoredState(
            self._host,
            warn=self._reporter.warn,
            put_variables=self._script.put_back,
            watch=self._watch_from_here,
        )
        if given.kept is not None:
            self._script.keep_variables()
        self._script.find_generators()
        self._host.progress()  # whatever can't be saved is refused here and now
        if environment.FULL_WORLD.get():
            resharding.refuse_if_never_cut(self._host, has_save_function=given.save_function is not None)
        tensors = [tensor for part in self._host.local().values() for tensor in part.tensors.values()]
        if step_barrier is None:
            on_device = any(tensor.device.type != "cpu" for tensor in tensors)
            step_barrier = agreements.on_some_rank(self.identity, on_device)
        self._history = History(self._host)
        try:
            native = Native()
        except NativeError as error:
            problem = str(error)
        if problem is not None or device is None:
            warnings.warn(f"jitckpt: this job runs unprotected. {problem}", RuntimeWarning, stacklevel=3)
            return
        self._protection = Protection(
            native,
            given,
            given=by_agent,
            device=device,
            host=self._host,
            history=self._history,
            loop=self._loop,
            variables=self._script.variables,
            goes_on=self._script.goes_on,
            as_it_stands=self._as_it_stands,
            reporter=self._reporter,
            barrier=DeviceBarrier() if step_barrier and self.identity.world_size > 1 else None,
            max_ahead=max_ahead(sum(tensor.nbytes for tensor in tensors), given.local_state_limit),
            restart=self._events.restart,
        )
        self._protection.watch_from_base()
        atexit.register(self._at_exit)

    def _make_script(self, given: Arguments) -> ScriptsState:
        return ScriptsState(
            given,
            self,
            host=lambda: self._host,
            step=lambda: self._protection.step,
            of_round=lambda: self._loop.round,
            say=self._say_at_first,
            warn=self._reporter.warn_on_first,
        )

    def _make_loop(self, given: Arguments) -> Loop:
        self._head = EpochHead(
            [given.model, given.extra, *given.optimizers],
            lambda: self._host.optimized(),  # noqa: PLW0108  # there is none yet
            self._reporter.warn_on_first,
            loop_begins=self._script.find_generators,
            is_put_back=self._script.is_put_back,
        )
        return Loop(
            begins=self._loop_begins,
            boundary=self._boundary,
            write_again=self._write_again,
            put_back=self._put_back,
            warn=self._reporter.warn_on_first,
            asked=self._script.variables.loop_begins,
            epochs=ScriptsEpochs(self._script),
            pass_begins=self._script.pass_begins,
            drawn=self._batch_drawn,
            at_last=self._script.keep_what_is_read_behind,
            loop_ended=self._script.loop_ended,
            passed_by=self._script.put_behind,
            head=self._head,
        )

    @property
    def loop(self) -> Loop:
        """Where the training's loops are; for a framework, which has loops of its own."""
        return self._loop

    @property
    def is_protected(self) -> bool:
        """Whether there is a device and a library to protect it."""
        return isinstance(self._protection, Protection)

    @property
    def accumulation_steps(self) -> int:
        """How many micro-batches this rank makes in an optimizer step, for the global batch to stay the same.

        What `init` was given as `accumulation`; more while hosts are missing (`jitckpt run --min-hosts`).
        """
        world = self.identity.world_size
        return elastic.micro_batches(self._accumulation, told_at_start.all_ranks(world), world)

    @property
    def sync_gradients(self) -> bool:
        """Whether an optimizer step follows the newest batch of `batches`.

        It does after every `accumulation_steps` of them, and after the last one of an epoch.
        """
        return self._loop.ends_step(self.accumulation_steps)

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

    def restore(self, *, reshard: bool = False) -> int:
        """Bring the job back to the newest saved step; returns the optimizer steps done, 0 on a fresh start.

        `steps`, `epochs` and `batches` know themselves where to go on.
        With a save function of your own, load what it wrote first (jit_get_checkpoint_path tells where from):
        here come back random numbers, `extra`, buffers, schedulers, scaler and the optimizers' host part.

        Args:
            reshard: if the newest save is of another number of ranks or another layout, cut it anew, as
                `jitckpt run --reshard` says for all starts. Parameters and optimizer state are the same then,
                bit for bit; random numbers and the order of the data can't be.

        Raises CheckpointError if there are saves but none fits, or the save does not fit the model. A first
        save that was never finished is passed over with a warning: the job begins anew. With a framework's
        adapter LeftToScriptError before anything is loaded, where `is_left_to_script` says so.
        """
        self._is_restored = True
        self._script.find_generators()
        self._script.variables.script_restores = not self._loop.is_used
        restored = Restore(
            self.root,
            self.identity,
            host=self._host,
            history=self._history,
            loop=self._loop,
            reporter=self._reporter,
            protection=self._protection,
            given_step=self.given_step,
            made_up=self.made_up,
            is_left_to_script=self.is_left_to_script,
            set_base=self.set_base,
        ).make(reshard=reshard or environment.RESHARD.get())
        if restored.parts is not None:
            self._restored.take(restored.parts, restored.put_shared)
        return restored.step

    def _say_at_first(self, text: str) -> None:
        """Say what all ranks and all starts of a run have alike."""
        if self.identity.rank == 0 and self._events.restart == 0:
            say(text)

    def set_base(self, step: int, path: Path | None) -> None:
        """Count the steps on from `step`, whose state was loaded from the save in `path`, or from memory."""
        self._base = step
        self._protection.set_base(step, path)

    def steps_on_device(self) -> int:
        """Return how many optimizer steps of the job the device has finished; 0 without protection."""
        return self._protection.steps_on_device

    def trust_extra(self) -> None:
        """Warn of nothing that becomes of `extra`, which is an adapter's."""
        self._protection.trust_extra()

    def end_steps_at_boundary(self) -> None:
        """A minibatch ends as the loop goes on, and not with the optimizers' own steps."""
        self._protection.end_steps_at_boundary()

    def leave_attributes(self, to: PlainAttributes) -> None:
        """Leave what the model's modules keep in plain attributes to who drives the loop, and has these."""
        if self._host.model is not None:
            self._host.model.leave_attributes(to)

    def keep_variables(self) -> None:
        """Keep what the script's loop changes in its variables."""
        self._script.keep_variables()

    def keep_generators(self) -> None:
        """Keep the script's generators of random numbers, though nothing else that is found."""
        self._script.keep_generators()

    def look_at_epochs(self, frame: FrameType, at: int) -> None:
        """Look at what a loop over epochs carries on that has begun before the job: at this place it asks."""
        self._script.variables_of_epochs.look(frame, at)

    def put_back(self) -> None:
        """Put back once more what this rank alone knew after the restored step."""
        self._restored.put_own_back()

    def forget_pass(self) -> None:
        """Forget the forward pass since the last optimizer step: it was made before, and no step follows."""
        self._protection.forget_pass()

    def will_change(self, *, of_model_alone: bool) -> None:
        """Parameters, or all, are about to be changed behind the newest step, and no step follows."""
        self._protection.will_change(of_model_alone=of_model_alone)

    def write_before_step(self) -> None:
        """Write what this rank alone knows once more: it knows more since the forward pass."""
        self._protection.write_before_step()

    def close(self) -> None:
        """End the protection; happens by itself when the process ends."""
        self._end(at_exit=False)
        directory_lock.release(self.root)

    def _end(self, *, at_exit: bool) -> None:
        global _current  # noqa: PLW0603
        if _current is self:
            _current = None
        atexit.unregister(self._at_exit)
        self._head.end()
        self._protection.end(at_exit=at_exit)
        self._script.end()
        self._protection = Unprotected()

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):
            self._end(at_exit=True)
        else:  # an exception ends the process: it has not finished
            self._protection.stop()

    # What the loop tells and asks (jitckpt.data.loop.Loop).

    def _loop_begins(self) -> None:
        if not self._is_restored:
            self.restore()
        self._script.find_generators()
        self._history.waits_for_boundary = True
        self._watch_from_here()  # what the script has done since init is in every start
        self._restored.loop_begins(goes_on=self._loop.goes_on)

    def _boundary(self, frame: FrameType | None) -> bool:
        self._script.asks(frame)
        has_stepped = self._protection.boundary()
        self._script.asks(None)
        if has_stepped:
            self._restored.has_stepped()
            for text in self._script.lacking():
                self._reporter.warn(text)
        return has_stepped

    def _batch_drawn(self, number: int) -> None:
        self._protection.batch_drawn(number)

    def _write_again(self) -> None:
        self._protection.write_again()

    def _put_back(self) -> None:
        self._restored.put_back()

    def _watch_from_here(self) -> None:
        self._protection.watch_from_base()

    def _as_it_stands(self, frame: FrameType | None) -> VariablesNow | None:
        """Return what the script's variables are in the middle of an iteration, for the thread that saves."""
        return None if self.made_up else self._script.as_it_stands(frame)


def _who(
    root: Path, model: nn.Module | None, optimizers: list[Optimizer], said_shard: tuple[int, int] | None
) -> tuple[Identity, Layout | None]:
    """Return what this rank is of the job, and who holds which shard where the script has not said it."""
    rank, world_size = agreements.place()
    layout = None
    if said_shard is None:
        layout = agreements.layout_of(rank, world_size, model, optimizers)
    shard, shards = said_shard or ((layout.shards[rank], layout.count) if layout else (0, 1))
    identity = Identity(
        job=directory.job_id(root, rank),
        fingerprint=host_state.fingerprint(model, optimizers),
        world_size=world_size,
        rank=rank,
        shard=shard,
        shards=shards,
        layout="" if layout is None else layout.text,
        start=directory.start().number,
    )
    return identity, layout


def _host_of(given: Arguments, device: torch.device | None, loop: Loop) -> HostState:
    return HostState(
        model=given.model,
        optimizers=given.optimizers,
        wrappers=given.wrappers,
        schedulers=given.schedulers,
        scaler=given.scaler,
        extra=given.extra,
        device=device,
        loop=loop,
        kept=given.kept or kept.NOTHING,
        finds_generators=given.kept is not None,
    )


def _warn(text: str) -> None:
    warnings.warn(f"jitckpt: {text}", RuntimeWarning, stacklevel=4)
