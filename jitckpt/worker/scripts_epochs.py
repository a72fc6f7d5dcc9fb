"""What the script's variables are around its loops over epochs, as these tell where it is."""

from types import FrameType

from jitckpt.data.loop import Asked, Epochs
from jitckpt.state.earlier_loops import OVER_EPOCHS, TOP, loop_of, within
from jitckpt.worker.scripts_state import ScriptsState


class ScriptsEpochs(Epochs):
    def __init__(self, script: ScriptsState) -> None:
        self._script = script
        self._goes_on = False
        self._passed: dict[int, list[int]] = {}  # by loops over epochs: how many over batches, and over steps

    def loop_begins(self, *, is_outermost: bool) -> None:
        if is_outermost:
            self._script.outermost_loop_begins()

    def begins(self, frame: FrameType) -> None:
        self._script.variables_of_epochs.look(frame)
        if not self._goes_on:  # else that was noted of this epoch, and its loops, before the failure
            self._script.note_at(TOP)
        self._goes_on = False

    def goes_on(self) -> None:
        self._script.put_behind(TOP)
        self._goes_on = True

    def ended(self, loop: int, asked: Asked | None) -> None:
        if asked is None:
            self._script.keep_loops(f"{OVER_EPOCHS}{loop}")
            return
        # Its last epoch sets again what it sets, unless a later loop has begun by then.
        self._script.keep_what_is_read_behind(asked, True, tells=False)
        self._script.note_at(f"{OVER_EPOCHS}{loop}")

    def passed_by(self, loop: int) -> None:
        self._script.put_behind(f"{OVER_EPOCHS}{loop}")

    def passed_by_outside(self, loop: int, of_steps: bool) -> None:
        passed = self._passed.setdefault(loop, [0, 0])
        passed[of_steps] += 1
        self._script.put_behind(within(f"{OVER_EPOCHS}{loop}", loop_of(passed)))
