"""A rank's state under protection: who has to do with it, from jitckpt.init until the end.

There is one, whole, or there is none: where a device or the library is missing, the job runs without.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from jitckpt.bindings.interpose import Native, stream_of
from jitckpt.data.loop import Loop
from jitckpt.encoding.staging import Staging
from jitckpt.hooks import parameter_data
from jitckpt.hooks.other_optimizers import OtherOptimizers
from jitckpt.hooks.torch_training import TrainingHooks
from jitckpt.ring import local_state, wishes
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import final_state
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import VariablesNow
from jitckpt.state.parallel import DeviceBarrier
from jitckpt.system.descriptors import GivenDescriptors
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.wire import environment
from jitckpt.worker import one_connection, rehearsed_faults
from jitckpt.worker.agreements import job_store
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.around_steps import AroundSteps
from jitckpt.worker.first_step import FirstStepWatch
from jitckpt.worker.lookouts.lookouts import Lookouts
from jitckpt.worker.other_steps import OtherSteps
from jitckpt.worker.own_state import OwnState, asker
from jitckpt.worker.presence import Presence
from jitckpt.worker.read_by_function import ReadByFunction
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.savers import Savers
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.outside_changes import OutsideChanges
from jitckpt.worker.saving.saver import Saver
from jitckpt.worker.saving.watched import Watched
from jitckpt.worker.script_variables import ScriptVariables
from jitckpt.worker.self_check.checker import SelfChecker
from jitckpt.worker.self_check.comparison import FULL_SELF_CHECK, NO_SELF_CHECK
from jitckpt.worker.self_check.first_steps import FirstSteps
from jitckpt.worker.self_check.replicas import Replicas
from jitckpt.worker.steps_ahead import KEPT_BESIDE
from jitckpt.worker.switch import Switch, harmless

SETTLE_SECONDS = 0.05  # a device that moves on after all only costs another save


class Protection:
    """Made by a job; has what a save needs, and takes it down at the end."""

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
        self._native, self._arguments = native, arguments
        self._host, self._history, self._loop, self._reporter = host, history, loop, reporter
        self._identity = arguments.identity
        has_function, has_barrier = arguments.save_function is not None, barrier is not None
        descriptor = local_state.create() if given is None else given.state
        slots = max_ahead + KEPT_BESIDE
        self._ring = Ring(descriptor, self._identity, slots, arguments.local_state_limit)
        self.switch = Switch(
            lambda: self._hooks.step,
            self._ring.note_begun,
            reporter.warn,
            lambda: self._savers.save_no_more(),  # noqa: PLW0108  # there are none yet
        )
        recorder = Recorder(self._ring, native.write_area, reporter.warn)
        stream = stream_of(device)
        self._watched = Watched(host)
        self._outside = OutsideChanges(Mirror(native.write_word, stream), reporter.warn)
        copies = asker(given, host.device, reporter)
        self._own = OwnState(host, loop, self._ring, recorder, copies, has_barrier=has_barrier)
        self._read = ReadByFunction(host, lambda: self._hooks, reporter.warn, has_function=has_function)
        self._savers = self._make_savers(given)
        self._saver = self._make_saver(given, as_it_stands)
        self._check = FirstSteps(self._make_checker(restart), host)
        self._start_library(given, max_ahead)
        self._unwatch = parameter_data.watch(self._outside.taken)
        self._lookouts = self._make_lookouts(has_barrier=has_barrier)
        self._first_step = FirstStepWatch(self._identity.rank, native, reporter)
        self._steps = self._make_steps(
            stream=stream, barrier=barrier, variables=variables, goes_on=goes_on, max_ahead=max_ahead
        )
        self._hooks = self._make_hooks()
        others = OtherSteps(host, self.switch, self._savers, self._check, reporter)
        self._others = OtherOptimizers(arguments.optimizers, others)
        self._presence = Presence(arguments, reporter)

    def _start_library(self, given: GivenDescriptors | None, max_ahead: int) -> None:
        self._native.start(
            agent_fd=-1 if given is None else given.agent,
            hang_timeout=environment.HANG_TIMEOUT.get(),
            hang_floor=environment.HANG_FLOOR.get(),
            settle=SETTLE_SECONDS,
            max_ahead=max_ahead,
            max_calls_ahead=environment.CALLS_AHEAD.get(),
            save=self._saver,
        )
        self._reporter.speaks_through(self._native)
        one_connection.warn_of_it(self._identity.world_size, os.environ, self._reporter.warn_on_first)
        self._savers.learn_when_idle()

    def _make_savers(self, given: GivenDescriptors | None) -> Savers:
        return Savers(
            self._arguments,
            self._native,
            given=given,
            host=self._host,
            history=self._history,
            outside=self._outside,
            ring=self._ring,
            reporter=self._reporter,
            found_scaler=lambda: self._hooks.found_scaler,
        )

    def _make_lookouts(self, *, has_barrier: bool) -> Lookouts:
        return Lookouts(
            self._host,
            self._loop,
            self._arguments.model,
            has_barrier=has_barrier,
            is_alone=self._identity.world_size == 1,
            turn_off=self.switch.turn_off,
            warn=self._reporter.warn,
            warn_on_first=self._reporter.warn_on_first,
            warn_once=self._reporter.warn_once,
        )

    def _make_steps(
        self,
        *,
        stream: Callable[[], int],
        barrier: DeviceBarrier | None,
        variables: ScriptVariables,
        goes_on: Callable[[], None],
        max_ahead: int,
    ) -> AroundSteps:
        return AroundSteps(
            self._native,
            self.switch,
            stream=stream,
            barrier=barrier,
            host=self._host,
            history=self._history,
            loop=self._loop,
            variables=variables,
            goes_on=goes_on,
            outside=self._outside,
            watched=self._watched,
            own=self._own,
            savers=self._savers,
            check=self._check,
            read=self._read,
            lookouts=self._lookouts,
            first_step=self._first_step,
            reporter=self._reporter,
            max_ahead=max_ahead,
            saves_now_and_then=self._arguments.periodic.every is not None,
        )

    def _make_hooks(self) -> TrainingHooks:
        return TrainingHooks(
            self._steps,
            model=self._arguments.model,
            optimizers=self._arguments.optimizers,
            scaler=self._arguments.scaler,
            on_phase=rehearsed_faults.injector(self._identity.rank, self._native, self._reporter),
            every_optimizer=True,
            every_scaler=True,
        )

    def _make_saver(
        self, given: GivenDescriptors | None, as_it_stands: Callable[[FrameType | None], VariablesNow | None]
    ) -> Saver:
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
            refused=lambda: self.switch.off,
            staging=Staging(environment.STAGING.get(), pinned=True),
            report=self._reporter.report,
            keep=self._arguments.periodic.keep,
            why_not=self._read.why_not_call,
            found=lambda: self._read.found,
            memory=None if given is None else given.memory,
            whole=None if given is None else given.whole,
            nothing_before=self._savers.is_nothing_saved,
            as_it_stands=as_it_stands,
            warn=self._reporter.warn,
        )

    def _make_checker(self, restart: int) -> SelfChecker | None:
        given = self._arguments
        if given.save_function is not None or given.model is None or given.self_check == NO_SELF_CHECK:
            return None
        model: nn.Module = given.model
        replicas = Replicas(self._identity.rank, self._identity.shard, restart, job_store)
        kept_average = given.kept is not None and given.kept.average is not None
        if kept_average and self._host.model is not None:
            model = self._host.model.module  # with the average
        return SelfChecker(
            model=model,
            host=self._host,
            history=self._history,
            rank=self._identity.rank,
            full=given.self_check == FULL_SELF_CHECK,
            write_word=self._native.write_word,
            post=replicas.post if self._identity.world_size > 1 else None,
            may_say=replicas.is_first_to_say,
            found_scaler=lambda: self._hooks.found_scaler,
            report=self._reporter.report,
            warn=self._reporter.warn,
        )

    @property
    def step(self) -> int:
        """The newest optimizer step that the host has ended."""
        return self._hooks.step

    @property
    def steps_on_device(self) -> int:
        """How many optimizer steps the device has finished."""
        return self._native.progress().device_ended

    # As the job goes on from a save.

    def found_in_memory(self) -> OwnShard | None:
        """Return what the memory tier has for this rank to restore, if there is one."""
        return self._savers.found_in_memory()

    def restored_from_memory(self, step: int) -> None:
        """The memory tier's state after `step` was loaded; 0: none of it was."""
        self._savers.restored_from_memory(step)

    def nothing_saved(self, is_so: bool) -> None:
        """Whether no step of the job was ever saved whole in files, as all ranks have found."""
        self._savers.nothing_saved(is_so)

    def set_base(self, step: int, path: Path | None) -> None:
        """Count the steps on from `step`, whose state was loaded from the save in `path`, or from memory."""
        for one in (self._own, self._read, self._savers, self._lookouts.extra, self._first_step):
            one.base = step
        if step:
            self._lookouts.schedulers.restored()
        self._saver.restored(step, path)
        self._hooks.step = step
        self._native.set_base(step)
        self.watch_from_base()

    @harmless
    def watch_from_base(self) -> None:
        """The parameters are as the script has built them, or as they were after `step`."""
        self._outside.begins(self._own.base, self._watched.parameters())

    # The end.

    def end(self, *, at_exit: bool) -> None:
        """Take it down. at_exit: with the process, whose script has come to its end."""
        if not self._loop.is_used:
            self._history.settle_again(self._hooks.step)
        self._savers.finish(self._hooks.step)
        self._check.finish(self._hooks.step)
        self._first_step.await_it(self._hooks.step)
        if rehearsal := environment.REHEARSAL_DIR.get():
            state = final_state.of(self._hooks.step, self._host)
            final_state.write(Path(rehearsal) / final_state.FOLDER, self._identity.rank, state)
        if at_exit:
            self._presence.stay(lambda: wishes.may_end(self._ring.descriptor))
        self._hooks.detach()
        self._others.end()
        self._lookouts.end()
        self._unwatch()
        if not at_exit:
            self._loop.close()
        self._presence.end(self._hooks.step, at_exit=at_exit)
        self.stop()  # a save that is under way still reports

    def stop(self) -> None:
        """Have the library do nothing more."""
        self._savers.stop()
        self._check.stop()
        self._native.stop()
        self._reporter.speaks_through(None)

    # What the job's user asks for, and its loop.

    def trust_extra(self) -> None:
        """`extra` is an adapter's, which makes up what a failure may lose of it: that is not warned of."""
        self._lookouts.extra.trust()

    def end_steps_at_boundary(self) -> None:
        """A minibatch ends as the loop goes on, and not with the optimizers' own steps."""
        self._hooks.only_at_boundary = True

    def write_before_step(self) -> None:
        """Write what this rank alone knows once more: it knows more since the forward pass.

        Whoever says so (the adapter of a framework) knows what of it a failure may lose, and makes that up.
        """
        step = self._hooks.step + 1
        self._own.told_before(step)
        self._steps.forward_ended(step)

    @harmless
    def will_change(self, *, of_model_alone: bool) -> None:
        """Parameters, or all, are about to be changed behind the newest step, and no step follows."""
        self._outside.will_change(of_model_alone=of_model_alone)

    def forget_pass(self) -> None:
        """The forward pass since the last step was made before, and no step follows it."""
        self._hooks.forget_pass()
        self._lookouts.draws.forget_pass()

    def boundary(self) -> bool:
        """The loop goes on; whether a minibatch has ended by that."""
        return self._hooks.boundary()

    @harmless
    def batch_drawn(self, number: int) -> None:
        """The loop was given a batch, of that pass of the epoch."""
        self._lookouts.batch_drawn(number)

    @harmless
    def write_again(self) -> None:
        """Write what this rank alone knows after the newest step again, if the loop's end has changed it."""
        self._own.write_again(self._hooks.step)
