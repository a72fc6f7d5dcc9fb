"""cuDNN, which the device proxy does not carry: torch has kernels of its own for what it does."""

import os
import sys
from typing import Any

import torch


def leave_out(process: Any) -> None:
    """Have torch do without cuDNN where there is one, and say so. process: its symbols.

    Else the first convolution, or attention on a newer GPU, would be refused. softgpu has none.
    """
    if hasattr(process, "softgpu_shadow"):
        return
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("RANK", "0") == "0":
        text = "transparent mode does without cuDNN: convolutions and attention run on torch's own kernels"
        print(f"jitckpt: {text} (docs/guides/gpu.md).", file=sys.stderr, flush=True)
