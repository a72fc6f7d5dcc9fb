"""A rank's state under protection: what is done around each optimizer step, so that a failure finds it saved.

There is one, whole, or there is none: where a device or the library is missing, the job runs without.
"""

import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.interpose import Native, stream_of
from jitckpt.data.loop import Loop
from jitckpt.decisions import cut, memory_wanted
from jitckpt.encoding.staging import Staging
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.faults import injection
from jitckpt.hooks import parameter_data
from jitckpt.hooks.carried_gradients import CarriedGradients
from jitckpt.hooks.guard import in_words
from jitckpt.hooks.other_optimizers import OtherOptimizers
from jitckpt.hooks.stale_gradients import StaleGradients
from jitckpt.hooks.torch_training import TrainingHooks
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state, wishes
from jitckpt.ring.copies import Asker
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import final_state, starts
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState, Shared
from jitckpt.state.kept_variables import VariablesNow
from jitckpt.state.model_state import ModelState
from jitckpt.state.optimizer_state import OptimizerState, parameters_of
from jitckpt.state.parallel import DeviceBarrier
from jitckpt.state.shards import hear_first
from jitckpt.system.descriptors import GivenDescriptors
from jitckpt.system.signals import comes_from_signal
from jitckpt.system.stacks import stack_writer
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.wire import environment, protocol
from jitckpt.worker import advice, one_connection, spare
from jitckpt.worker.agreements import all_say, job_store, on_several_hosts
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.draws import TWO_LINES, Draws
from jitckpt.worker.ends import at_end
from jitckpt.worker.ends.exceptions import ExceptionHook, ExitHook
from jitckpt.worker.in_place import proxy_faults
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving import found, in_spans, snapshots
from jitckpt.worker.saving.beside import BesideTraining
from jitckpt.worker.saving.found import Found, several_optimizers
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.in_spans import CopiesInSpans
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.network import NetworkProfiler
from jitckpt.worker.saving.outside_changes import OutsideChanges
from jitckpt.worker.saving.periodic import PeriodicSaver
from jitckpt.worker.saving.saver import Saver
from jitckpt.worker.saving.snapshots import Snapshots
from jitckpt.worker.saving.waiting import hold_in_device_calls
from jitckpt.worker.script_variables import ScriptVariables
from jitckpt.worker.self_check.checker import SelfChecker
from jitckpt.worker.self_check.comparison import FULL_SELF_CHECK, NO_SELF_CHECK
from jitckpt.worker.self_check.replicas import Replicas

MAX_AHEAD = (32, 8)  # steps that the host may be ahead of the device: the most for which memory is there
KEPT_BESIDE = 4  # steps: replicas may be a step apart, and the host has begun one more
ROOM_TO_GROW = 4  # times what the rank-local state takes as the job begins
SETTLE_SECONDS = 0.05  # a device that moves on after all only costs another save
LAST_LOOK_SECONDS = 1.0
LAST_CHECK_SECONDS = 10.0
SHOWN_NAMES = 5
EXTRA_LOOKED_AT = 3  # minibatches: a loop does in each what it does in these

UNEQUAL_TURNS = (
    "an optimizer has made another step before every optimizer has made one, so that nobody can tell where a "
    "minibatch of the loop ends. Write it as `for step in job.steps(n):`, which tells."
)
OTHER_OPTIMIZER = (
    "an optimizer that jitckpt.init was not given ({name}) makes steps with parameters of one that it was "
    "given: what it keeps is in no save. Build all optimizers before jitckpt.init, give it all of them "
    "(optimizer=[...]), and write the loop as `for batch in job.batches(loader):` or `for step in "
    "job.steps(n):`, in which any of them may make the steps."
)
LATE_OPTIMIZER = (
    "An optimizer that jitckpt.init was not given ({name} with {count} parameters) makes steps. What it "
    "keeps is in no save, nor what it trains if that is not the model's: after a failure both are as the "
    "script builds them. If the training goes on with them, build it before jitckpt.init, give it there "
    "(optimizer=[...], and what it trains in the model or in `extra`), and write the loop as `for batch in "
    "job.batches(loader):` or `for step in job.steps(n):`, in which any of several may make the steps. What "
    "is made for an evaluation and let go needs nothing."
)
CARRIED_GRADIENTS = (
    "Gradients ({names}) are carried on from one optimizer step to the next, and no save holds them: after a "
    "failure they begin anew, so the training would differ from an undisturbed one. Clear them for each step "
    "(optimizer.zero_grad()); what is to be carried on, keep in the optimizer's momentum, or in buffers of "
    "the model (register_buffer) that you add to the gradients."
)
STEPPED_BY_SCRIPT = (
    "The script makes {count} steps of {name} between the restore and the first forward pass. jitckpt.init "
    "was not given it, and had put it back all the same: {now}. "
    "Leave these steps out, or give jitckpt.init keep_found=False."
)
IRREGULAR = (
    "A scheduler is not stepped after every optimizer step. If a failure comes between an optimizer step and "
    "the scheduler's, and no other rank comes to the latter within seconds, the restart can't make that up. "
    "Write `for epoch in job.epochs(n):` and `for batch in job.batches(loader):`, or `for step in "
    "job.steps(n):`."
)

