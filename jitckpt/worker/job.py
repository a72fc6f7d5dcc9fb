"""The worker's side: `init` puts a training job under protection, `restore` brings it back."""

import atexit
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import gcd
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.bindings.interpose import Native
from jitckpt.console import say
from jitckpt.data.loop import Batches, Loop
from jitckpt.decisions import elastic, memory_wanted, replicas
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import (
    CheckpointError,
    JitckptError,
    LeftToScriptError,
    NativeError,
    SaveError,
    TreeError,
)
from jitckpt.events import EventLog
from jitckpt.saves import directory_lock, folders, start_record, starts
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import host_state, kept
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import KeptVariables, VariablesNow
from jitckpt.state.parallel import DeviceBarrier
from jitckpt.state.schedules import Stateful
from jitckpt.state.shards import Layout
from jitckpt.system import descriptors
from jitckpt.tiers import asked
from jitckpt.wire import environment, protocol
from jitckpt.worker import agreements, arguments, directory, resharding, restoring
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.as_restored import AsRestored, add_no_group_twice_before_a_step
from jitckpt.worker.carried_names import read_behind
from jitckpt.worker.checkpoint_path import CheckpointPath
from jitckpt.worker.epoch_head import EpochHead
from jitckpt.worker.frames import frames_that_ask
from jitckpt.worker.protection import Protection
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.resharding import Saved
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.periodic import PeriodicSettings
from jitckpt.worker.saving.saver import SaveFunction
from jitckpt.worker.script_generators import generators_from
from jitckpt.worker.script_variables import ScriptVariables
from jitckpt.worker.steps_ahead import max_ahead
from jitckpt.worker.unprotected import Unprotected
from jitckpt.worker.variable_keeper import VariableKeeper

