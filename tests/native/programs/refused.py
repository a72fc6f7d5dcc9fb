"""Collectives inside save_checkpoint."""

from ctypes import byref, c_void_p
from typing import Any

from harness import Job, all_reduce, check, communicators, device, finish, malloc, new_stream, wait_for

COUNT = 256


def main() -> None:
    first, second = communicators(2)
    stream, buffer = new_stream(), malloc(4 * COUNT)
    seen: dict[str, Any] = {}

    def save(_: dict[str, Any]) -> None:
        result = all_reduce(first, buffer, COUNT, stream)
        seen["all_reduce"] = [result, device.ncclGetLastError(first).decode()]
        check(device.ncclGroupStart())
        result = device.ncclSend(buffer, COUNT, 7, 1, first, stream)
        check(device.ncclGroupEnd())
        seen["send"] = [result, device.ncclGetLastError(first).decode()]
        result = device.ncclCommAbort(second)
        seen["abort"] = [result, device.ncclGetLastError(None).decode()]
        new = c_void_p()
        result = device.ncclCommSplit(first, 0, 0, byref(new), None)
        seen["split"] = [result, device.ncclGetLastError(first).decode()]
        seen["done"] = True

    job = Job(save)
    job.order_save()
    wait_for(lambda: "done" in seen)
    job.order_resume()
    # The communicators are as good as before.
    check(device.ncclGroupStart())
    check(all_reduce(first, buffer, COUNT, stream))
    check(device.cudaSetDevice(1))
    check(all_reduce(second, malloc(4 * COUNT), COUNT, new_stream()))
    check(device.ncclGroupEnd())
    check(device.cudaStreamSynchronize(stream))
    finish(seen=seen, last=device.ncclGetLastError(first).decode())


main()
