"""A rank that was only slow: the save is made, the other rank joins, everything goes on."""

import ctypes
from ctypes import c_size_t
from typing import Any

from harness import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    HostThread,
    Job,
    all_reduce,
    check,
    communicators,
    device,
    finish,
    malloc,
    new_event,
    new_stream,
    wait_for,
)

COUNT = 64
BYTES = c_size_t(4 * COUNT)


def main() -> None:
    floats = ctypes.c_float * COUNT
    first, second = communicators(2)
    check(device.cudaSetDevice(1))
    second_buffer, second_stream = malloc(4 * COUNT), new_stream()
    check(device.cudaMemcpy(second_buffer, floats(*range(COUNT)), BYTES, HOST_TO_DEVICE))
    check(device.cudaSetDevice(0))
    buffer, stream, event = malloc(4 * COUNT), new_stream(), new_event()
    check(device.cudaMemcpy(buffer, floats(*[1.0] * COUNT), BYTES, HOST_TO_DEVICE))

    in_save: list[Any] = []
    freed = malloc(16)

    def save(_: dict[str, Any]) -> None:
        copy = floats()
        check(device.cudaMemcpy(copy, buffer, BYTES, DEVICE_TO_HOST))
        check(device.cudaFree(freed))  # would wait for the device, which never comes to an end
        check(device.cudaEventRecord(event, stream))
        check(device.cudaStreamWaitEvent(None, event, 0))
        check(device.cudaEventSynchronize(event))
        in_save.append(list(copy))

    job = Job(save, hang_timeout=0.5)
    check(all_reduce(first, buffer, COUNT, stream))
    check(device.cudaEventRecord(event, stream))
    check(device.cudaStreamWaitEvent(None, event, 0))
    host = HostThread()
    hangs = [job.hear("hang")]
    job.order_save()
    wait_for(lambda: bool(in_save))
    host.call(lambda: check(device.cudaMemsetAsync(buffer, 0, c_size_t(4), None)))
    job.order_resume()
    wait_for(lambda: host.done == 1)
    hangs.append(job.hear("hang"))  # still hangs: said again, because its clock was started anew

    check(device.cudaSetDevice(1))
    check(all_reduce(second, second_buffer, COUNT, second_stream))
    check(device.cudaDeviceSynchronize())
    check(device.cudaSetDevice(0))
    check(device.cudaDeviceSynchronize())
    result = floats()
    check(device.cudaMemcpy(result, buffer, BYTES, DEVICE_TO_HOST))
    left = ctypes.create_string_buffer(1000)
    wait_for(lambda: device.jitckpt_collectives(left, 1000) == len(b"[]\0"))
    finish(hangs=hangs, in_save=in_save[0], result=list(result))


main()
