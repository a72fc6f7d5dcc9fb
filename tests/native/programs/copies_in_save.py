"""A save while the default stream is blocked: all flavours of copy and memset go through."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from typing import Any

from harness import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Blocker,
    HostThread,
    Job,
    check,
    device,
    finish,
    malloc,
    progress,
    wait_for,
)

SIZE = 4096
BYTES = c_size_t(SIZE)
SIDE = c_size_t(64)  # of the same memory taken as a square

MEMSETS: dict[str, Callable[..., int]] = {
    "cudaMemset": lambda to, value: device.cudaMemset(to, value, BYTES),
    "cudaMemsetAsync": lambda to, value: device.cudaMemsetAsync(to, value, BYTES, None),
    "cudaMemset2D": lambda to, value: device.cudaMemset2D(to, SIDE, value, SIDE, SIDE),
    "cudaMemset2DAsync": lambda to, value: device.cudaMemset2DAsync(to, SIDE, value, SIDE, SIDE, None),
}
HOST_COPIES: dict[str, Callable[..., int]] = {
    "cudaMemcpy": lambda to, source, kind: device.cudaMemcpy(to, source, BYTES, kind),
    "cudaMemcpyAsync": lambda to, source, kind: device.cudaMemcpyAsync(to, source, BYTES, kind, None),
    "cudaMemcpy2D": lambda to, source, kind: device.cudaMemcpy2D(to, SIDE, source, SIDE, SIDE, SIDE, kind),
    "cudaMemcpy2DAsync": lambda to, source, kind: device.cudaMemcpy2DAsync(
        to, SIDE, source, SIDE, SIDE, SIDE, kind, None
    ),
}
DEVICE_COPIES: dict[str, Callable[..., int]] = {
    "cudaMemcpyPeer": lambda to, source: device.cudaMemcpyPeer(to, 0, source, 0, BYTES),
    "cudaMemcpyPeerAsync": lambda to, source: device.cudaMemcpyPeerAsync(to, 0, source, 0, BYTES, None),
}


def pinned() -> Any:
    pointer = c_void_p()
    check(device.cudaHostAlloc(byref(pointer), BYTES, 0))
    return (ctypes.c_char * SIZE).from_address(pointer.value or 0)


def read(buffer: Any, source: Any) -> bytes:
    check(device.cudaMemcpy(buffer, source, BYTES, DEVICE_TO_HOST))
    return bytes(buffer.raw)


def try_all(source: Any, target: Any, buffer: Any) -> dict[str, bool]:
    """Of each flavour, whether the right bytes arrived by way of this host buffer."""
    right: dict[str, bool] = {}
    value = 0
    for name, memset in MEMSETS.items():
        value += 1
        check(memset(source, value))
        right[name] = read(buffer, source) == bytes([value]) * SIZE
    for name, copy in HOST_COPIES.items():
        value += 1
        buffer.raw = bytes([value]) * SIZE
        check(copy(source, buffer, HOST_TO_DEVICE))
        check(device.cudaStreamSynchronize(None))
        buffer.raw = bytes(SIZE)
        check(copy(buffer, source, DEVICE_TO_HOST))
        check(device.cudaStreamSynchronize(None))
        right[name] = buffer.raw == bytes([value]) * SIZE
    for name, peer_copy in DEVICE_COPIES.items():
        value += 1
        check(device.cudaMemset(source, value, BYTES))
        check(peer_copy(target, source))
        right[name] = read(buffer, target) == bytes([value]) * SIZE
    check(device.cudaDeviceSynchronize())
    return right


def main() -> None:
    source, target = malloc(SIZE), malloc(SIZE)
    buffers = {"pageable": ctypes.create_string_buffer(SIZE), "pinned": pinned()}
    results: dict[str, Any] = {}

    def save(order: dict[str, Any]) -> None:
        for kind, buffer in buffers.items():
            results[kind] = try_all(source, target, buffer)
        results["order"] = order

    job, host, blocker = Job(save), HostThread(), Blocker()
    job.order_save(3)
    held = job.hear("held")
    host.call(lambda: check(device.cudaMemset(source, 99, BYTES)))
    wait_for(lambda: "order" in results)
    holding, parked = bool(progress().holding), host.done == 0
    blocker.release()
    job.order_resume()
    wait_for(lambda: host.done == 1)
    after = read(buffers["pageable"], source) == bytes([99]) * SIZE
    finish(held=held, results=results, holding=holding, parked=parked, after=after)


main()
