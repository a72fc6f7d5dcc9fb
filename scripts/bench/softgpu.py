"""What softgpu costs on this machine: medians of paired runs. scripts/bench/softgpu starts it.

Prints each figure beside what it should be, and the machine's load: a machine that does other things makes
all of them worse.
"""

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Figure = tuple[str, str, str]  # what, the figure, what it should be
ALL_REDUCE_BYTES = 64 << 20


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def paired(
    pairs: int, first: Callable[[], object], second: Callable[[], object]
) -> list[tuple[float, float]]:
    """Seconds of the two, run in turn; the first pair only warms up and does not count."""
    return [(seconds(first), seconds(second)) for _ in range(pairs + 1)][1:]


def median_ratio(times: list[tuple[float, float]]) -> float:
    return statistics.median(first / second for first, second in times)


def small_operators(device: str) -> dict[str, Callable[[], object]]:
    small, matrix = torch.ones(16, device=device), torch.ones(32, 32, device=device)
    row = torch.ones(32, device=device)
    many: list[Tensor] = [torch.ones(16, device=device) for _ in range(50)]
    return {
        "add": lambda: small + small,
        "add_": lambda: small.add_(1),
        "mm": lambda: matrix @ matrix,
        "layer_norm": lambda: torch.nn.functional.layer_norm(matrix, (32,), row, row),
        "50 x _foreach_add_": lambda: torch._foreach_add_(many, 1.0),
    }


@torch.no_grad()
def operators(pairs: int) -> list[Figure]:
    """What an operator takes longer than on the CPU, issued many times in a row and awaited at the end."""
    calls = 2000
    figures = []
    on_host, on_device = small_operators("cpu"), small_operators("cuda")
    for name, host_call in on_host.items():

        def host(call: Callable[[], object] = host_call) -> None:
            for _ in range(calls):
                call()

        def device(call: Callable[[], object] = on_device[name]) -> None:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()

        times = paired(pairs, host, device)
        added = statistics.median(device_time - host_time for host_time, device_time in times) / calls
        alone = statistics.median(host_time for host_time, _ in times) / calls
        figures.append(
            (f"{name}, over {alone * 1e6:.1f} us on the CPU", f"{added * 1e6:+.1f} us", "at most +20 us")
        )
    return figures


@torch.no_grad()
def overlap(pairs: int) -> list[Figure]:
    """Two matrices' products one after the other on a stream, against each on a stream of its own."""
    size, products = 512, 20
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    on_device = [torch.randn(size, size, device="cuda") for _ in streams]
    on_host = [matrix.cpu() for matrix in on_device]
    results = [torch.empty_like(matrix) for matrix in on_device]
    host_results = [torch.empty_like(matrix) for matrix in on_host]

    def on_streams(which: list[torch.cuda.Stream]) -> None:
        for stream, matrix, result in zip(which, on_device, results, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(products):
                    torch.mm(matrix, matrix, out=result)
        torch.cuda.synchronize()

    def multiply(index: int) -> None:
        for _ in range(products):
            torch.mm(on_host[index], on_host[index], out=host_results[index])

    def in_turn() -> None:
        multiply(0)
        multiply(1)

    def in_threads() -> None:
        threads = [threading.Thread(target=multiply, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ratio = median_ratio(paired(pairs, lambda: on_streams([streams[0]] * 2), lambda: on_streams(streams)))
    possible = median_ratio(paired(pairs, in_turn, in_threads))
    return [
        (
            "two streams at once, faster than one after the other",
            f"{ratio:.2f} x",
            f"{possible:.2f} x (two threads on the host)",
        )
    ]


def idle(wait_seconds: float) -> list[Figure]:
    """Processor time of streams that have nothing to do, and of one that waits for a stream that hangs."""
    streams = [torch.cuda.Stream() for _ in range(8)]
    work = torch.ones(16, device="cuda")
    released = threading.Event()
    hang = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait())
    for stream in streams:
        with torch.cuda.stream(stream):
            work.add_(1)
    torch.cuda.synchronize()

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def per_second() -> str:
        begun = used()
        time.sleep(wait_seconds)
        return f"{(used() - begun) / wait_seconds * 1e3:.2f} ms/s"

    nothing_to_do = per_second()
    assert ctypes.CDLL(None).cudaLaunchHostFunc(ctypes.c_void_p(streams[0].cuda_stream), hang, None) == 0
    event = torch.cuda.Event()
    event.record(streams[0])
    streams[1].wait_event(event)
    waiting = per_second()
    released.set()
    torch.cuda.synchronize()
    return [
        (f"processor time of {len(streams)} idle streams", nothing_to_do, "none"),
        ("the same, one waiting for another that hangs", waiting, "none"),
    ]


def all_reduce_rank(pairs: int) -> None:
    """One of two ranks: an all-reduce, then a memcpy of as many bytes on rank 0 while the other rests."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    tensor = torch.ones(ALL_REDUCE_BYTES // 4, device="cuda")
    source, target = (ctypes.create_string_buffer(ALL_REDUCE_BYTES) for _ in range(2))

    def reduce() -> None:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()

    def copy() -> None:
        if rank == 0:
            ctypes.memmove(target, source, ALL_REDUCE_BYTES)

    times = []
    for _ in range(pairs + 1):
        dist.barrier()
        torch.cuda.synchronize()
        reduced = seconds(reduce)
        dist.barrier()
        torch.cuda.synchronize()
        times.append((seconds(copy), reduced))
    if rank == 0:
        speed = ALL_REDUCE_BYTES / statistics.median(reduced for _, reduced in times[1:]) / 1e9
        print(f"{speed:.2f} {median_ratio(times[1:]):.2f}")
    dist.destroy_process_group()


def all_reduce(pairs: int) -> list[Figure]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, __file__, "--rank-of-all-reduce", "--pairs", str(pairs)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    speed, ratio = ended.stdout.split()
    return [
        (
            f"all-reduce of {ALL_REDUCE_BYTES >> 20} MB between 2 ranks, {speed} GB/s",
            f"{ratio} of memcpy",
            "at least 0.5",
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15, help="paired runs of each measurement (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of idleness to measure (%(default)s)")
    parser.add_argument("--rank-of-all-reduce", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of_all_reduce:
        all_reduce_rank(arguments.pairs)
        return
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} processor cores; load of the last minute {load:.1f}", flush=True)
    measurements: list[Callable[[], list[Figure]]] = [
        lambda: operators(arguments.pairs),
        lambda: overlap(arguments.pairs),
        lambda: all_reduce(arguments.pairs),
        lambda: idle(arguments.seconds),
    ]
    for measure in measurements:
        for what, figure, target in measure():
            print(f"{what:55} {figure:>16}   should be {target}", flush=True)


if __name__ == "__main__":
    main()
