"""What `import torch` runs because jitckpt is installed (entry point group torch.backends)."""

import ctypes
from pathlib import Path


def load() -> None:
    """Put softgpu's operators in place where softgpu is the device; otherwise do nothing.

    Raises OSError if softgpu is preloaded but its operators cannot be loaded: without them every operator on
    the device would fail.
    """
    if not hasattr(ctypes.CDLL(None), "softgpu_shadow"):
        return
    import torch

    operators = Path(__file__).parent / "lib" / "libsoftgpu_aten.so"
    if not operators.exists():
        raise OSError(f"softgpu is preloaded, but its operators are not installed: there is no {operators}")
    torch.ops.load_library(operators)
