"""Fault tolerance for distributed PyTorch training, checkpointed just in time."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitckpt.worker.job import Job, init, jit_get_checkpoint_path
    from jitckpt.worker.saving.saver import SaveContext

__all__ = ["Job", "SaveContext", "init", "jit_get_checkpoint_path"]


def __getattr__(name: str) -> Any:
    # Lazily: `import torch` itself imports this package, and the command line needs no torch.
    if name == "frameworks":
        return importlib.import_module("jitckpt.frameworks")
    if name not in __all__:
        raise AttributeError(f"module 'jitckpt' has no attribute {name!r}")
    from jitckpt.worker import job
    from jitckpt.worker.saving import saver

    return getattr(saver if name == "SaveContext" else job, name)