EXTRA_CHANGES_EARLY = (
    "`extra` changes between forward pass and optimizer step. A rank that fails there has lost that change, "
    "and the others may have made the step: then this run would differ from an undisturbed one. Change it "
    "before the forward pass ends, or give jitckpt.init step_barrier=True: then no rank makes a step without "
    "the others."
)
EXTRA_CHANGES_LATE = (
    "`extra` changes between an optimizer step and the next forward pass, where a failure may lose the last "
    "of it. Write the loop as `for epoch in job.epochs(n):` and `for batch in job.batches(loader):`, or `for "
    "step in job.steps(n):`, to which it belongs then; or change it before the optimizer step."
)

EXTRA_CHANGES_AT_THE_END = (
    "`extra` changes between an optimizer step and the end of its iteration. A rank that fails there, where "
    "others have made the step, has lost that change: then this run would differ from an undisturbed one. "
    "Change it at the top of the next iteration, before the forward pass, and nothing of it is lost."
)

AVERAGE_CHANGES_LATE = (
    "An AveragedModel is updated between an optimizer step and the next forward pass, where a failure may "
    "lose the last of it. Write the loop as `for epoch in job.epochs(n):` and `for batch in "
    "job.batches(loader):`, or `for step in job.steps(n):`, to which it belongs then; or update it before "
    "the optimizer step."
)

THAWED = (
    "{names}: trained now, but frozen as DistributedDataParallel was built, which averages no gradients of "
    "these. A restart builds both so again, and refuses to go on. Give jitckpt.init the model without "
    "DistributedDataParallel, call job.restore(), and wrap the model after that, here and in every start."
)

P = ParamSpec("P")


