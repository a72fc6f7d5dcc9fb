"""Fault tolerance for distributed PyTorch training, checkpointed just in time."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitckpt.job import Job, init, jit_get_checkpoint_path
    from jitckpt.saver import SaveContext

__all__ = ["Job", "SaveContext", "init", "jit_get_checkpoint_path"]


def __getattr__(name: str) -> Any:
    # Lazily: `import torch` itself imports this package, and the command line needs no torch.
    if name not in __all__:
        raise AttributeError(f"module 'jitckpt' has no attribute {name!r}")
    from jitckpt import job, saver

    return getattr(saver if name == "SaveContext" else job, name)
