"""Uses what softgpu does not have; prints the first line of each error."""

import torch

torch.ones(1, device="cuda")
for use in (
    lambda: torch.cuda.CUDAGraph().capture_begin(),
    lambda: torch.cuda.Event(interprocess=True).record(),
):
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            use()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
