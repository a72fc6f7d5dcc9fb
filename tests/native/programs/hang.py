"""A collective that the other rank never joins. Arguments: how the application uses its own events."""

import sys
from ctypes import c_size_t
from typing import Any

from harness import (
    Job,
    all_reduce,
    check,
    communicators,
    device,
    finish,
    malloc,
    new_event,
    new_stream,
    progress,
    wait_for,
)

COUNT = 1024


def use_events(how: str, stream: Any) -> None:
    """What applications do around a collective: none of it may hide the hang."""
    if how == "none":  # FSDP2: nobody waits for anything
        return
    event = new_event()
    check(device.cudaEventRecord(event, stream))
    check(device.cudaStreamWaitEvent(None, event, 0))
    if how == "recorded_again":  # a pooled event stands for other work a moment later
        check(device.cudaEventRecord(event, new_stream()))
    elif how == "destroyed":
        check(device.cudaEventDestroy(event))


def main() -> None:
    how = sys.argv[1]
    check(device.cudaSetDevice(0))
    first, second = communicators(2)
    stream, other = new_stream(), new_stream()
    buffer = malloc(4 * COUNT)
    saved: list[Any] = []
    job = Job(saved.append, hang_timeout=1.0)

    # Three collectives that both join, so that the hanging one is the fourth.
    check(device.cudaSetDevice(1))
    second_buffer, second_stream = malloc(4 * COUNT), new_stream()
    for _ in range(3):
        check(device.ncclGroupStart())
        check(all_reduce(first, buffer, COUNT, stream))
        check(all_reduce(second, second_buffer, COUNT, second_stream))
        check(device.ncclGroupEnd())
    check(device.cudaStreamSynchronize(second_stream))
    check(device.cudaSetDevice(0))

    check(all_reduce(first, buffer, COUNT, stream))
    use_events(how, stream)
    check(all_reduce(first, buffer, 2 * COUNT // 2, stream))
    check(device.cudaMemsetAsync(buffer, 0, c_size_t(4), other))

    hang = job.hear("hang")
    job.order_save(7)
    held = job.hear("held")
    wait_for(lambda: bool(saved))
    finish(hang=hang, held=held, order=saved[0], holding=progress().holding)


main()