def _harmless(
    method: Callable[Concatenate["Protection", P], None],
) -> Callable[Concatenate["Protection", P], None]:
    """Have whatever fails in a method fail jitckpt alone: the training goes on without it.

    What a signal's handler raises meanwhile (torch's, when a loader's worker has died) is the training's.
    Should it go on after that, the method was left in the middle.
    """

    @wraps(method)
    def guarded(protection: "Protection", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if protection._interrupted is not None:
            protection._switch_off(protection._interrupted)
        if protection.off is None:
            try:
                method(protection, *args, **kwargs)
            except Exception as error:
                if comes_from_signal(error):
                    protection._interrupted = f"a signal's handler raised {error!r} where the state is taken."
                    raise
                protection._switch_off(str(error) or repr(error))

    return guarded


class Protection:
    """Hears of the training's steps (jitckpt.hooks.torch_training.Listener) and has what a save needs."""

    _extra_behind_forward: tuple[Any, ...] | None = None  # in the first minibatches
    _extra_behind_step: tuple[Any, ...] | None = None  # the same
    _interrupted: str | None = None  # a signal's handler has raised in the middle of a hook
    _told_before = 0  # the newest step before which an adapter has had all written that it knows
    _awaits_forward = False  # a save lets the script go on to its next forward pass
    _awaits_step = False  # or to its next optimizer step
    _astride = 0  # iterations of the loop that lie across a minibatch as it is counted
    _rates: Mapping[str, Tensor] = MappingProxyType({})  # hyperparameters that are tensors on the device
    _base = 0
    _schedules_restored: tuple[Sequence[int], Encoded] | None = None  # until the first forward pass
    _nothing_saved_before = False
    off: str | None = None  # why no state is saved any more
    _first_step_reported = False
    _has_named_unexpected = False
    _buffer_versions = b""  # as the newest step ended
    _averages: list[int] | None = None  # the same
    _frozen: tuple[str, ...] | None = None  # the same
    _found: Found | None = None
    _checker: SelfChecker | None = None
    _last_check: SelfChecker | None = None  # nothing but its thread may still be at work
    _beside: Sequence[BesideTraining] = ()  # what saves while the training goes on
    snapshots: Snapshots | None = None  # in the memory tier, where there is one
    _spans: CopiesInSpans | None = None  # of the minibatch, in which their copies are made

    def __init__(
        self,
        native: Native,
        arguments: Arguments,
        *,
        given: GivenDescriptors | None,
        device: torch.device,
        host: HostState,
        history: History,
        loop: Loop,
        variables: ScriptVariables,
        goes_on: Callable[[], None],
        as_it_stands: Callable[[FrameType | None], VariablesNow | None],
        reporter: Reporter,
        barrier: DeviceBarrier | None,
        max_ahead: int,
        restart: int,
    ) -> None:
        """given: by the agent. max_ahead: steps that the host may be ahead of the device.

        goes_on: called as the job's own loop goes on behind an optimizer step. as_it_stands: as of Saver.
        """
        self._native, self._arguments, self._given = native, arguments, given
        self._host, self._history, self._loop, self._reporter = host, history, loop, reporter
        self._identity = arguments.identity
        self._variables: ScriptVariables | None = variables  # while it looks
        self._goes_on, self._as_it_stands = goes_on, as_it_stands
        self._barrier, self._max_ahead, self._restart = barrier, max_ahead, restart
        self._looks_at_extra = host.extra is not None  # where it changes
        self._is_bare = not arguments.optimizers  # they are found as they make their steps
        descriptor = local_state.create() if given is None else given.state
        slots = max_ahead + KEPT_BESIDE
        self._ring = Ring(descriptor, self._identity, slots, arguments.local_state_limit)
        self._recorder = Recorder(self._ring, native.write_area, reporter.warn)
        self._stream = stream_of(device)
        self._outside = OutsideChanges(Mirror(native.write_word, self._stream), reporter.warn)
        self._copies, self._saver = self._make_asker(), self._make_saver()
        if arguments.save_function is None:
            self._beside = [*self._make_snapshots(), self._make_periodic_saver()]
            if arguments.model is not None and arguments.self_check != NO_SELF_CHECK:
                self._checker = self._make_checker(arguments.model)
        native.start(
            agent_fd=-1 if given is None else given.agent,
            hang_timeout=environment.HANG_TIMEOUT.get(),
            hang_floor=environment.HANG_FLOOR.get(),
            settle=SETTLE_SECONDS,
            max_ahead=max_ahead,
            max_calls_ahead=environment.CALLS_AHEAD.get(),
            save=self._saver,
        )
        reporter.speaks_through(native)
        one_connection.warn_of_it(self._identity.world_size, os.environ, reporter.warn_on_first)
        self._profiler = self._make_profiler()
        self._unwatch = parameter_data.watch(self._outside.taken)
        self._draws = Draws(arguments.model, lambda: loop.is_used, reporter.warn_on_first)
        self._hooks = self._make_hooks()
        self._others = OtherOptimizers(arguments.optimizers, self)
        self._gradients = CarriedGradients(
            lambda error: reporter.warn(f"Nobody sees whether gradients are carried on: {in_words(error)}.")
        )
        self._stale = StaleGradients()
        self._register()
        self._exception_hook = ExceptionHook(self._report_exception)
        self._exit_hook = ExitHook()

    def _make_asker(self) -> Asker | None:
        """Return by whom another host is asked whether it has a copy, if one is to have it."""
        if self._given is None or self._given.copies is None:
            return None
        return Asker(
            self._given.copies,
            self._reporter.warn,
            environment.COPY_PATIENCE.get(),
            partial(hold_in_device_calls, self._host.device),
        )

    def _make_profiler(self) -> NetworkProfiler | None:
        """Return what learns when the network is idle, for copies that go over it, and the device."""
        if self._given is None or self._given.memory is None or self.snapshots is None:
            return None
        sends = on_several_hosts()
        spans = self._spans
        if behind_proxy.is_there() or (not sends and spans is None):
            return None
        profiler = NetworkProfiler(
            self._native,
            self._given.memory,
            self._reporter.warn,
            sends=sends,
            found=None if spans is None else spans.found,
        )
        profiler.start()
        return profiler

    def _make_hooks(self) -> TrainingHooks:
        return TrainingHooks(
            self,
            model=self._arguments.model,
            optimizers=self._arguments.optimizers,
            scaler=self._arguments.scaler,
            on_phase=self._injector(),
            every_optimizer=True,
            every_scaler=True,
        )

    def _make_saver(self) -> Saver:
        return Saver(
            root=self._arguments.root,
            identity=self._identity,
            native=self._native,
            host=self._host,
            history=self._history,
            ring=self._ring.descriptor,
            save_function=self._arguments.save_function,
            replacement=self._outside.replacement,
            has_whole_copies=self._outside.has_all_of,
            refused=lambda: self.off,
            staging=Staging(environment.STAGING.get(), pinned=True),
            report=self._reporter.report,
            keep=self._arguments.periodic.keep,
            why_not=self._why_not_call,
            memory=None if self._given is None else self._given.memory,
            whole=None if self._given is None else self._given.whole,
            nothing_before=self._is_nothing_saved,
            as_it_stands=self._as_it_stands,
            warn=self._reporter.warn,
        )

    def found_in_memory(self) -> OwnShard | None:
        """Return what the memory tier has for this rank to restore, if there is one."""
        if self.snapshots is None:
            return None
        return self.snapshots.found(self._identity, starts.read(self._arguments.root))

    def restored_from_memory(self, step: int) -> None:
        """The memory tier's state after `step` was loaded; 0: none of it was."""
        if self.snapshots is not None:
            self.snapshots.restored(step)

    def nothing_saved(self, is_so: bool) -> None:
        """Whether no step of the job was ever saved whole in files, as all ranks have found."""
        self._nothing_saved_before = is_so
        for one in self._beside:
            if isinstance(one, PeriodicSaver):
                one.nothing_before = is_so

    def _is_nothing_saved(self) -> bool:
        """Return whether there never was a file that the job could go back to.

        What memory had has been lost where the next start finds nothing of it.
        """
        periodic = all(one.nothing_before for one in self._beside if isinstance(one, PeriodicSaver))
        return self._nothing_saved_before and self._base == 0 and periodic

    def _make_periodic_saver(self) -> PeriodicSaver:
        return PeriodicSaver(
            self._arguments.periodic,
            root=self._arguments.root,
            identity=self._identity,
            host=self._host,
            history=self._history,
            wanted_step=self._ring.wanted_step,
            write_word=self._native.write_word,
            report=self._reporter.report,
            warn=self._reporter.warn,
            snapshots=self.snapshots,
        )

    def _make_snapshots(self) -> list[Snapshots]:
        """Use the memory tier, if the agent has given one."""
        if self._given is None or self._given.memory is None:
            return []
        timeline = uuid.uuid4().hex
        if torch.distributed.is_initialized():
            store = job_store()
            timeline = hear_first(store, "timeline", self._identity.rank, timeline)
        self._spans = in_spans.wanted(
            self._native, self._given.memory, self._host.device, on_several_hosts(), self._reporter.warn
        )
        self.snapshots = Snapshots(
            snapshots.given(
                self._given.memory, self._given.whole, self._cut_among(), self._arguments.replicas
            ),
            identity=self._identity,
            timeline=timeline,
            host=self._host,
            history=self._history,
            write_word=self._native.write_word,
            warn=self._reporter.warn,
            times=None if self._spans is None else self._spans.times,
            spans=self._spans,
        )
        return [self.snapshots]

    def _cut_among(self) -> Sequence[int]:
        """Return the ranks that hold what this one holds, if that is to be cut among them in host memory."""
        if environment.MEMORY_TIER.get() != memory_wanted.SHARDED or self._identity.world_size == 1:
            return ()
        return cut.members(all_say(self._identity.shard), self._identity.rank)

    def _make_checker(self, model: nn.Module) -> SelfChecker:
        replicas = Replicas(self._identity.rank, self._identity.shard, self._restart, job_store)
        kept_average = self._arguments.kept is not None and self._arguments.kept.average is not None
        if kept_average and self._host.model is not None:
            model = self._host.model.module  # with the average
        return SelfChecker(
            model=model,
            host=self._host,
            history=self._history,
            rank=self._identity.rank,
            full=self._arguments.self_check == FULL_SELF_CHECK,
            write_word=self._native.write_word,
            post=replicas.post if self._identity.world_size > 1 else None,
            may_say=replicas.is_first_to_say,
            found_scaler=lambda: self._hooks.found_scaler,
            report=self._reporter.report,
            warn=self._reporter.warn,
        )

    def _register(self) -> None:
        self._reporter.report(
            protocol.Registered(
                rank=self._identity.rank,
                pid=os.getpid(),
                world_size=self._identity.world_size,
                shard=self._identity.shard,
                shards=self._identity.shards,
                fingerprint=self._identity.fingerprint,
                saver="builtin" if self._arguments.save_function is None else "callback",
                checkpoint_dir=str(self._arguments.root),
                named_directory=self._arguments.named_directory,
                stack_signal=stack_writer().signal_number,
                stack_fd=stack_writer().descriptor,
            )
        )
        if self._identity.world_size > 1 and self._reporter.has_agent:
            for name, ranks in parallel.named_groups():
                self._reporter.report(protocol.Group(self._identity.rank, name, list(ranks)))

    @property
    def step(self) -> int:
        """The newest optimizer step that the host has ended."""
        return self._hooks.step

    @property
    def steps_on_device(self) -> int:
        """How many optimizer steps the device has finished."""
        return self._native.progress().device_ended

    def set_base(self, step: int, path: Path | None) -> None:
        """Count the steps on from `step`, whose state was loaded from the save in `path`, or from memory."""
        self._base = step
        if step and self._host.kept.schedulers:
            self._schedules_restored = self._host.counts(), self._host.copied_progress()
        self._saver.restored(step, path)
        self._hooks.step = step
        self._native.set_base(step)
        self.watch_from_base()

    def end(self, *, at_exit: bool) -> None:
        """Take it down. at_exit: with the process, whose script has come to its end."""
        if not self._loop.is_used:
            self._history.settle_again(self._hooks.step)
        for one in self._beside:
            one.settled(self._hooks.step)
            one.finish()
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
            final_state.write(Path(rehearsal) / final_state.FOLDER, self._identity.rank, state)
        if at_exit and self._reporter.has_agent and self._identity.world_size > 1:
            self._stay()
        self._hooks.detach()
        self._others.end()
        self._gradients.end()
        self._unwatch()
        self._draws.end()
        if not at_exit:
            self._loop.close()
        self._exception_hook.remove()
        self._exit_hook.remove()
        self._reporter.report(protocol.Finished(self._identity.rank, self._hooks.step, at_exit))
        self.stop()  # a save that is under way still reports

    def stop(self) -> None:
        """Have the library do nothing more."""
        for one in self._beside:
            one.stop()
        checker = self._checker or self._last_check
        if checker is not None:
            checker.stop()
        if self._profiler is not None:
            self._profiler.stop()
        self._native.stop()
        self._reporter.speaks_through(None)

    def _stay(self) -> None:
        """Wait, with the state, until the scripts of all ranks are at their ends: another may yet fail."""
        if self._exit_hook.status != 0:
            return  # its end is a failure
        self._reporter.report(protocol.AtEnd(self._identity.rank))
        at_end.stay(lambda: not self._reporter.has_agent or wishes.may_end(self._ring.descriptor))

    # What the job's user asks for.

    def trust_extra(self) -> None:
        """`extra` is an adapter's, which makes up what a failure may lose of it: that is not warned of."""
        self._looks_at_extra = False
        self._extra_behind_forward = self._extra_behind_step = None

    def end_steps_at_boundary(self) -> None:
        """A minibatch ends as the loop goes on, and not with the optimizers' own steps."""
        self._hooks.only_at_boundary = True

    def write_before_step(self) -> None:
        """Write what this rank alone knows once more: it knows more since the forward pass.

        Whoever says so (the adapter of a framework) knows what of it a failure may lose, and makes that up.
        """
        self._told_before = self._hooks.step + 1
        self.forward_ended(self._told_before)

    def forget_pass(self) -> None:
        """The forward pass since the last step was made before, and no step follows it."""
        self._hooks.forget_pass()
        self._draws.forget_pass()

    def boundary(self) -> bool:
        """The loop goes on; whether a minibatch has ended by that."""
        return self._hooks.boundary()

    # What the hooks tell.

    def minibatch_begun(self, step: int) -> None:
        self._settle_at_forward(step)
        if self._awaits_forward:
            self._native.await_boundary(False)

    @_harmless
    def _settle_at_forward(self, step: int) -> None:
        if self._schedules_restored is not None:
            self._undo_steps_forward(*self._schedules_restored)
            self._schedules_restored = None
        if self._variables is not None and not self._loop.is_used:
            self._variables.minibatch_begun(sys._getframe())
            if not self._variables.is_looking:
                self._variables = None
        # Few calls, here and below: each costs some microseconds where all is cold in the caches.
        pending = []
        for one in self._beside:
            if one.is_pending(step - 1):
                pending.append(one)
        changed = self._outside.minibatch_begun(step, look=bool(pending))
        self._history.settle(step - 1)
        if changed and self._host.model is not None:
            self._history.hold(step - 1, self._host.model.held())
        if self._found is not None:
            self._found.settle(step - 1)
        if pending or self._outside.tells_apart:
            self._settle_beside(pending, step, changed)
        if self._checker is not None:
            is_checked = self._checker.is_pending(step - 1)
            self._settle_check(step - 1, changed or (is_checked and self._outside.has_changed))
        self._look_at_extra_behind_step(EXTRA_CHANGES_LATE)
        # In every minibatch: an average may begin in a late epoch.
        if not self._loop.is_used and self._averages not in (None, self._host.updates_of_averages()):
            self._reporter.warn_once(AVERAGE_CHANGES_LATE)
        if self._is_irregular():
            self._reporter.warn_once(IRREGULAR)

    def _undo_steps_forward(self, counts: Sequence[int], progress: Encoded) -> None:
        """A script may bring its scheduler forward itself, as it had to before that was kept."""
        stepped, is_undone = self._host.undo_steps(counts, progress)
        now = "they are undone" if is_undone else "its rate is another now than an undisturbed run's"
        for name, count in stepped.items():
            self._reporter.warn_on_first(STEPPED_BY_SCRIPT.format(name=name, count=count, now=now))

    def _look_at_extra_behind_step(self, text: str) -> None:
        before, self._extra_behind_step = self._extra_behind_step, None
        if before is not None and before != self._host.extra_now():
            self._reporter.warn_once(text)

    def _is_irregular(self) -> bool:
        """Whether a scheduler is not stepped in every minibatch."""
        return self._history.is_irregular or (self._found is not None and self._found.is_irregular)

    def _settle_beside(self, pending: Sequence[BesideTraining], step: int, changed: bool) -> None:
        """The forward pass of `step` begins; pending: those that are copying the state before it."""
        for one in pending if changed else ():
            if self._outside.is_counted(step):
                one.copy_again(self._history.shared(step - 1))
            else:
                one.cancel(step - 1)
        if self._outside.tells_apart:
            for one in self._beside:
                one.step_begins()  # what comes now may change what it copies
        for one in pending:
            if not self._history.may_come(step - 1):
                one.settled(step - 1)

    @_harmless
    def passed_again(self, step: int) -> None:
        self._history.settle_again(step - 1)  # the pass before was an evaluation's, perhaps
        if self._found is not None:
            self._found.settle_again(step - 1)

    def forward_ended(self, step: int) -> None:
        if self.off is None:
            self._forward_ended(step)
        else:
            self._ring.note_begun(step + self._astride)  # a failure takes the job back over it

    @_harmless
    def _forward_ended(self, step: int) -> None:
        if self._draws.is_looking:
            self._draws.forward_ended()
        if not self._recorder.write_again(step, final=False):
            self._write_local(step, final=False)
        looks = self._looks_at_extra and step <= self._base + EXTRA_LOOKED_AT
        # That of a step before is none of this one's: of several optimizers each tells as its step ends.
        self._extra_behind_forward = self._host.extra_now() if looks else None
        if self._copies is not None and self._barrier is None:
            self._copies.wait(step)  # the next collective may be the last that the others need

    def step_begun(self, step: int) -> None:
        self._step_begins(step)
        if self._awaits_step:
            self._native.await_boundary(False)
        if self._barrier is not None:
            self._native.step_enter()
            self._barrier.enqueue()
        self._native.step_begin(step, self._stream())
        self._await_what_comes()

    def _await_what_comes(self) -> None:
        """Let a save, should it be ordered now, come to where the state after this step is complete."""
        is_used = self._loop.is_used
        self._awaits_forward = not is_used and self._outside.end_the_step
        self._awaits_step = not is_used and self._is_irregular() and not self._outside.tells_apart
        if is_used or self._awaits_forward or self._awaits_step:
            self._native.await_boundary(True)

    @_harmless
    def _step_begins(self, step: int) -> None:
        self._draws.step_begins()
        self._history.step_begins(step)
        if self._found is not None:
            self._found.step_begins(step)
        if self._arguments.save_function is not None:
            self._find(step)
        if self._host.extra is not None:
            self._write_extra_again(step)
        if self.snapshots is not None:
            self.snapshots.optimizer_begins(step, self._hooks.found_scaler)
        is_unknown = self._outside.step_begun(step)
        for one in self._beside:
            one.step_begins()
            if is_unknown:
                one.cancel(step - 1)
            elif not self._loop.is_used:
                one.settled(step - 1)
        if self._checker is not None:
            self._checker.step_begins()
            if self._checker.is_done:
                self._last_check, self._checker = self._checker, None
        if self._barrier is not None and self._copies is not None:
            # Without this rank's part in the barrier no other makes the step.
            self._copies.wait(step, partial(self._ring.is_written, step))

    def _write_extra_again(self, step: int) -> None:
        """Write what this rank alone knows again if `extra` has changed since the forward pass.

        Other ranks may make the step without this one. What has changed on a device can't always be seen.
        """
        if step == self._told_before:
            return
        before, self._extra_behind_forward = self._extra_behind_forward, None
        if self._barrier is None and before is not None and before != self._host.extra_now():
            self._reporter.warn_once(EXTRA_CHANGES_EARLY)
        parts = self._host.local()
        if self._host.extra_is_on_device or not self._recorder.is_taken(parts):
            # With a barrier no other rank makes the step without these. Else one may that this rank's
            # gradients have reached, while what is written here is still on its way.
            self._recorder.write(step, False, parts, self._host.unchanged(), beside=self._barrier is None)

    @_harmless
    def closure_again(self, step: int) -> None:
        self._outside.closure_again(step)

    def unequal_turns(self, step: int) -> None:
        self._astride = 1
        self._switch_off(UNEQUAL_TURNS)

    @_harmless
    def other_step_begins(self) -> None:
        for one in self._beside:
            one.step_begins()  # it may change what they copy
        if self._checker is not None:
            self._checker.step_begins()

    def other_stepped(self, optimizer: Optimizer, *, has_begun: bool) -> None:
        text = OTHER_OPTIMIZER.format(name=type(optimizer).__qualname__)
        if not has_begun:  # the state that the job has begun with is there
            self._reporter.warn_once(text[0].upper() + text[1:])
            return
        self._switch_off(text)
        self._astride += 1  # a failure takes the job back over its steps, too

    def stepped_elsewhere(self, optimizer: Optimizer) -> bool:
        if self._checker is not None:
            return False  # who trains along in the first steps is named by it
        has_named = self._last_check is not None and self._last_check.has_named(optimizer)
        if not (has_named or self._host.extra_may_hold(parameters := parameters_of(optimizer))):
            name = type(optimizer).__qualname__
            self._reporter.warn_once(LATE_OPTIMIZER.format(name=name, count=len(parameters)))
        return True

    def step_ended(self, step: int) -> None:
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
        if self._host.model is not None and self._host.model.is_thawed:
            names = ", ".join(self._host.model.thawed()[:SHOWN_NAMES])
            self._reporter.warn_once(THAWED.format(names=names))
        self._outside.ended(step, self._watched(shared), shared.all_tensors)
        self._averages = self._host.updates_of_averages()
        if self._loop.is_used:
            self._buffer_versions = self._host.buffer_versions()
        # A rank that is alone is behind nobody.
        may_be_lost = not self._loop.is_used or self._identity.world_size > 1
        if self._looks_at_extra and may_be_lost and step <= self._base + EXTRA_LOOKED_AT:
            self._extra_behind_step = self._host.extra_now()
        if self._host.model is not None and (problems := self._host.model.attributes.problems):
            self._say_once(problems)
        self._look_at_gradients(shared)
        for optimizer in self._host.optimizers:
            if optimizer.looks or optimizer.refusal is not None:
                self._say_problems(optimizer)
        if self._found is not None:
            self._found.add(step)
            self._found.forget_before(step - self._max_ahead - KEPT_BESIDE)

    def _look_at_gradients(self, shared: Shared) -> None:
        before, self._frozen = self._frozen, shared.held.frozen
        carried = self._gradients.step_ended(self._trained) if self._gradients.is_looking else []
        carried = carried or self._stale.step_ended(
            self._trained, is_changed=before is not None and before != self._frozen
        )
        if carried:
            names = ", ".join(name.removeprefix("model.") for name in carried[:SHOWN_NAMES])
            self._reporter.warn_on_first(CARRIED_GRADIENTS.format(names=names))

    def _trained(self) -> dict[str, Tensor]:
        every = [one.named_parameters() for one in self._host.optimizers]
        return {name: parameter for named in every for name, parameter in named.items()}

    def _watched(self, shared: Shared) -> list[Mapping[str, Tensor]]:
        """Return what may change outside of the steps: the same mappings while the tensors are the same."""
        watched: list[Mapping[str, Tensor]] = [part.device for part in shared.optimizers]
        if self._host.model is not None:
            watched.insert(0, self._host.model.memory)
        rates = shared.rates()
        if [*map(id, rates.values())] != [*map(id, self._rates.values())]:
            self._rates = rates
        return [*watched, self._rates] if rates else watched

    @_harmless
    def _step_is_over(self, step: int) -> None:
        if not self._loop.is_used:
            self._save_periodically(step)
            if self._variables is not None:
                self._variables.step_ended(sys._getframe())
        if self._checker is not None:
            self._checker.step_ended(step, self._host.local, self._history.shared(step))
        self._history.forget_before(
            step - self._max_ahead - KEPT_BESIDE
        )  # the device has come further than that
        if not self._first_step_reported:
            self._report_first_step()

    def _say_once(self, problems: list[str]) -> None:
        for problem in problems:
            self._reporter.warn_once(problem)
        problems.clear()

    def _say_problems(self, optimizer: OptimizerState) -> None:
        """Name what changes of an optimizer and can't be saved; nothing is, where its state can't be."""
        if optimizer.refusal is not None:
            self._switch_off(optimizer.refusal)
        self._say_once(optimizer.problems())

    def _say_structure(self, step: int, model: ModelState) -> None:
        """Parameters have come or gone, and a start builds the model as the script does."""
        new, gone = model.structure()
        changes = [f"has got {', '.join(new[:SHOWN_NAMES])}"] if new else []
        changes += [f"has lost {', '.join(gone[:SHOWN_NAMES])}"] if gone else []
        if changes:
            self._reporter.warn_once(
                f"After step {step} the model {' and '.join(changes)}, which your script builds otherwise. "
                "A restart can go on from later saves only if the script builds the model as it is now "
                "before it calls jitckpt.init; else it is refused there."
            )

    def _switch_off(self, reason: str) -> None:
        """Take no save any more: what can't be saved whole is not saved."""
        if self.off is None:
            self.off = reason
            step = self._hooks.step + 1
            self._ring.note_begun(step + self._astride)
            self._reporter.warn(
                f"No state of this rank is saved from step {step} on: {reason} The training goes on; after a "
                "failure the job goes back to a save from before."
            )

    @_harmless
    def watch_from_base(self) -> None:
        """The parameters are as the script has built them, or as they were after `step`."""
        self._outside.begins(self._base, {} if self._host.model is None else self._host.model.memory)

    def minibatch_ended(self, step: int) -> None:
        self._settle_at_boundary(step)
        self._native.await_boundary(False)

    @_harmless
    def _settle_at_boundary(self, step: int) -> None:
        is_checked = self._checker is not None and self._checker.is_pending(step)
        changed = self._outside.minibatch_begun(step + 1, look=is_checked, boundary=True)
        self._history.settle(step)
        if changed and self._host.model is not None:
            self._history.hold(step, self._host.model.held())
        self._look_at_extra_behind_step(EXTRA_CHANGES_AT_THE_END)
        self._goes_on()
        self._write_at_boundary(step)
        self._save_periodically(step)
        for one in self._beside:
            if self._outside.tells_apart:
                one.step_begins()  # what comes now may change what it copies
            one.settled(step)
        if self._found is not None:
            self._found.settle(step)
        self._settle_check(step, changed)

    def _settle_check(self, step: int, changed: bool) -> None:
        if self._checker is not None:
            if self._outside.tells_apart:
                self._checker.step_begins()
            self._checker.settled(step, self._host.local if changed else None)
            if changed:
                self._checker.step_begins()  # what the next epoch begins with may change what it copies now

    def batch_drawn(self, number: int) -> None:
        """The loop was given a batch, of that pass of the epoch."""
        self._draws.batch_drawn(number)

    def drawn_ahead(self) -> None:
        self._reporter.warn_once(
            "The loop draws its next batch between a forward pass and the optimizer step, so after a failure "
            f"that batch would be left out. Draw it at the top of the loop: write {TWO_LINES}, or next() as "
            "the first thing in an iteration."
        )

    def steps_again(self) -> None:
        self._reporter.warn_once(
            "Several optimizer steps are made in one iteration, before it was one: a failure between these "
            "would go on with the next iteration. From the next one on they are taken as one."
        )

    def several_steps(self) -> None:
        if self._arguments.periodic.every is None:
            self._reporter.warn_once(
                "Several optimizer steps are made in one iteration. A failure between them, in which no rank "
                "comes to the end of the iteration, leaves nothing to save: the job goes back to an older "
                f"save. To have one, {advice.current().save_every}."
            )

    @_harmless
    def write_again(self) -> None:
        """Write what this rank alone knows after the newest step again, if the loop's end has changed it."""
        if self._hooks.step > self._base:
            step, unchanged = self._hooks.step, self._host.unchanged()
            if self._loop.last_boundary:
                self._loop.told_boundary(step)
            self._recorder.write_if_changed(step, self._host.local(), unchanged)

    def _write_at_boundary(self, step: int) -> None:
        """Write the same again if the script has changed it after its optimizer step.

        From the first time on it is done in every minibatch: then it tells whether a rank came to its end.
        """
        # Of what lies on a device not every change can be seen, as an average's through its parameters' data.
        changed = self._host.extra_is_on_device or self._host.buffer_versions() != self._buffer_versions
        if not (changed or self._loop.last_boundary) and self._recorder.is_as_written():
            return
        if changed or self._loop.last_boundary or not self._recorder.is_taken(self._host.local()):
            self._loop.told_boundary(step)
            self._write_local(step, final=True)

    def _save_periodically(self, step: int) -> None:
        for one in self._beside:
            if one.is_due(step):
                one.step_ended(step, self._host.local(), self._history.shared(step))

    def _find(self, step: int) -> None:
        """Find what a save function may read although init was not given it; optimizers make steps."""
        watched = self._hooks.watched
        if self._hooks.unexpected is not None and not self._has_named_unexpected:
            self._has_named_unexpected = True
            self._reporter.warn(f"No save can be made: {several_optimizers(self._hooks.unexpected)}")
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
                self._saver.found = self._found
            if self._host.model is None and (names := found.buffers_of(watched)):
                self._reporter.warn(
                    f"jitckpt.init was not given the model, which has buffers ({', '.join(names[:3])}): a "
                    "save function may read them as the forward pass of the next minibatch has left them. "
                    "Give jitckpt.init the model (model=...), and restore() puts them back as they were."
                )

    def _why_not_call(self, step: int) -> str | None:
        """Return why a save function can't be called for the state after a step, if so."""
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

    def _write_local(self, step: int, final: bool) -> None:
        self._recorder.write(step, final, self._host.local(), self._host.unchanged())

    def _injector(self) -> Callable[[int, str], None] | None:
        specs = injection.from_environment(environment.FAULTS.get(), self._identity.rank)
        # Without an agent nobody would know that one has happened: it would again, in each restart.
        if not (specs and self._reporter.has_agent):
            return None
        arm_device = proxy_faults.taken_over() or injection.arm_device
        return injection.Injector(specs, self._report_fault, self._native.arm_fault, arm_device).on_phase

    def _report_fault(self, spec: injection.FaultSpec) -> None:
        self._reporter.report(protocol.Fault(self._identity.rank, str(spec), spec.step, spec.phase))

    def _report_exception(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        self._reporter.report(protocol.Raised(self._identity.rank, text))

    def _report_first_step(self) -> None:
        if self._native.progress().device_ended > self._base:
            self._first_step_reported = True
            if self._reporter.has_agent:
                self._report_loaded()
            self._reporter.report(protocol.FirstStep(self._identity.rank, self._base + 1))

    def _report_loaded(self) -> None:
        modules = spare.importable_modules(sys.modules)
        changed = [list(pair) for pair in spare.changed_environment(os.environ).items()]
        for begin in range(0, len(modules), spare.MODULES_IN_A_MESSAGE):
            part = modules[begin : begin + spare.MODULES_IN_A_MESSAGE]
            self._reporter.report(protocol.Loaded(self._identity.rank, part, changed if begin == 0 else []))


def max_ahead(local_bytes: int, limit: int) -> int:
    """Return how many steps the host may be ahead: what this rank alone knows is kept for each of them."""
    if environment.FAULTS.get():
        return MAX_AHEAD[-1]  # the steps of rehearsed failures are the host's: it stays near to its device
    return next(
        (
            steps
            for steps in MAX_AHEAD
            if ring_format.area_bytes(limit, steps + KEPT_BESIDE)
            >= ROOM_TO_GROW * max(local_bytes, ring_format.PAGE)
        ),
        MAX_AHEAD[-1],
    )
