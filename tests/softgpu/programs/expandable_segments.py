"""Asks torch's allocator for what needs the driver's virtual memory calls."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch

torch.empty(1 << 20, device="cuda")