CALLED_TWICE = "jitckpt.init was called twice in this process; call close() on the first job before."
CHANGED_TWICE = (
    "The script changes parameters or optimizer state before the batches of an epoch. What it has loaded of "
    "a save of its own has that change already, and jitckpt can't take the second one back: from here this "
    "run differs from an undisturbed one. Change them behind the first batch, or give jitckpt.init model and "
    "optimizer in the place of a save function."
)
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
    global _base_of_next_job, _current  # noqa: PLW0603
    if _current is not None:
        raise JitckptError(CALLED_TWICE)
    optimizers, wrappers = arguments.unwrapped(optimizer)
    schedulers = arguments.listed("scheduler", scheduler, object)
    arguments.check(save_checkpoint, model, optimizers, schedulers, extra, save_every=save_every, keep=keep)
    arguments.check_accumulation(accumulation)
    finds = keep_found and save_checkpoint is None
    root = directory.root_of(checkpoint_dir)
    identity, layout = _who(root, model, optimizers, arguments.said_shard(shard, shards))
    wanted, elsewhere, needed = _memory_of(memory, identity, layout)
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
            replicas=elsewhere[identity.rank] if elsewhere else (),
        ),
        step_barrier=True if step_barrier is None and identity.shards > 1 else step_barrier,
        memory=needed,
    )
    if _base_of_next_job is not None:
        _current.set_base(*_base_of_next_job)
        _base_of_next_job = None
    _tell_of_batch(_current, accumulation)
    _tell_of_memory(_current, wanted, needed, elsewhere)
    _tell_of_risk(_current, layout, save_checkpoint, save_every)
    return _current


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
        by_agent = _given_by_agent(self.identity.rank, memory)
        self.memory = None if by_agent is None or by_agent.memory is None else memory
        self._events = EventLog(self.root)
        self._events.restart = environment.RESTART.get()
        self._reporter = Reporter(self._events, self.identity.rank, by_agent is not None)
        self._base = 0
        self._accumulation = given.accumulation
        self._is_restored = False
        self._restored_parts: Mapping[str, Any] | None = None  # what this rank alone knew
        self._progress_as_loop_began: Encoded | None = None
        self._put_shared: Callable[[], object] | None = None  # what was restored, once more
        self._as_restored: AsRestored | None = None  # until the first batch
        self._protection: Protection | Unprotected = Unprotected()
        known: tuple[set[object], set[object]] = set(), set()
        self._asking: FrameType | None = None  # who asks for the next minibatch
        self._keeper: VariableKeeper | None = None
        self._variables = self._make_variables(given, *known, of_epochs=False)
        self._loop = self._make_loop(given, self._make_variables(given, *known, of_epochs=True))
        device, problem = arguments.device_of(given.model)
        self._host = _host_of(given, device, self._loop)
        if given.kept is not None:
            self.keep_variables()
        self._find_generators()
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
            variables=self._variables,
            goes_on=self._goes_on,
            as_it_stands=self._as_it_stands,
            reporter=self._reporter,
            barrier=DeviceBarrier() if step_barrier and self.identity.world_size > 1 else None,
            max_ahead=max_ahead(sum(tensor.nbytes for tensor in tensors), given.local_state_limit),
            restart=self._events.restart,
        )
        self._protection.watch_from_base()
        atexit.register(self._at_exit)

    def _make_variables(
        self, given: Arguments, said: set[object], targets: set[object], *, of_epochs: bool
    ) -> ScriptVariables:
        wrappers = [one for wrapped in given.wrappers.values() for one in wrapped]
        return ScriptVariables(
            [
                *(given.model, *given.optimizers, *given.schedulers, given.scaler, given.extra, self),
                *(*wrappers, *(given.kept or kept.NOTHING).objects()),
            ],
            given.extra,
            lambda: self._protection.step,
            self._reporter.warn_on_first,
            of_epochs=of_epochs,
            of_round=lambda: self._loop.round,
            said=said,
            targets=targets,
            kept=self._kept,
            keeper=lambda: self._keeper,
        )

    def _kept(self) -> set[object]:
        """Return what of the script's variables is kept by itself."""
        generators, model = self._host.generators, self._host.model
        found: set[object] = set() if generators is None else {*generators.kept_ids()}
        return found if model is None else found | model.attributes.kept()

    def _find_generators(self) -> None:
        """Keep what the script has made by now; no harm to the training if its variables can't be read."""
        if self._host.generators is not None:
            with suppress(Exception):
                self._host.generators.follow(generators_from(sys._getframe(1), self._host.extra))

    def _make_loop(self, given: Arguments, variables_of_epochs: ScriptVariables) -> Loop:
        self._variables_of_epochs = variables_of_epochs
        kept = [given.model, given.extra, *given.optimizers]
        self._head = EpochHead(
            kept, self._trained, self._reporter.warn_on_first, loop_begins=self._find_generators
        )
        return Loop(
            begins=self._loop_begins,
            boundary=self._boundary,
            write_again=self._write_again,
            put_back=self._put_back,
            warn=self._reporter.warn_on_first,
            asked=self._variables.loop_begins,
            epoch_begins=variables_of_epochs.look,
            pass_begins=partial(self._pass_begins, variables_of_epochs),
            drawn=self._batch_drawn,
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
        return elastic.micro_batches(self._accumulation, _all_ranks(world), world)

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
        begun = time.monotonic()
        self._is_restored = True
        self._find_generators()
        self._variables.script_restores = not self._loop.is_used
        memory = self._protection.found_in_memory()
        choice: Choice | None = None
        misfit: CheckpointError | None = None
        try:
            choice = agreements.choice(
                self.root,
                self.identity,
                several_hosts=agreements.on_several_hosts(),
                memory=memory,
                warn=self._reporter.warn,
            )
        except CheckpointError as error:
            misfit = error
        saved = self._saved_in_another_layout(choice, reshard or environment.RESHARD.get())
        if (choice or saved) is not None and self.is_left_to_script():
            raise LeftToScriptError(
                f"The script has brought itself back, and no save in {self.root} fits that."
            )
        if saved is not None:
            return self._restore_resharded(saved, begun)
        if misfit is not None:
            raise misfit
        if self.given_step is not None and self.given_step != (choice.step if choice else 0):
            raise CheckpointError(
                f"jit_get_checkpoint_path gave rank {self.identity.rank} step {self.given_step}, but of that "
                "step another rank's part can't be loaded any more. Move that step's folder away: the "
                "same command then goes on from an older one."
            )
        self._protection.nothing_saved(choice is None or choice.nothing_saved)
        self._tell_start(None if choice is None else choice.save, 0 if choice is None else choice.step)
        if choice is None:
            self._go_on_from(0)
            self._protection.restored_from_memory(0)
            return 0
        for reason in choice.reasons:
            self._reporter.warn(f"A save was passed over: {reason}")
        if choice.newest > choice.step and self.identity.rank == 0:
            self._reporter.warn(
                f"Step {choice.step} is the newest that is whole for every shard; of step {choice.newest} a "
                f"part is lost, so at least {choice.newest - choice.step} minibatches are done again."
            )
        self._restored_parts = self._load(choice)
        if restoring.is_builtin(choice):
            self._put_shared = partial(restoring.put_shared, choice, self._host)
        add_no_group_twice_before_a_step([one.optimizer for one in self._host.optimizers])
        self._go_on_from(choice.step)
        self.set_base(choice.step, None if choice.in_memory else choice.save.path)
        self._protection.restored_from_memory(choice.step if choice.in_memory else 0)
        seconds = time.monotonic() - begun
        path, source = str(choice.save.path), choice.save.rank
        rank = self.identity.rank
        self._reporter.report(protocol.Restored(rank, choice.step, path, source, seconds, choice.reason))
        return choice.step

    def _load(self, choice: Choice) -> Mapping[str, Any]:
        """Put the save into the job's objects. Raises CheckpointError if it does not fit."""
        try:
            return restoring.load(
                choice,
                identity=self.identity,
                host=self._host,
                history=self._history,
                loop=self._loop,
                reporter=self._reporter,
                made_up=self.made_up,
            )
        except KeyError as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: it lacks {error}.") from error
        except (SaveError, TreeError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: {error}") from error

    def _saved_in_another_layout(self, choice: Choice | None, may_cut: bool) -> Saved | None:
        """Return the newest whole step, if another layout saved it. CheckpointError if it may not be cut."""
        step = 0 if choice is None else choice.step
        if not may_cut and (choice is None or choice.newest == step):
            return None
        saved = resharding.newer(self.root, self.identity, step, agreements.store_of_ranks())
        if saved is not None and not may_cut:
            raise CheckpointError(saved.refused(self.identity))
        return saved

    def _go_on_from(self, step: int) -> None:
        """Leave later steps, of earlier tries, behind: they will be made again."""
        identity = self.identity
        try:
            starts.note_going_on(self.root, identity.start, step)
            folders.set_aside_after(self.root, step, identity.rank, identity.start, identity.world_size)
        except (OSError, SaveError) as error:
            raise CheckpointError(f"Rank {identity.rank} can't go on from step {step}: {error}") from error

    def _restore_resharded(self, saved: Saved, begun: float) -> int:
        rank, first = self.identity.rank, saved.records[0]
        if self.given_step is not None and self.given_step != saved.step:
            raise CheckpointError(
                f"jit_get_checkpoint_path gave rank {rank} step {self.given_step}; step {saved.step}, which "
                "is of another layout, can only be loaded by restore()."
            )
        self._tell_start(first, saved.step)
        try:
            parts, told = resharding.load(saved, self.root, self.identity, self._host, self._history)
            if "loop" in parts:
                of_others = saved.identity.world_size != self.identity.world_size
                if not self._loop.restore(parts["loop"], None, saved.step, of_others=of_others):
                    parts |= restoring.iteration_made_up(parts)
                    self._host.restore_local(parts)
            else:
                self._loop.count_from(saved.step)
        except (SaveError, TreeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"Step {saved.step} in {self.root} can't be cut anew: {error}") from error
        self._restored_parts = parts
        self._put_shared = partial(resharding.put_shared, saved, self._host)
        if rank == 0:
            self._reporter.warn(told)
        self._go_on_from(saved.step)
        self.set_base(saved.step, first.path)
        self._protection.restored_from_memory(0)
        seconds = time.monotonic() - begun
        self._reporter.report(protocol.Restored(rank, saved.step, str(first.path), first.rank, seconds))
        return saved.step

    def _say_at_first(self, text: str) -> None:
        """Say what all ranks and all starts of a run have alike."""
        if self.identity.rank == 0 and self._events.restart == 0:
            say(text)

    def _tell_start(self, save: SaveRecord | None, step: int) -> None:
        """The first start of a run says who is there, what it goes on from, how it differs from the last."""
        if self.identity.rank != 0 or self._events.restart > 0:
            return
        now = start_record.settings([one.optimizer for one in self._host.optimizers])
        if self.is_protected:
            say(start_record.who_is_there(self.identity.world_size, self.identity.shards, self.root))
        try:
            if save is not None and save.metadata is not None:
                saved, job = save.metadata.time, self.identity.job
                for sentence in start_record.told(self.root, step, saved, job, now):
                    say(sentence)
            start_record.note_start(self.root, now, self.identity.start)
        except (OSError, SaveError) as error:
            self._reporter.warn(f"How this start was made can't be noted in {self.root}: {error}")

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

    def leave_attributes(self) -> None:
        """Leave what the model's modules keep in plain attributes to who drives the loop."""
        if self._host.model is not None:
            self._host.model.leave_attributes()

    def keep_variables(self) -> None:
        """Keep what the script's loop changes in its variables."""
        model = self._host.model
        self._host.variables = KeptVariables() if model is None else KeptVariables(model.lies_in_parameter)
        self._keeper = VariableKeeper(
            self._host.variables,
            lambda: self._loop.round,
            say=self._say_at_first,
            warn=self._reporter.warn_on_first,
        )

    def look_at_epochs(self, frame: FrameType, at: int) -> None:
        """Look at what a loop over epochs carries on that has begun before the job: at this place it asks."""
        self._variables_of_epochs.look(frame, at)

    def keep_what_is_read_behind(self, asking: FrameType) -> None:
        """Keep what a loop over batches sets and the code behind it reads, such as the last loss.

        asking: it asks for a batch, and has got one before.
        """
        if (keeper := self._keeper) is None:
            return
        for frame in frames_that_ask(asking)[-1:]:
            keeper.follow(frame, read_behind(frame.f_code, frame.f_lasti), have_changed=True)

    def put_back(self) -> None:
        """Put back once more what this rank alone knew after the restored step."""
        if self._restored_parts is not None:
            self._host.restore_local(self._restored_parts)
            if self._keeper is not None:
                self._keeper.put_back(sys._getframe(1))

    def forget_pass(self) -> None:
        """Forget the forward pass since the last optimizer step: it was made before, and no step follows."""
        self._protection.forget_pass()

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
        if self._host.generators is not None:
            self._host.generators.end()
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
        self._find_generators()
        self._history.waits_for_boundary = True
        self._protection.watch_from_base()  # what the script has done since init is in every start
        if self._restored_parts is not None:
            self._progress_as_loop_began = self._host.copied_progress()
            self._host.put_gradients()
            if self._loop.goes_on:
                self._as_restored = AsRestored(self._host)

    def _boundary(self, frame: FrameType | None) -> bool:
        self._asking = frame
        has_stepped = self._protection.boundary()
        self._asking = None
        if has_stepped and self._as_restored is not None:
            self._as_restored.end()
            self._as_restored = None
        if has_stepped and self._host.generators is not None and (text := self._host.generators.lacking()):
            self._reporter.warn(text)
        if has_stepped and self._keeper is not None and (text := self._keeper.lacking()):
            self._reporter.warn(text)
        return has_stepped

    def _goes_on(self) -> None:
        """The script asks for its next minibatch behind an optimizer step, or comes to its loop's end."""
        if self._asking is not None:
            self._variables.look(self._asking)
        if self._keeper is not None:
            self._keeper.take(sys._getframe(1))

    def _as_it_stands(self, frame: FrameType | None) -> VariablesNow | None:
        """Return what the script's variables are in the middle of an iteration, for the thread that saves."""
        if self._keeper is None or self.made_up:
            return None
        return self._keeper.as_it_stands(frame)

    def _batch_drawn(self, number: int) -> None:
        self._protection.batch_drawn(number)

    def _pass_begins(self, variables_of_epochs: ScriptVariables) -> None:
        """The script begins a pass over its batches, perhaps in a loop over epochs that nobody knows."""
        for asks in frames_that_ask(sys._getframe(1))[-1:]:
            variables_of_epochs.look(asks)

    def _write_again(self) -> None:
        self._protection.write_again()

    def _put_back(self) -> None:
        if self._restored_parts is not None and self._progress_as_loop_began is not None:
            self._put_shared_back()
            self.put_back()
            self._host.restore_progress(self._progress_as_loop_began)
            self._host.put_gradients()

    def _trained(self) -> dict[str, Tensor]:
        every = [one.named_parameters() for one in self._host.optimizers]
        return {name: parameter for named in every for name, parameter in named.items()}

    def _put_shared_back(self) -> None:
        """Take back what the script has changed of parameters and optimizers since the loop began."""
        as_restored, self._as_restored = self._as_restored, None
        if as_restored is None or not as_restored.is_changed():
            return
        if self._put_shared is None:
            self._reporter.warn(CHANGED_TWICE)
            return
        self._put_shared()
        self._put_shared = None
        self._protection.watch_from_base()


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


def _memory_of(
    memory: str | Mapping[str, Any] | None, identity: Identity, layout: Layout | None
) -> tuple[Wanted, Sequence[Sequence[int]] | None, Wanted | None]:
    """Return what the script says of the memory tier, and that again if the tier is to be used, else None.

    Between them for each rank who holds the same on another host, where that decides and is known.
    """
    by_script = memory_wanted.by_script("off" if memory is None else memory)
    mode = environment.MEMORY_TIER.get() or by_script.mode
    elsewhere = agreements.replicas_elsewhere(identity, layout) if mode == "auto" else None
    is_off = mode == memory_wanted.OFF or (mode == "auto" and (elsewhere is None or all(elsewhere)))
    return by_script, elsewhere, None if is_off else by_script


def _all_ranks(ranks: int) -> int:
    """Return how many ranks there are when no host is missing."""
    return environment.FULL_WORLD.get() or ranks


def _tell_of_batch(job: "Job", accumulation: int) -> None:
    """While hosts are missing: say what becomes of the global batch."""
    ranks = job.identity.world_size
    everyone = _all_ranks(ranks)
    if ranks == everyone or job.identity.rank != 0:
        return
    part = elastic.part_of_batch(accumulation, everyone, ranks)
    here = f"{ranks} of {everyone} ranks are here, and"
    goes_by = "a script that goes by job.accumulation_steps"
    if part == 1:
        told = (
            f"{here} in {goes_by} each makes {job.accumulation_steps} micro-batches a step in the place of "
            f"{accumulation}: the global batch stays as it is. In another script it is {ranks}/{everyone} of "
            "that."
        )
    else:
        told = (
            f"{here} {accumulation * everyone} micro-batches a step can't be dealt out to them evenly: the "
            f"global batch is now {part} of what it was in {goes_by}, in another one "
            f"{Fraction(ranks, everyone)}. With accumulation={_dividing(accumulation, everyone, ranks)} in "
            "jitckpt.init, and smaller micro-batches, it would stay."
        )
    job._reporter.warn(told)


def _dividing(accumulation: int, everyone: int, ranks: int) -> int:
    """Return the least multiple of `accumulation` that both numbers of ranks can share."""
    return accumulation * (ranks // gcd(ranks, accumulation * everyone))


def _tell_of_memory(
    job: "Job", by_script: Wanted, needed: Wanted | None, elsewhere: Sequence[Sequence[int]] | None
) -> None:
    """Say what `auto` has come to, and why; and why there is no memory tier, where somebody might miss it."""
    if job.identity.rank != 0:
        return
    if elsewhere is not None and environment.RESTART.get() == 0:
        if needed is None:
            say(
                "memory tier: nothing is kept in memory, since each rank's state has a replica on another "
                "host (another device, where there is one host): these save just in time."
            )
        elif job.memory is not None:
            hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
            say(f"memory tier: {replicas.in_words(elsewhere, hosts)} (--memory-tier auto).")
    if by_script.mode != memory_wanted.OFF and needed is not None and job.memory is None:
        job._reporter.warn(
            "There is no memory tier, for which jitckpt.init(memory=...) asks: `jitckpt run` has one in user "
            "mode, where --memory-tier off does not say otherwise."
        )


def _tell_of_risk(
    job: "Job", layout: Layout | None, save_function: SaveFunction | None, save_every: int | None
) -> None:
    if job.identity.rank == 0 and save_every is None and (risk := _risk(job, layout, save_function)):
        job._reporter.warn(risk)


def _risk(job: "Job", layout: Layout | None, save_function: SaveFunction | None) -> str | None:
    """Return why a rank's state is lost with it, if so: no file, no other host's memory has it."""
    if layout is None or not layout.alone():
        return None
    if job.memory is None:
        return agreements.without_replicas(layout)
    if save_function is None:
        return None
    return (
        "The memory tier can't protect a job that has a save function of its own: it keeps what jitckpt's "
        "own saver saves. Give jitckpt.init model and optimizer in its place."
    )


def _given_by_agent(rank: int, memory: Wanted | None) -> descriptors.GivenDescriptors | None:
    """Return what the agent has given this process; None, with a warning, if that is not there to be used."""
    try:
        given = descriptors.claim(rank)
        if given is None or memory is None:
            return given if given is None else replace(given, memory=None)
        if given.memory is not None and not environment.MEMORY_TIER.get():
            asked.ask(given.memory, memory)
        return given
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
