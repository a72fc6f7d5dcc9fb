"""Uses what softgpu does not have; prints the first line of the error."""

import os
import tempfile
from collections.abc import Callable

import torch

x = torch.ones(1, device="cuda")


def compile_and_run(mode: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        torch.compile(lambda tensor: tensor.sin() + 1, mode=mode)(x)


uses: list[Callable[[], None]] = [
    compile_and_run,
    lambda: compile_and_run(mode="reduce-overhead"),
]
for use in uses:
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            use()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    assert (x + 1).item() == 2, "the device goes on"
assert torch.compile(lambda tensor: tensor.sin() + 1, backend="aot_eager")(x).item() == (x.sin() + 1).item()
