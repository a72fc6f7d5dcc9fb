"""What may change outside of optimizer steps: the same mappings while the tensors are the same."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from jitckpt.state.host_state import HostState, Shared


class Watched:
    """Asked as each step ends."""

    _rates: Mapping[str, Tensor] = MappingProxyType({})  # hyperparameters that are tensors on the device

    def __init__(self, host: HostState) -> None:
        self._host = host

    def parameters(self) -> list[Mapping[str, Tensor]]:
        """Return the model's part of it, which is there before the first step."""
        return [] if self._host.model is None else [self._host.model.memory, self._host.model.around]

    def after(self, shared: Shared) -> list[Mapping[str, Tensor]]:
        """Return all of it, of which `shared` was taken."""
        model = self._host.model
        watched: list[Mapping[str, Tensor]] = [] if model is None else [model.memory, model.around]
        for part in shared.optimizers:
            watched += [part.device, part.around]
        rates = shared.rates()
        if (rates or self._rates) and [*map(id, rates.values())] != [*map(id, self._rates.values())]:
            self._rates = rates
        return [*watched, self._rates] if rates else watched
