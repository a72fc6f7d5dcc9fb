"""Back-pressure ends when a save is ordered: the thread then waits at the gate instead."""

import ctypes
from typing import Any

from harness import Blocker, HostThread, Job, check, device, finish, new_stream, progress, wait_for


def main() -> None:
    stream, host = new_stream(), HostThread()
    parked: list[bool] = []

    def save(_: dict[str, Any]) -> None:
        wait_for(lambda: bool(progress().step_thread_parked))
        parked.append(True)

    job = Job(save, max_ahead=1)
    blocker = Blocker(stream)

    def step(number: int) -> None:
        check(device.jitckpt_step_begin(ctypes.c_uint64(number), stream))
        check(device.jitckpt_step_end(ctypes.c_uint64(number), stream))

    host.call(lambda: step(1))
    wait_for(lambda: host.done == 1)
    host.call(lambda: step(2))
    job.order_save()
    wait_for(lambda: bool(parked))
    job.order_resume()
    blocker.release()
    wait_for(lambda: host.done == 2)
    wait_for(lambda: progress().device_ended == 2)
    finish(parked=parked[0])


main()
