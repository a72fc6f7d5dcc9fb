"""Many collectives in flight: groups, point-to-point, several streams; then all of them finish."""

import ctypes
import json
from typing import Any

from harness import (
    NCCL_FLOAT32,
    Job,
    all_reduce,
    check,
    communicators,
    device,
    finish,
    malloc,
    new_stream,
    wait_for,
)

COUNT = 128
MANY = 200


def in_flight() -> list[dict[str, Any]]:
    size = device.jitckpt_collectives(None, 0)
    text = ctypes.create_string_buffer(size + 4096)
    device.jitckpt_collectives(text, len(text))
    return list(json.loads(text.value))


def main() -> None:
    first, second = communicators(2)
    Job(lambda _: None)
    sides = []
    for index, communicator in enumerate((first, second)):
        check(device.cudaSetDevice(index))
        sides.append((communicator, malloc(4 * COUNT), new_stream(), new_stream()))

    def enqueue(index: int) -> None:
        communicator, buffer, stream, other = sides[index]
        check(device.cudaSetDevice(index))
        for _ in range(MANY):
            check(all_reduce(communicator, buffer, COUNT, stream))
        check(device.ncclGroupStart())
        check(device.ncclGroupStart())
        check(device.ncclSend(buffer, ctypes.c_size_t(COUNT), NCCL_FLOAT32, 1 - index, communicator, other))
        check(device.ncclRecv(buffer, ctypes.c_size_t(COUNT), NCCL_FLOAT32, 1 - index, communicator, other))
        check(device.ncclGroupEnd())
        armed_inside = len(in_flight()) > MANY if index == 0 else None
        check(device.ncclGroupEnd())
        if index == 0:
            seen["armed_inside_group"] = armed_inside
            check(device.ncclSend(buffer, ctypes.c_size_t(COUNT), NCCL_FLOAT32, 1, communicator, other))
        else:
            check(device.ncclRecv(buffer, ctypes.c_size_t(COUNT), NCCL_FLOAT32, 0, communicator, other))

    seen: dict[str, Any] = {}
    enqueue(0)
    listed = in_flight()
    enqueue(1)
    for index, (_, _, stream, other) in enumerate(sides):
        check(device.cudaSetDevice(index))
        check(device.cudaStreamSynchronize(stream))
        check(device.cudaStreamSynchronize(other))
    wait_for(lambda: not in_flight())
    finish(listed=listed, **seen)


main()
