"""Adds to a tensor whose memory has been freed; prints the first line of the error."""

import torch


class Alias:
    """The same memory as a tensor's, without keeping it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


tensor = torch.ones(1 << 22, device="cuda")
alias = torch.as_tensor(Alias(tensor), device="cuda")
assert alias.data_ptr() == tensor.data_ptr()
del tensor
torch.cuda.empty_cache()
alias.add_(1)
try:
    torch.cuda.synchronize()
except torch.AcceleratorError as error:
    print(str(error).splitlines()[0])
