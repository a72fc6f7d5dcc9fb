"""What a save function may read although jitckpt.init was not given it: found as optimizers make steps."""

from collections.abc import Callable

from torch.optim import Optimizer

from jitckpt.hooks.torch_training import TrainingHooks
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.worker.saving import found
from jitckpt.worker.saving.found import Found, several_optimizers


class ReadByFunction:
    """Finds it in the first step, and follows the optimizers from then on."""

    base = 0  # the step after which the job began
    found: Found | None = None  # schedulers and a scaler
    _has_named_unexpected = False

    def __init__(
        self,
        host: HostState,
        hooks: Callable[[], TrainingHooks],
        warn: Callable[[str], None],
        *,
        has_function: bool,
    ) -> None:
        """has_function: the script has given one; else nothing is looked for."""
        self._host, self._hooks, self._warn = host, hooks, warn
        self.has_function = has_function  # else it need be told of no step
        self._is_bare = not host.optimizers  # they are found as they make their steps

    @property
    def is_irregular(self) -> bool:
        """Whether a scheduler of those found is not stepped in every minibatch."""
        return self.found is not None and self.found.is_irregular

    def step_begins(self, step: int) -> None:
        """An optimizer is about to make this step."""
        if self.found is not None:
            self.found.step_begins(step)
        if self.has_function:
            self._find(step)

    def step_ended(self, step: int, *, oldest: int) -> None:
        """oldest: the step from which on the device may still have a state."""
        if self.found is not None:
            self.found.add(step)
            self.found.forget_before(oldest)

    def settle(self, step: int) -> None:
        if self.found is not None:
            self.found.settle(step)

    def settle_again(self, step: int) -> None:
        if self.found is not None:
            self.found.settle_again(step)

    def _find(self, step: int) -> None:
        hooks = self._hooks()
        watched = hooks.watched
        if hooks.unexpected is not None and not self._has_named_unexpected:
            self._has_named_unexpected = True
            self._warn(f"No save can be made: {several_optimizers(hooks.unexpected)}")
        if len(watched) > len(self._host.optimizers):
            known = [state.optimizer for state in self._host.optimizers]
            for optimizer in watched:
                if all(optimizer is not one for one in known):
                    self._host.add_optimizer(optimizer)
        if step == self.base + 1:
            self.found = found.look([one.scheduler for one in self._host.schedulers], hooks.found_scaler)
            if self.found is not None:
                self._host.changing_code |= self.found.host.changing_code
            if self._host.model is None and (names := found.buffers_of(watched)):
                self._warn(
                    f"jitckpt.init was not given the model, which has buffers ({', '.join(names[:3])}): a "
                    "save function may read them as the forward pass of the next minibatch has left them. "
                    "Give jitckpt.init the model (model=...), and restore() puts them back as they were."
                )

    def why_not_call(self, step: int) -> str | None:
        """Return why a save function can't be called for the state after a step, if so."""
        hooks = self._hooks()
        if hooks.unexpected is not None:
            return several_optimizers(hooks.unexpected)
        if (
            self._is_bare
            and step == self.base + 1
            and not (hooks.is_learned and len(hooks.watched) == 1)
            and len(parallel.all_of(Optimizer)) > 1
        ):
            return (
                f"After step {step}, the first one, it is not known yet which optimizers make up a "
                "minibatch: give them to jitckpt.init (optimizer=...)."
            )
        return None
