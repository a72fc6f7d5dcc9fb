"""Accelerate's LocalSGD: between two averagings each rank has parameters of its own, so none is a replica."""

from types import ModuleType
from typing import Any

from jitckpt.frameworks import protection

NOT_PROTECTED = (
    "accelerate: LocalSGD: recognised, but not protected: between two averagings each rank has parameters of "
    "its own, which nobody else has. Use Accelerator.save_state."
)


@protection.once
def install(local_sgd: ModuleType) -> None:
    """Have no training be protected that parts its ranks."""
    kind = local_sgd.LocalSGD
    initialise = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if self.enabled:
            protection.end(NOT_PROTECTED)

    kind.__init__ = __init__
