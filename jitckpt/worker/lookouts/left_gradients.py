"""Looks whether gradients live on from one optimizer step into the next: no save holds them."""

from collections.abc import Callable

from jitckpt.hooks.carried_gradients import CarriedGradients
from jitckpt.hooks.guard import in_words
from jitckpt.hooks.stale_gradients import StaleGradients
from jitckpt.state.host_state import HostState, Shared

SHOWN_NAMES = 5
CARRIED_GRADIENTS = (
    "Gradients ({names}) are carried on from one optimizer step to the next, and no save holds them: after a "
    "failure they begin anew, so the training would differ from an undisturbed one. Clear them for each step "
    "(optimizer.zero_grad()); what is to be carried on, keep in the optimizer's momentum, or in buffers of "
    "the model (register_buffer) that you add to the gradients."
)


class LeftGradients:
    """Looks until `end`; those that are carried on as they are, and those that nobody clears any more."""

    _frozen: tuple[str, ...] | None = None  # parameters, as the newest step ended

    def __init__(
        self, host: HostState, warn: Callable[[str], None], warn_on_first: Callable[[str], None]
    ) -> None:
        self._host, self._warn_on_first = host, warn_on_first
        self._carried = CarriedGradients(
            lambda error: warn(f"Nobody sees whether gradients are carried on: {in_words(error)}.")
        )
        self._stale = StaleGradients()

    def step_ended(self, shared: Shared) -> None:
        before, self._frozen = self._frozen, shared.held.frozen
        carried = self._carried.step_ended(self._host.optimized) if self._carried.is_looking else []
        carried = carried or self._stale.step_ended(
            self._host.optimized, is_changed=before is not None and before != self._frozen
        )
        if carried:
            names = ", ".join(name.removeprefix("model.") for name in carried[:SHOWN_NAMES])
            self._warn_on_first(CARRIED_GRADIENTS.format(names=names))

    def end(self) -> None:
        self._carried.end()
