"""What the script around a job's loops holds by itself: variables, and generators of random numbers."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from jitckpt.data.loop import Asked
from jitckpt.state import kept
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import KeptVariables, VariablesNow
from jitckpt.state.optimizer_state import TensorsOfOptimizers
from jitckpt.worker.arguments import Arguments
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
        known: tuple[set[object], set[object]] = set(), set()
        self.variables = self._make_variables(given, job, *known, of_epochs=False)
        self.variables_of_epochs = self._make_variables(given, job, *known, of_epochs=True)

    def _make_variables(
        self, given: Arguments, job: object, said: set[object], targets: set[object], *, of_epochs: bool
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
            said=said,
            targets=targets,
            kept=self._kept,
            keeper=lambda: self._keeper,
        )

    def _kept(self) -> set[object]:
        """Return what of the script's variables is kept by itself."""
        generators, model = self._host().generators, self._host().model
        found: set[object] = set() if generators is None else {*generators.kept_ids()}
        return found if model is None else found | model.attributes.kept()

    def keep_variables(self) -> None:
        """Keep what the script's loop changes in its variables."""
        host = self._host()
        optimizers = TensorsOfOptimizers(host.optimizers)
        if host.model is None:
            host.variables = KeptVariables(optimizers=optimizers)
        else:
            host.variables = KeptVariables(host.model.lies_in_parameter, optimizers)
        self._keeper = VariableKeeper(host.variables, self._of_round, say=self._say, warn=self._warn)

    def find_generators(self) -> None:
        """Keep what the script has made by now; no harm to the training if its variables can't be read."""
        host = self._host()
        if host.generators is not None:
            with suppress(Exception):
                host.generators.follow(generators_from(sys._getframe(1), host.extra))

    def keep_what_is_read_behind(self, asked: Asked, is_known: bool, *, tells: bool = True) -> None:
        """Keep what a loop of the job sets and the code behind it reads, such as the last loss.

        A restart at the loop's end comes there without an iteration. asked: where the script has asked for a
        minibatch. is_known: it is at the loop's end; else it may be. tells: name what can't be kept.
        """
        if (keeper := self._keeper) is None:
            return
        for frame in frames_that_ask(sys._getframe(1))[-1:]:
            place = asked[1] if frame.f_code is asked[0] else frame.f_lasti
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
        if self._keeper is not None:
            self._keeper.take(sys._getframe(1))

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
