"""Says so where a framework is imported and optimizers make steps, but no training is protected."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from jitckpt.frameworks import protection
from jitckpt.worker import job as jobs

SAID_AT = 3  # optimizer steps: a warm-up may make some before the training begins
NOT_PROTECTED = (
    "{names}: recognised, but not protected: {steps} optimizer steps are made, and {why}. A loop of the "
    "script's own calls jitckpt.init (docs/guides/user-level.md)."
)
# By a framework's package: why it has no training in hand.
WHY = {
    "accelerate": "the first steps took no batches from a loader that Accelerator.prepare was given; prepare "
    "the training's loader, too",
    "transformers": "Trainer.train was not called",
    "lightning": "Trainer.fit was not called",
    "pytorch_lightning": "Trainer.fit was not called",
    "deepspeed": "no engine of deepspeed.initialize took its batches from a torch DataLoader",
    "torchtitan": "no Trainer of torchtitan was built",
}

_imported: list[str] = []
_handle: RemovableHandle | None = None  # stays: torch goes through its hooks as they are called
_steps = 0
_counts = True


def watch(framework: ModuleType) -> None:
    """The framework is there; look at the first optimizer steps of the process."""
    global _handle  # noqa: PLW0603
    package = framework.__name__.partition(".")[0]
    if package in WHY and package not in _imported:
        _imported.append(package)
        if _handle is None:
            _handle = register_optimizer_step_post_hook(_stepped)


@contextmanager
def not_counting() -> Iterator[None]:
    """The framework makes steps meanwhile to try something, which is no training."""
    global _counts  # noqa: PLW0603
    _counts = False
    try:
        yield
    finally:
        _counts = True


def _stepped(*_: Any) -> None:
    global _steps  # noqa: PLW0603
    _steps += _counts
    if _counts and _steps == SAID_AT and not protection.is_taken() and not jobs.is_current():
        protection.tell(told())


def told() -> str:
    """Return the sentence for the frameworks that are imported."""
    names = [f"{one} {getattr(importlib.import_module(one), '__version__', '')}".strip() for one in _imported]
    return NOT_PROTECTED.format(
        names=", ".join(names), steps=SAID_AT, why="; ".join(dict.fromkeys(WHY[one] for one in _imported))
    )
