"""Megatron-core: what get_megatron_optimizer brings together is the state, and the loop is the script's own.

Its random numbers for dropout are kept by jitckpt.state.trackers. With the distributed optimizer each rank
has another part of the optimizer's state, which nobody else has: then each rank is a shard of its own.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from types import FrameType, ModuleType
from typing import Any

from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jitckpt.frameworks import protection, script_epochs, script_loops
from jitckpt.frameworks.protection import FrameworkProtection
from jitckpt.frameworks.script_pass import ScriptPass
from jitckpt.state import attributes, parallel
from jitckpt.worker import job as jobs

NO_LOADER = (
    "the script takes its batches from no torch DataLoader, so nothing tells where its loop is. Call "
    "jitckpt.init and take job.steps (docs/guides/user-level.md)."
)

_made: "Made | None" = None  # by the newest call


def protect() -> None:
    """For programs that `jitckpt run` does not start itself: call it before they import megatron.core."""
    from megatron.core import optimizer

    install(optimizer)


@protection.once
def install(optimizer: ModuleType) -> None:
    """Have the training be protected for which an optimizer is made."""
    make = optimizer.get_megatron_optimizer

    def get_megatron_optimizer(
        config: Any, model_chunks: Sequence[nn.Module], *args: Any, **kwargs: Any
    ) -> Any:
        global _made  # noqa: PLW0603
        made = make(config, model_chunks, *args, **kwargs)
        if _made is None:
            _made = Made(config, list(model_chunks), made)
            script_epochs.watch(sys._getframe(1), _goes_on)
        return made

    optimizer.get_megatron_optimizer = get_megatron_optimizer  # type: ignore[attr-defined]
    script_loops.when_iterated(_begin_pass)


def _begin_pass(loader: Any, frame: FrameType) -> Iterator[Any] | None:
    if _made is None or not _made.is_training:
        return None
    if not protection.is_taken():
        _made.begin(script_loops.why_not(frame), in_epochs=script_epochs.may_be_found())
        script_epochs.training_begins(_made.protection, frame)
    return None if _made.protection is None else ScriptPass(_made.protection.job, loader, frame)


def _goes_on(frame: FrameType) -> FrameworkProtection | None:
    """Protect the training, where a restart comes to its loop over epochs."""
    script_epochs.end()
    if _made is None or protection.is_taken():
        return None
    _made.begin(script_loops.why_not(frame), in_epochs=True)
    return _made.protection


def _leave_buffers() -> None:
    """What its DDP keeps of parameters and gradients is theirs; a distributed optimizer has that in it."""
    module = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
    for name in ("_ParamAndGradBuffer", "_ParamAndGradBucket", "_ParamAndGradBucketGroup"):
        kind = getattr(module, name, None)
        if kind is not None and kind not in attributes.KEPT_OTHERWISE:
            attributes.KEPT_OTHERWISE.append(kind)


class Made:
    """What one call has made: a training, or none."""

    def __init__(self, config: Any, models: list[nn.Module], optimizer: Any) -> None:
        self._config, self._models, self._optimizer = config, models, optimizer
        self.protection: FrameworkProtection | None = None
        # It stays, as torch goes through its hooks while they are called, and does something once.
        self.first_step = register_optimizer_step_pre_hook(self._steps)
        self._has_stepped = False

    @property
    def is_training(self) -> bool:
        return any(model.training for model in self._models)

    def begin(self, refusal: str | None, *, in_epochs: bool = False) -> None:
        """Protect it, as its first pass over batches begins, or a restart comes to the loop around these.

        refusal: why that can't be, if so. in_epochs: there is such a loop.
        """
        if protection.is_taken():
            return
        name = f"megatron-core {version('megatron-core')}"
        if refusal is not None:
            protection.refuse(f"{name}: recognised, but not protected: {refusal}")
            return
        _leave_buffers()
        has_parts = getattr(self._config, "use_distributed_optimizer", False)
        is_sharded = has_parts and distributed.get_world_size() > 1
        if is_sharded:
            protection.tell_of_parts("with the distributed optimizer")
        module = sys.modules.get("megatron.core.optimizer_param_scheduler")
        schedulers = [] if module is None else parallel.all_of(module.OptimizerParamScheduler)
        self.protection = protection.begin(
            name,
            model=self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models),
            optimizers=[self._optimizer],
            schedulers=[one for one in schedulers if one.optimizer is self._optimizer],
            progress=None,  # it counts nothing itself
            left_out="" if in_epochs else script_loops.LEFT_OUT,
            keeps_variables=True,
            shard=(distributed.get_rank(), distributed.get_world_size()) if is_sharded else None,
        )
        if self.protection is not None:
            # What the script does after Megatron's step, as its scheduler's, belongs to it.
            self.protection.job.end_steps_at_boundary()

    def _steps(self, *_: object) -> None:
        """A first step is made, and no pass over a loader has begun."""
        had_stepped, self._has_stepped = self._has_stepped, True
        if had_stepped:
            return
        if not protection.is_taken() and not jobs.is_current():
            self.begin(NO_LOADER)
