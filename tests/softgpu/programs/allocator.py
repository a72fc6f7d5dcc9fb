"""Allocates on the device with PYTORCH_CUDA_ALLOC_CONF as the argument says."""

import os
import sys

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[1]
import torch

torch.empty(1 << 20, device="cuda")
