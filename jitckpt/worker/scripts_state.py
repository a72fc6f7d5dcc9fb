"""What the script around a job's loops holds by itself: variables, and generators of random numbers."""

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from jitckpt.data import changed_as_read
from jitckpt.data.loop import Asked
from jitckpt.state import kept
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import KeptVariables, VariablesNow
from jitckpt.state.optimizer_state import TensorsOfOptimizers
from jitckpt.state.script_generators import ScriptGenerators
from jitckpt.system.bytecode import place_in
from jitckpt.worker.arguments import Arguments
from jitckpt.worker.cached_draws import CachedDraws
from jitckpt.worker.carried_names import read_behind
from jitckpt.worker.frames import frames_that_ask
from jitckpt.worker.script_generators import generators_from
from jitckpt.worker.script_variables import ScriptVariables
from jitckpt.worker.variable_keeper import VariableKeeper


class ScriptsState:
    """It is looked at; what changes is kept where that is wanted, and named else."""

    _asking: FrameType | None = None  # who asks for the next minibatch
    _keeper: VariableKeeper | None = None

    def __init__(
        self,
        given: Arguments,
        job: object,
        *,
        host: Callable[[], HostState],
        step: Callable[[], int],
        of_round: Callable[[], tuple[int, ...]],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """step: the newest that the host has ended. of_round: of the job's loops. say: of what is kept."""
        self._host, self._step, self._of_round = host, step, of_round
        self._say, self._warn = say, warn
        self._cached = CachedDraws(warn)
        self._is_adapters = False  # `extra` is a framework's adapter, which reaches what it does not keep
        shared: dict[str, Any] = {"said": set(), "targets": set(), "epochs_at": {}}
        self.variables = self._make_variables(given, job, of_epochs=False, **shared)
        self.variables_of_epochs = self._make_variables(given, job, of_epochs=True, **shared)

    def _make_variables(
        self, given: Arguments, job: object, *, of_epochs: bool, **shared: Any
    ) -> ScriptVariables:
        wrappers = [one for wrapped in given.wrappers.values() for one in wrapped]
        return ScriptVariables(
            [
                *(given.model, *given.optimizers, *given.schedulers, given.scaler, given.extra, job),
                *(*wrappers, *(given.kept or kept.NOTHING).objects()),
            ],
            given.extra,
            self._step,
            self._warn,
            of_epochs=of_epochs,
            of_round=self._of_round,
            **shared,
            kept=self._kept,
            keeper=lambda: self._keeper,
        )

    def _kept(self) -> set[object]:
        """Return what of the script's variables is kept by itself."""
        model, found = self._host().model, {*self._kept_generators(), *changed_as_read.looked_after()}
        return found if model is None else found | model.kept_attributes()

    def is_put_back(self, frame: FrameType, name: str) -> bool:
        """Return whether a restart goes on with another value of this variable than the script computes."""
        return self._keeper is not None and self._keeper.is_put_back(frame, name)

    def keep_variables(self) -> None:
        """Keep what the script's loop changes in its variables."""
        host = self._host()
        optimizers = TensorsOfOptimizers(host.optimizers)
        if host.model is None:
            host.variables = KeptVariables(optimizers=optimizers)
        else:
            host.variables = KeptVariables(host.model.lies_in_parameter, optimizers)
        self._keeper = VariableKeeper(
            host.variables, self._of_round, say=self._say, warn=self._warn, generators=self._kept_generators
        )

    def keep_generators(self) -> None:
        """Keep the script's generators of random numbers, as its variables lead to them."""
        self._host().generators = ScriptGenerators()
        self._is_adapters = True
        self.find_generators()

    def _kept_generators(self) -> Collection[int]:
        kept = self._host().generators
        return () if kept is None else kept.kept_ids()

    def find_generators(self) -> None:
        """Keep what the script has made by now; no harm to the training if its variables can't be read."""
        host = self._host()
        if host.generators is not None:
            extra = None if self._is_adapters else host.extra
            with suppress(Exception):
                host.generators.follow(generators_from(sys._getframe(1), extra))

    def keep_what_is_read_behind(self, asked: Asked, is_known: bool, *, tells: bool = True) -> None:
        """Keep what a loop of the job sets and the code behind it reads, such as the last loss.

        A restart at the loop's end comes there without an iteration. asked: where the script has asked for a
        minibatch. is_known: it is at the loop's end; else it may be. tells: name what can't be kept.
        """
        if (keeper := self._keeper) is None:
            return
        for frame in frames_that_ask(sys._getframe(1))[-1:]:
            place = asked[1] if frame.f_code is asked[0] else place_in(frame)
            keeper.follow_behind(frame, read_behind(frame.f_code, place), is_known=is_known, tells=tells)

    def loop_ended(self) -> None:
        """A loop has ended behind the newest optimizer step."""
        if self._keeper is not None:
            self._keeper.loop_ended()

    def put_behind(self, place: str | None = None) -> None:
        """A restart is at the end of a loop that it passes by, and that is not where it goes on.

        place: as VariableKeeper.put_behind has it.
        """
        if self._keeper is not None:
            self._keeper.put_behind(sys._getframe(1), place)

    def note_at(self, place: str) -> None:
        """Keep what there is at an epoch's top, or behind a loop over epochs, for a restart that comes by."""
        if self._keeper is not None:
            self._keeper.note_at(sys._getframe(1), place)

    def keep_loops(self, place: str) -> None:
        """Keep what there was behind each loop before this one over epochs, for a restart that comes by."""
        if self._keeper is not None:
            self._keeper.keep_loops(place)

    def outermost_loop_begins(self) -> None:
        """No loop of the job is around the one that begins."""
        with suppress(Exception):
            self._cached.loop_begins(sys._getframe(1))
        if self._keeper is not None:
            self._keeper.outermost_loop_begins(sys._getframe(1))

    def pass_begins(self) -> None:
        """The script begins a pass over its batches, perhaps in a loop over epochs that nobody knows."""
        for asks in frames_that_ask(sys._getframe(1))[-1:]:
            self.variables_of_epochs.look(asks)

    def asks(self, frame: FrameType | None) -> None:
        """The script asks for its next minibatch in this frame; None: it has been given it."""
        self._asking = frame

    def goes_on(self) -> None:
        """The script asks for its next minibatch behind an optimizer step, or comes to its loop's end."""
        if self._asking is not None:
            self.variables.look(self._asking)
        with suppress(Exception):  # what the script's own code raises for an attribute is not its affair
            self._cached.look(sys._getframe(1), self._keep)
        if self._keeper is not None:
            self._keeper.take(sys._getframe(1))

    def _keep(self, frame: FrameType, name: str) -> bool:
        """Keep what the loop has made first; return whether that can be."""
        if self._keeper is None:
            return False
        self._keeper.follow(frame, [name], have_changed=True)
        return self._keeper.keeps(frame, name)

    def as_it_stands(self, frame: FrameType | None) -> VariablesNow | None:
        """Return what the variables are in the middle of an iteration, for the thread that saves."""
        return None if self._keeper is None else self._keeper.as_it_stands(frame)

    def lacking(self) -> list[str]:
        """Return the sentences about what was restored, and is not in the script's hands."""
        generators, keeper = self._host().generators, self._keeper
        found = [one.lacking() for one in (generators, keeper) if one is not None]
        return [text for text in found if text]

    def put_back(self) -> None:
        """Set the variables once more to what was restored."""
        if self._keeper is not None:
            self._keeper.put_back(sys._getframe(1))

    def end(self) -> None:
        generators = self._host().generators
        if generators is not None:
            generators.end()
