"""What the script's variables are around its loops over epochs, as these tell where it is."""

from types import FrameType

from jitckpt.data.loop import Epochs
from jitckpt.state.earlier_loops import OVER_EPOCHS, TOP
from jitckpt.worker.scripts_state import ScriptsState


class ScriptsEpochs(Epochs):
    def __init__(self, script: ScriptsState) -> None:
        self._script = script

    def begins(self, frame: FrameType) -> None:
        self._script.epoch_begins(frame)

    def goes_on(self) -> None:
        self._script.put_behind(TOP)

    def ended(self, loop: int) -> None:
        self._script.note_at(f"{OVER_EPOCHS}{loop}")

    def passed_by(self, loop: int) -> None:
        self._script.put_behind(f"{OVER_EPOCHS}{loop}")
