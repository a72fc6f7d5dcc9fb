"""torchtitan: its Trainer goes on behind the last step that is done, as from a checkpoint of its own.

All that a training consists of comes together in its CheckpointManager, which is asked to load once all is
built. The training is restored then, in the place of what would be loaded. Batches come from jitckpt's pass
over the loader, which goes on by the loader's own state. What follows an optimizer step (a checkpoint of
torchtitan's, a validation) is done again unless a rank came to its end.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch import nn

from jitckpt.frameworks import protection
from jitckpt.frameworks.protection import FrameworkProtection, Managed

TRAIN_STATE = "train_state"  # the Trainer's name among the states of its CheckpointManager
NEEDED = (
    "train_step",
    "should_continue_training",
    "model_parts",
    "optimizers",
    "lr_schedulers",
    "dataloader",
    "step",
    "ntokens_seen",
)


def protect() -> None:
    """For programs that `jitckpt run` does not start itself: call it before the Trainer is built."""
    from torchtitan.components import checkpoint

    install(checkpoint)


@protection.once
def install(checkpoint: ModuleType) -> None:
    """Have every Trainer whose CheckpointManager is asked to load protect its training."""
    kind = checkpoint.CheckpointManager
    initialise, load = kind.__init__, kind.load
    trainers: dict[int, Any] = {}  # by their CheckpointManagers, until these are asked to load

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        trainers[id(self)] = kwargs.get("states", {}).get(TRAIN_STATE)

    def _load(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = trainers.pop(id(self), None)
        training = None if trainer is None else _begin(trainer)
        if training is not None and training.goes_on:
            return True
        return load(self, *args, **kwargs)

    kind.__init__, kind.load = __init__, _load


def _begin(trainer: Any) -> "TorchtitanTraining | None":
    name = f"torchtitan {version('torchtitan')}"
    return protection.unless_unknown(name, lambda: _protected(trainer, name))


def _protected(trainer: Any, name: str) -> "TorchtitanTraining | None":
    refusal = _why_not(trainer)
    if refusal is not None:
        protection.refuse(f"{name}: recognised, but not protected: {refusal}")
        return None
    return TorchtitanTraining(trainer, name)


def _why_not(trainer: Any) -> str | None:
    if lacking := [attribute for attribute in NEEDED if not hasattr(trainer, attribute)]:
        return f"its Trainer has no {lacking[0]}: versions 0.2 and 0.3 have."
    if getattr(getattr(trainer, "ft_manager", None), "enabled", False):
        return "torchft is on, which has other ranks go on without those that fail."
    if type(trainer.optimizers).__name__ == "OptimizersInBackwardContainer":
        return "it makes its optimizer steps within the backward pass (optimizer.early_step_in_backward)."
    if _settings(trainer).training.enable_cpu_offload:
        return "its parameters are on the host (training.enable_cpu_offload)."
    return None


def _settings(trainer: Any) -> Any:
    return trainer.config if hasattr(trainer, "config") else trainer.job_config  # the latter in 0.2


class _Loader(Managed):
    """Its first pass begins before it is iterated: a checkpoint of torchtitan's holds the loader's place."""

    _begun: Iterator[Any] | None = None

    def begin(self) -> None:
        self._begun = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return super().__iter__() if begun is None else begun


class TorchtitanTraining:
    """The training of one Trainer; as `extra` of the job, what the Trainer itself counts."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer = trainer
        self._over = 0  # the newest step after which the loop went on
        self._repeats_end = False  # what follows the restored step is not done
        self._has_begun = False
        self._continues = trainer.should_continue_training
        parts = trainer.model_parts
        self.protection: FrameworkProtection | None = protection.begin(
            name,
            model=parts[0] if len(parts) == 1 else nn.ModuleList(parts),
            optimizers=[*trainer.optimizers],
            schedulers=[*trainer.lr_schedulers],
            progress=self,
            left_out="what metrics count since their last line",
            made_up=True,
        )
        if self.protection is None:
            return
        if self.goes_on:
            self._agree()
        self._loader = trainer.dataloader = _Loader(self.protection.job, trainer.dataloader)
        trainer.should_continue_training = self._should_continue

    @property
    def goes_on(self) -> bool:
        """Whether it was brought back."""
        return self.protection is not None and self.protection.restored > 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.trainer.step, "tokens": self.trainer.ntokens_seen, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.step, self.trainer.ntokens_seen = state["step"], state["tokens"]
        self._over = state["over"]

    def _agree(self) -> None:
        """Take what the ranks count alike from whoever came furthest; name a newer checkpoint."""
        assert self.protection is not None
        trainer = self.trainer
        said = protection.agree([trainer.step, self._over])
        trainer.step = max(step for step, _ in said)
        self._over = max(over for _, over in said)
        self._repeats_end = self._over < trainer.step
        manager = trainer.checkpointer
        newest = manager._find_load_step() if manager.enable and hasattr(manager, "_find_load_step") else 0
        if newest > trainer.step:
            protection.tell(
                f"torchtitan's checkpoint of step {newest} is newer than the save of step {trainer.step}, "
                "from which the training goes on. To go on from the checkpoint, move "
                f"{self.protection.job.root} away."
            )

    def _should_continue(self) -> bool:
        """The loop is at its head: all that belongs to a step before is done."""
        assert self.protection is not None
        if not self._has_begun:
            self._has_begun = True
            self._loader.begin()
            self.protection.go_on_now()
            if self._repeats_end:
                self._end_step()
        if self._over < self.trainer.step:
            self._over = self.trainer.step
            self.protection.step_is_over()
        goes_on: bool = self._continues()
        return goes_on

    def _end_step(self) -> None:
        """Do what the Trainer does after its step."""
        trainer, settings = self.trainer, _settings(self.trainer)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == settings.training.steps)
        validates = settings.validator if hasattr(settings, "validator") else settings.validation
        if validates.enable and trainer.validator.should_validate(trainer.step):
            with getattr(trainer.loss_fn, "no_rescale", nullcontext)():  # which 0.2 has
                trainer.validator.validate(trainer.model_parts, trainer.step)
