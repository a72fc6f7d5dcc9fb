"""Checks torch.distributed on softgpu's NCCL; torchrun it with libsoftgpu.so preloaded on 2 or more ranks.

It needs no operator on the device: tensors come and go by copies; what is wanted is computed on the CPU.
"""

import os
import time

import torch
import torch.distributed as dist

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def values(rank: int, dtype: torch.dtype = torch.float32, count: int = 5000) -> torch.Tensor:
    """`count` numbers on the CPU that every rank can compute for every other."""
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 50).to(dtype)


def expect(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises unless both have the same values, bit for bit."""
    if not torch.equal(got.cpu(), wanted):
        raise AssertionError(f"{got.cpu()} instead of {wanted}")


def check_reductions(rank: int, ranks: int) -> None:
    """All-reduces equal the sum that the CPU computes in the order of the ranks."""
    for dtype in TYPES:
        wanted = values(0, dtype)
        for other in range(1, ranks):
            wanted = wanted + values(other, dtype)
        tensor = values(rank, dtype).to("cuda")
        dist.all_reduce(tensor)
        expect(tensor, wanted)
        scattered = torch.empty(5000 // ranks, dtype=dtype, device="cuda")
        whole = 5000 // ranks * ranks
        dist.reduce_scatter_tensor(scattered, values(rank, dtype)[:whole].to("cuda"))
        expect(scattered, wanted[:whole].chunk(ranks)[rank])


def check_movement(rank: int, ranks: int) -> None:
    """Collectives and messages that compute nothing."""
    everything = torch.cat([values(other) for other in range(ranks)])
    gathered = torch.empty(5000 * ranks, device="cuda")
    dist.all_gather_into_tensor(gathered, values(rank).to("cuda"))
    expect(gathered, everything)

    tensor = values(rank).to("cuda")
    dist.broadcast(tensor, ranks - 1)
    expect(tensor, values(ranks - 1))

    count = 5000 // ranks
    exchanged = torch.empty(count * ranks, device="cuda")
    dist.all_to_all_single(exchanged, values(rank)[: count * ranks].to("cuda"))
    expect(exchanged, torch.cat([values(other)[rank * count : (rank + 1) * count] for other in range(ranks)]))

    received = torch.empty(5000, device="cuda")
    to_next = dist.P2POp(dist.isend, values(rank).to("cuda"), (rank + 1) % ranks)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()
    expect(received, values((rank - 1) % ranks))


def check_groups(rank: int, device: torch.device) -> None:
    """A part of the ranks, which torch makes by ncclCommSplit."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = values(rank).to(device)
        dist.all_reduce(tensor, group=pair)
        expect(tensor, values(0) + values(1))


def check_abort(rank: int, ranks: int, device: torch.device) -> None:
    """Without the last rank an all-reduce hangs; torch's abort ends it."""
    group = dist.new_group(list(range(ranks)))
    if rank == ranks - 1:
        return
    work = dist.all_reduce(values(rank).to(device), group=group, async_op=True)
    time.sleep(0.3)
    if work is None or work.is_completed():
        raise AssertionError("an all-reduce has finished without the last rank")
    group._get_backend(device).abort()
    torch.cuda.synchronize()


def main() -> None:
    """Runs all checks on this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    check_reductions(rank, ranks)
    check_movement(rank, ranks)
    check_groups(rank, device)
    check_abort(rank, ranks, device)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
