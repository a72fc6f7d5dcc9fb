"""Whether a rank's state is saved: what fails here fails jitckpt alone, and the training goes on."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from jitckpt.system.signals import comes_from_signal


class Switch:
    """On until something has failed, or was done that no save can hold; then off for good."""

    off: str | None = None  # why no state is saved any more
    interrupted: str | None = None  # a signal's handler has raised in the middle of a hook
    astride = 0  # iterations of the loop that lie across a minibatch as it is counted

    def __init__(
        self,
        newest_step: Callable[[], int],
        note_begun: Callable[[int], None],
        warn: Callable[[str], None],
        saves_no_more: Callable[[], None] = lambda: None,
    ) -> None:
        """newest_step: that the host has ended. note_begun: tells the agent of one that is in no save.

        saves_no_more: called once, as it goes off.
        """
        self._newest_step, self._note_begun, self._warn = newest_step, note_begun, warn
        self._saves_no_more = saves_no_more

    def turn_off(self, reason: str) -> None:
        """Take no save any more: what can't be saved whole is not saved."""
        if self.off is None:
            self.off = reason
            step = self._newest_step() + 1
            self.begun(step)
            self._saves_no_more()
            self._warn(
                f"No state of this rank is saved from step {step} on: {reason} The training goes on; after a "
                "failure the job goes back to a save from before."
            )

    def begun(self, step: int) -> None:
        """A step begins of which no state is saved: a failure takes the job back over it."""
        self._note_begun(step + self.astride)


class HasSwitch(Protocol):
    """Has methods that are harmless."""

    switch: Switch


Owner = TypeVar("Owner", bound=HasSwitch)
P = ParamSpec("P")


def harmless(method: Callable[Concatenate[Owner, P], None]) -> Callable[Concatenate[Owner, P], None]:
    """Have whatever fails in a method fail jitckpt alone: the training goes on without it.

    What a signal's handler raises meanwhile (torch's, when a loader's worker has died) is the training's.
    Should it go on after that, the method was left in the middle.
    """

    @wraps(method)
    def guarded(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        switch = owner.switch
        if switch.interrupted is not None:
            switch.turn_off(switch.interrupted)
        if switch.off is None:
            try:
                method(owner, *args, **kwargs)
            except Exception as error:
                if comes_from_signal(error):
                    switch.interrupted = f"a signal's handler raised {error!r} where the state is taken."
                    raise
                switch.turn_off(str(error) or repr(error))

    return guarded
