"""Exits with status 5 while another thread waits for a stream that never gets any further."""

import ctypes
import sys
import threading

import torch

stream = torch.cuda.Stream()
pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
launch = ctypes.CDLL(None).cudaLaunchHostFunc
assert launch(ctypes.c_void_p(stream.cuda_stream), pause, None) == 0

begun = threading.Event()


def wait() -> None:
    begun.set()
    stream.synchronize()


threading.Thread(target=wait, daemon=True).start()
begun.wait()
sys.exit(5)
