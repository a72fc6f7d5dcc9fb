"""What a training changes of its model and optimizers that a start, which builds them anew, does not have."""

from collections.abc import Callable

from jitckpt.state.host_state import HostState
from jitckpt.state.model_state import ModelState

SHOWN_NAMES = 5
THAWED = (
    "{names}: trained now, but frozen as DistributedDataParallel was built, which averages no gradients of "
    "these. A restart builds both so again, and refuses to go on. Give jitckpt.init the model without "
    "DistributedDataParallel, call job.restore(), and wrap the model after that, here and in every start."
)


class Structure:
    """Looked at as each step ends."""

    def __init__(
        self, host: HostState, warn_once: Callable[[str], None], turn_off: Callable[[str], None]
    ) -> None:
        """turn_off: called with the reason where an optimizer's state can't be saved at all any more."""
        self._host, self._warn_once, self._turn_off = host, warn_once, turn_off

    def follow(self, step: int) -> None:
        """Take what the model is made of now."""
        if self._host.model is not None and self._host.model.follow():
            self._say_structure(step, self._host.model)

    def step_ended(self) -> None:
        model = self._host.model
        if model is not None and model.is_thawed:
            names = ", ".join(model.thawed()[:SHOWN_NAMES])
            self._warn_once(THAWED.format(names=names))
        if model is not None and (problems := model.attributes.problems):
            self._say_once(problems)
        for optimizer in self._host.optimizers:
            if optimizer.refusal is not None:
                self._turn_off(optimizer.refusal)
            if optimizer.looks and (problems := optimizer.problems()):
                self._say_once(problems)

    def _say_once(self, problems: list[str]) -> None:
        for problem in problems:
            self._warn_once(problem)
        problems.clear()

    def _say_structure(self, step: int, model: ModelState) -> None:
        """Parameters have come or gone, and a start builds the model as the script does."""
        new, gone = model.structure()
        changes = [f"has got {', '.join(new[:SHOWN_NAMES])}"] if new else []
        changes += [f"has lost {', '.join(gone[:SHOWN_NAMES])}"] if gone else []
        if changes:
            self._warn_once(
                f"After step {step} the model {' and '.join(changes)}, which your script builds otherwise. "
                "A restart can go on from later saves only if the script builds the model as it is now "
                "before it calls jitckpt.init; else it is refused there."
            )
