"""A child forked after the device was used calls CUDA; prints what it is told."""

import ctypes
import os

import torch

torch.ones(1, device="cuda")
child = os.fork()
if child == 0:
    runtime = ctypes.CDLL(None)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    error = runtime.cudaDeviceSynchronize()
    print(runtime.cudaGetErrorString(error).decode(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
