"""What saves while the training goes on: snapshots in the memory tier, and periodic saves."""

import uuid
from collections.abc import Callable, Sequence

import torch
from torch.amp.grad_scaler import GradScaler

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.interpose import Native
from jitckpt.ring import wishes
from jitckpt.ring.ring import Ring
from jitckpt.saves import starts
from jitckpt.state.expected_size import least_bytes
from jitckpt.state.host_state import HostState
from jitckpt.state.shards import hear_first
from jitckpt.system.descriptors import GivenDescriptors
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.worker.agreements import job_store, on_several_hosts
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving import in_spans, snapshots
from jitckpt.worker.saving.beside import BesideTraining
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.in_spans import CopiesInSpans
from jitckpt.worker.saving.network import NetworkProfiler
from jitckpt.worker.saving.outside_changes import OutsideChanges
from jitckpt.worker.saving.periodic import PeriodicSaver
from jitckpt.worker.saving.snapshots import Snapshots


class Savers:
    """Told of the steps by the training's thread. None saves for a job with a save function of its own."""

    base = 0  # the step after which the job began
    snapshots: Snapshots | None = None  # in the memory tier, where there is one
    _periodic: PeriodicSaver | None = None
    _spans: CopiesInSpans | None = None  # of the minibatch, in which their copies are made
    _profiler: NetworkProfiler | None = None
    _nothing_saved_before = False

    def __init__(
        self,
        arguments: Arguments,
        native: Native,
        *,
        given: GivenDescriptors | None,
        host: HostState,
        history: History,
        outside: OutsideChanges,
        ring: Ring,
        reporter: Reporter,
        found_scaler: Callable[[], GradScaler | None],
    ) -> None:
        """given: by the agent. found_scaler: the training's, where it has one that init was not given."""
        self._arguments, self._native, self._reporter = arguments, native, reporter
        self._has_agent, self._ring = given is not None, ring.descriptor
        self._memory = None if given is None else given.memory
        self._whole = None if given is None else given.whole
        self._identity = arguments.identity
        self._host, self._history, self._outside = host, history, outside
        self._found_scaler = found_scaler
        self._all: Sequence[BesideTraining] = ()
        if arguments.save_function is None:
            if self._memory is not None:
                self.snapshots = self._make_snapshots(self._memory)
            self._periodic = self._make_periodic_saver(ring)
            self._all = [one for one in (self.snapshots, self._periodic) if one is not None]

    def _make_snapshots(self, memory: int) -> Snapshots:
        timeline = uuid.uuid4().hex
        if torch.distributed.is_initialized():
            store = job_store()
            timeline = hear_first(store, "timeline", self._identity.rank, timeline)
        self._spans = in_spans.wanted(
            self._native, memory, self._host.device, on_several_hosts(), self._reporter.warn
        )
        members = self._arguments.cut_among
        made = Snapshots(
            snapshots.given(memory, self._whole, members, () if members else self._arguments.replicas),
            identity=self._identity,
            timeline=timeline,
            host=self._host,
            history=self._history,
            write_word=self._native.write_word,
            warn=self._reporter.warn,
            times=None if self._spans is None else self._spans.times,
            spans=self._spans,
        )
        made.expect(least_bytes(self._arguments.model, self._arguments.optimizers))
        return made

    def _make_periodic_saver(self, ring: Ring) -> PeriodicSaver:
        return PeriodicSaver(
            self._arguments.periodic,
            root=self._arguments.root,
            identity=self._identity,
            host=self._host,
            history=self._history,
            wanted_step=ring.wanted_step,
            write_word=self._native.write_word,
            report=self._reporter.report,
            warn=self._reporter.warn,
            snapshots=self.snapshots,
            nothing_before=self.is_nothing_saved,
        )

    def learn_when_idle(self) -> None:
        """Learn when the network is idle, for copies that go over it, and the device."""
        if self._memory is None or self.snapshots is None:
            return
        sends = on_several_hosts()
        spans = self._spans
        if behind_proxy.is_there() or (not sends and spans is None):
            return
        self._profiler = NetworkProfiler(
            self._native,
            self._memory,
            self._reporter.warn,
            sends=sends,
            found=None if spans is None else spans.found,
        )
        self._profiler.start()

    # As the job goes on from a save.

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

    def is_nothing_saved(self) -> bool:
        """Return whether there never was a file that the job could go back to.

        What memory had has been lost where the next start finds nothing of it.
        """
        if not self._nothing_saved_before or self._periodic is None:
            return self._nothing_saved_before
        # Without an agent nobody tells whether the others have finished their parts of a periodic save.
        has_saved = wishes.is_saved_whole(self._ring) if self._has_agent else self._periodic.has_saved
        return not has_saved

    # The steps.

    def pending(self, step: int) -> list[BesideTraining]:
        """Return those that are copying the state after this step."""
        # Few calls: each costs some microseconds where all is cold in the caches.
        pending = []
        for one in self._all:
            if one.is_pending(step):
                pending.append(one)
        return pending

    def forward_begins(self, pending: Sequence[BesideTraining], step: int, *, changed: bool) -> None:
        """The forward pass of `step` begins; pending: those that are copying the state before it."""
        for one in pending if changed else ():
            if self._outside.is_counted(step):
                one.copy_again(self._history.shared(step - 1))
            else:
                one.cancel(step - 1)
        if self._outside.tells_apart:
            self.step_begins()  # what comes now may change what they copy
        for one in pending:
            if not self._history.may_come(step - 1):
                one.settled(step - 1)

    def optimizer_begins(self, step: int) -> None:
        """It need not be told where there are no `snapshots`."""
        if self.snapshots is not None:
            self.snapshots.optimizer_begins(step, self._found_scaler())

    def step_begins(self) -> None:
        """What the device is given now may change what they copy."""
        for one in self._all:
            one.step_begins()

    def step_begun(self, step: int, *, is_unknown: bool, may_settle: bool) -> None:
        """is_unknown: nobody can tell whether what they copy is the state before this step.

        may_settle: nothing more belongs to the step before.
        """
        for one in self._all:
            one.step_begins()
            if is_unknown:
                one.cancel(step - 1)
            elif may_settle:
                one.settled(step - 1)

    def save_if_due(self, step: int) -> None:
        for one in self._all:
            if one.is_due(step):
                one.step_ended(step, self._host.local(), self._history.shared(step))

    def boundary(self, step: int) -> None:
        """The loop goes on to its next iteration: all of `step` is there."""
        for one in self._all:
            if self._outside.tells_apart:
                one.step_begins()  # what comes now may change what it copies
            one.settled(step)

    # The end.

    def finish(self, step: int) -> None:
        """The training has ended with `step`: wait a while for what is being written."""
        for one in self._all:
            one.settled(step)
            one.finish()

    def save_no_more(self) -> None:
        """What comes now is in no save: let no other rank wait for a snapshot of it."""
        if self.snapshots is not None:
            self.snapshots.make_no_more()

    def stop(self) -> None:
        for one in self._all:
            one.stop()
        if self._profiler is not None:
            self._profiler.stop()
