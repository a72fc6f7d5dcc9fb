"""Schedulers and gradient scalers: what may still be due of them after an optimizer step."""

import inspect
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from jitckpt.encoding.tensor_file import to_host

LAST = "_last_lr"  # what get_last_lr returns; torch's schedulers say it of themselves, DeepSpeed's do not


class Stateful(Protocol):
    """What `extra` and schedulers have to offer."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class SchedulerState:
    """A learning-rate scheduler, and how often it was stepped."""

    def __init__(self, scheduler: Stateful) -> None:
        self.scheduler = scheduler
        parameters = list(inspect.signature(type(scheduler).step).parameters.values())[1:]  # type: ignore[attr-defined]
        self.can_step = all(parameter.default is not parameter.empty for parameter in parameters)

    def count(self) -> int:
        """Return how many steps it has made."""
        value = getattr(self.scheduler, "_step_count", None)
        if not isinstance(value, int):
            value = getattr(self.scheduler, "last_epoch", None)
        return value if isinstance(value, int) else 0

    def step(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.step()  # type: ignore[attr-defined]

    def state(self) -> Any:
        """Return its state_dict, and the rates of its last step if it leaves them out."""
        said, rates = self.scheduler.state_dict(), getattr(self.scheduler, LAST, None)
        is_left_out = rates is not None and isinstance(said, dict) and LAST not in said
        return said | {LAST: rates} if is_left_out else said

    def restore(self, state: Any) -> None:
        """Put back what `state` said, however often."""
        if type(self.scheduler).__name__ == "OptimizerParamScheduler":
            self.scheduler.num_steps = 0  # type: ignore[attr-defined]  # Megatron's adds the steps to its own
        own = self.scheduler.state_dict()
        if isinstance(state, dict) and LAST in state and isinstance(own, dict) and LAST not in own:
            vars(self.scheduler)[LAST] = state[LAST]
            state = {name: value for name, value in state.items() if name != LAST}
        self.scheduler.load_state_dict(state)


def scaler_state(scaler: Any, update_is_due: bool) -> dict[str, Any]:
    """Return a GradScaler's state as its load_state_dict takes it. Reads the device, which must be at rest.

    `update_is_due`: the optimizer step is done but scaler.update() is not: what it would do is done to the
    copy that is returned.
    """
    if not scaler.is_enabled():
        return {}
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None:
        scale, growth = to_host(scale), to_host(growth)
        found = [
            to_host(found)
            for state in scaler._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if update_is_due and found:
            torch._amp_update_scale_(
                scale,
                growth,
                sum(found[1:], found[0]),
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            )
    return {
        "scale": scaler._init_scale if scale is None else float(scale),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._init_growth_tracker if growth is None else int(growth),
    }


def scaler_update_is_due(scaler: Any) -> bool:
    """Return whether scaler.step() was called and scaler.update() was not yet."""
    return scaler.is_enabled() and any(
        state["stage"] is OptState.STEPPED for state in scaler._per_optimizer_states.values()
    )
