"""What `import torch` runs because jitckpt is installed (entry point group torch.backends)."""

import ctypes
import os
from pathlib import Path


def load() -> None:
    """Put softgpu's operators in place where softgpu is the device, and under `jitckpt steps` its hooks.

    Otherwise do nothing. Raises OSError if softgpu is preloaded but its operators cannot be loaded: without
    them every operator on the device would fail.
    """
    _load_operators()
    if folder := os.environ.get("JITCKPT_STEPS_RECORD"):
        from jitckpt import step_record

        step_record.begin(Path(folder))


def _load_operators() -> None:
    if not hasattr(ctypes.CDLL(None), "softgpu_shadow"):
        return
    import torch

    operators = Path(__file__).parent / "lib" / "libsoftgpu_aten.so"
    if not operators.exists():
        raise OSError(f"softgpu is preloaded, but its operators are not installed: there is no {operators}")
    torch.ops.load_library(operators)
