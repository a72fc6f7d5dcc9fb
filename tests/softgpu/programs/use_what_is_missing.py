"""Uses what softgpu does not have; prints the first line of the error."""

import torch

torch.ones(1, device="cuda")
try:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()
except RuntimeError as error:
    print(str(error).splitlines()[0])
