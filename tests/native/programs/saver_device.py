"""The save function runs with the job's device as its current one."""

import ctypes
from typing import Any

from harness import Job, check, device, finish, malloc, new_stream, wait_for


def main() -> None:
    malloc(16)  # device 0 has been touched, too
    check(device.cudaSetDevice(1))
    stream = new_stream()
    seen: list[int] = []

    def save(_: dict[str, Any]) -> None:
        current = ctypes.c_int(-1)
        check(device.cudaGetDevice(ctypes.byref(current)))
        seen.append(current.value)

    job = Job(save)
    check(device.jitckpt_step_begin(ctypes.c_uint64(1), stream))
    check(device.jitckpt_step_end(ctypes.c_uint64(1), stream))
    job.order_save()
    wait_for(lambda: bool(seen))
    finish(device=seen[0])


main()
