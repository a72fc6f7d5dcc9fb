"""Reads device memory from the host, which must end the process."""

import ctypes

import torch

tensor = torch.ones(4, device="cuda")
torch.cuda.synchronize()
print("about to read", flush=True)
print(ctypes.c_float.from_address(tensor.data_ptr()))
