"""Captures what no graph can hold; prints the error's first line. The device goes on each time."""

from collections.abc import Callable

import torch

x = torch.ones(4, device="cuda")
external = torch.cuda.Event(external=True)
uses: list[Callable[[], object]] = [
    x.nonzero,  # its shape has to be known
    lambda: x.sum().item(),
    torch.cuda.synchronize,
    lambda: torch.cuda.current_stream().query(),
    external.record,
]
for use in uses:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            use()
    except RuntimeError as error:
        cause = error.__context__ or error
        print(str(cause).splitlines()[0])
    assert x.sum().item() == 4
