"""DDP's buckets hold nothing between two minibatches: filled with rubbish there, they change no gradient."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from jitckpt.worker.in_place import torch_memory
from jitckpt.worker.in_place.state_on_device import unpacked
from jitckpt.worker.in_place.torch_memory import Buckets

WIDTH = 300
torch_memory.MOST_BUCKETS = 2


class Net(nn.Module):
    """One of whose layers takes part in every second minibatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number != 1 or self.calls % 2:
                inputs = layer(inputs).relu()
        return inputs


@contextmanager
def modules(options: dict[str, Any]) -> Iterator[tuple[DistributedDataParallel, Buckets]]:
    torch.manual_seed(1)
    yield DistributedDataParallel(Net().cuda(), bucket_cap_mb=0.5, **options), Buckets()


def gradients(rubbish: bool, accumulates: bool, **options: Any) -> tuple[list[list[Tensor]], set[int]]:
    """Return those of each minibatch, and of how many bytes the buckets were."""
    found, sizes = [], set()
    with modules({"find_unused_parameters": True} | options) as (model, buckets):
        for minibatch in range(4):
            inputs = torch.full((8, WIDTH), 0.1 * (minibatch + distributed.get_rank()), device="cuda")
            with model.no_sync() if accumulates else nullcontext():
                model(inputs).sum().backward()
            if accumulates:
                model(inputs + 1).sum().backward()
            found.append([one.grad.cpu() for one in model.parameters() if one.grad is not None])
            extents = unpacked(buckets.extents())
            sizes.add(sum(size for _, size in extents))
            own = [one.grad.data_ptr() for one in model.parameters() if one.grad is not None]
            assert not [one for one in own for begin, size in extents if begin <= one < begin + size]
            torch.cuda.synchronize()
            for address, size in extents if rubbish else []:
                error = ctypes.CDLL(None).cudaMemset(ctypes.c_void_p(address), 0xFF, ctypes.c_size_t(size))
                assert error == 0
            model.zero_grad()
        whole = sum(one.nbytes for one in model.parameters())
    del model
    assert buckets.extents() == b""
    return found, {size - whole for size in sizes}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    for accumulates in (False, True):
        expected, more = gradients(rubbish=False, accumulates=accumulates)
        assert more == {0}, "the buckets have room for all gradients"
        seen, _ = gradients(rubbish=True, accumulates=accumulates)
        assert len(seen) == len(expected) == 4
        for one, other in zip(seen, expected, strict=True):
            assert len(one) == len(other)
            assert all(map(torch.equal, one, other))
    extents = []
    with modules({"gradient_as_bucket_view": True}) as (model, buckets):
        model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        extents.append(buckets.extents())
    assert extents == [b""], "they are the gradients"
    print(f"rank {distributed.get_rank()}: as it should be\n", end="", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
