"""One restore: the job is brought back to the newest step that is saved whole, or begins."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jitckpt.data.loop import Loop
from jitckpt.errors import CheckpointError, LeftToScriptError, SaveError, TreeError
from jitckpt.hooks import captured_graphs
from jitckpt.saves import folders, starts
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import gradient_buckets
from jitckpt.state.host_state import HostState
from jitckpt.wire import environment, protocol
from jitckpt.worker import agreements, resharding, restoring, told_at_start
from jitckpt.worker.as_restored import add_no_group_twice_before_a_step
from jitckpt.worker.protection import Protection
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.resharding import Saved
from jitckpt.worker.saving.history import History
from jitckpt.worker.unprotected import Unprotected

STEPS_OF_BEFORE = (
    "A save can't be restored behind a CUDA graph in which an optimizer makes its step: the graph goes on "
    "with the state that the optimizer had at the capture. Call job.restore() before it, or optimizer.step() "
    "outside of the graph."
)


@dataclass(frozen=True)
class RestoredSave:
    """What a restore has come to: a step, and 0 on a fresh start.

    parts: what this rank alone knew, decoded. put_shared: puts the rest into the objects once more; None
    where the save is the script's own.
    """

    step: int
    parts: Mapping[str, Any] | None = None
    put_shared: Callable[[], object] | None = None


class Restore:
    """Made for one restore, by a job."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        host: HostState,
        history: History,
        loop: Loop,
        reporter: Reporter,
        protection: Protection | Unprotected,
        given_step: int | None,
        made_up: bool,
        is_left_to_script: Callable[[], bool],
        set_base: Callable[[int, Path | None], None],
    ) -> None:
        """given_step, made_up, is_left_to_script: as a Job's. set_base: counts the steps on from there."""
        self._root, self._identity = root, identity
        self._host, self._history, self._loop = host, history, loop
        self._reporter, self._protection = reporter, protection
        self._given_step, self._made_up = given_step, made_up
        self._is_left_to_script, self._set_base = is_left_to_script, set_base

    def make(self, *, reshard: bool) -> RestoredSave:
        """Bring the job back. reshard: a save of another layout may be cut anew. Raises as Job.restore."""
        begun = time.monotonic()
        memory = self._protection.found_in_memory()
        choice: Choice | None = None
        misfit: CheckpointError | None = None
        try:
            choice = agreements.choice(
                self._root,
                self._identity,
                several_hosts=agreements.on_several_hosts(),
                memory=memory,
                warn=self._reporter.warn,
            )
        except CheckpointError as error:
            misfit = error
        saved = self._saved_in_another_layout(choice, reshard or environment.RESHARD.get())
        if (choice or saved) is not None and self._is_left_to_script():
            raise LeftToScriptError(
                f"The script has brought itself back, and no save in {self._root} fits that."
            )
        if saved is not None:
            return self._restore_resharded(saved, begun)
        if misfit is not None:
            raise misfit
        if self._given_step is not None and self._given_step != (choice.step if choice else 0):
            raise CheckpointError(
                f"jit_get_checkpoint_path gave rank {self._identity.rank} step {self._given_step}, but of "
                "that step another rank's part can't be loaded any more. Move that step's folder away: the "
                "same command then goes on from an older one."
            )
        self._protection.nothing_saved(choice is None or choice.nothing_saved)
        self._tell_start(None if choice is None else choice.save, 0 if choice is None else choice.step)
        if choice is None:
            self._go_on_from(0)
            self._protection.restored_from_memory(0)
            return RestoredSave(0)
        for reason in choice.reasons:
            self._reporter.warn(f"A save was passed over: {reason}")
        if choice.newest > choice.step and self._identity.rank == 0:
            self._reporter.warn(
                f"Step {choice.step} is the newest that is whole for every shard; of step {choice.newest} a "
                f"part is lost, so at least {choice.newest - choice.step} minibatches are done again."
            )
        parts = self._load(choice)
        self._restore_buckets(parts, choice.step)
        put_shared = (
            partial(restoring.put_shared, choice, self._host) if restoring.is_builtin(choice) else None
        )
        add_no_group_twice_before_a_step([one.optimizer for one in self._host.optimizers])
        self._go_on_from(choice.step)
        self._set_base(choice.step, None if choice.in_memory else choice.save.path)
        self._protection.restored_from_memory(choice.step if choice.in_memory else 0)
        seconds = time.monotonic() - begun
        path, source = str(choice.save.path), choice.save.rank
        rank = self._identity.rank
        self._reporter.report(protocol.Restored(rank, choice.step, path, source, seconds, choice.reason))
        return RestoredSave(choice.step, parts, put_shared)

    def _load(self, choice: Choice) -> Mapping[str, Any]:
        """Put the save into the job's objects. Raises CheckpointError if it does not fit."""
        if captured_graphs.makes_steps():
            raise CheckpointError(STEPS_OF_BEFORE)
        try:
            return restoring.load(
                choice,
                identity=self._identity,
                host=self._host,
                history=self._history,
                loop=self._loop,
                reporter=self._reporter,
                made_up=self._made_up,
            )
        except KeyError as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: it lacks {error}.") from error
        except (SaveError, TreeError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{choice.save.path} can't be restored: {error}") from error

    def _restore_buckets(self, parts: Mapping[str, Any], step: int) -> None:
        if self._identity.world_size >= gradient_buckets.LEAST_RANKS:  # on all ranks or none
            buckets = self._host.of_process.gradient_buckets
            buckets.warn = self._reporter.warn
            buckets.restore(parts.get(gradient_buckets.PART), step, agreements.all_say)

    def _saved_in_another_layout(self, choice: Choice | None, may_cut: bool) -> Saved | None:
        """Return the newest whole step, if another layout saved it. CheckpointError if it may not be cut."""
        step = 0 if choice is None else choice.step
        if not may_cut and (choice is None or choice.newest == step):
            return None
        saved = resharding.newer(self._root, self._identity, step, agreements.store_of_ranks())
        if saved is not None and not may_cut:
            raise CheckpointError(saved.refused(self._identity))
        return saved

    def _go_on_from(self, step: int) -> None:
        """Leave later steps, of earlier tries, behind: they will be made again."""
        identity = self._identity
        try:
            starts.note_going_on(self._root, identity.start, step)
            folders.set_aside_after(self._root, step, identity.rank, identity.start, identity.world_size)
        except (OSError, SaveError) as error:
            raise CheckpointError(f"Rank {identity.rank} can't go on from step {step}: {error}") from error

    def _restore_resharded(self, saved: Saved, begun: float) -> RestoredSave:
        rank, first = self._identity.rank, saved.records[0]
        if captured_graphs.makes_steps():
            raise CheckpointError(STEPS_OF_BEFORE)
        if self._given_step is not None and self._given_step != saved.step:
            raise CheckpointError(
                f"jit_get_checkpoint_path gave rank {rank} step {self._given_step}; step {saved.step}, which "
                "is of another layout, can only be loaded by restore()."
            )
        self._tell_start(first, saved.step)
        try:
            parts, told = resharding.load(saved, self._root, self._identity, self._host, self._history)
            if "loop" in parts:
                of_others = saved.identity.world_size != self._identity.world_size
                if not self._loop.restore(parts["loop"], None, saved.step, of_others=of_others):
                    parts |= restoring.iteration_made_up(parts)
                    self._host.restore_local(parts)
            else:
                self._loop.count_from(saved.step)
        except (SaveError, TreeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"Step {saved.step} in {self._root} can't be cut anew: {error}") from error
        if rank == 0:
            self._reporter.warn(told)
        self._go_on_from(saved.step)
        self._set_base(saved.step, first.path)
        self._protection.restored_from_memory(0)
        seconds = time.monotonic() - begun
        self._reporter.report(protocol.Restored(rank, saved.step, str(first.path), first.rank, seconds))
        return RestoredSave(saved.step, parts, partial(resharding.put_shared, saved, self._host))

    def _tell_start(self, save: SaveRecord | None, step: int) -> None:
        told_at_start.of_start(
            self._reporter,
            self._root,
            self._identity,
            [one.optimizer for one in self._host.optimizers],
            save=save,
            step=step,
            is_protected=isinstance(self._protection, Protection),
        )
