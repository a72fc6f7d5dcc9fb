"""The GIL is held by a thread that hangs. Arguments: where."""

import ctypes
import sys
import threading
from typing import Any

from harness import (
    Blocker,
    Job,
    blocks_holding_gil,
    check,
    device,
    finish,
    holding_gil,
    new_stream,
    progress,
    wait_for,
)


def main() -> None:
    where = sys.argv[1]
    stream = new_stream()
    blocker = Blocker(stream)
    flag = ctypes.c_int(0)
    saved: list[Any] = []
    heard: list[Any] = []
    counted = [0]
    job = Job(saved.append)

    def agent() -> None:
        heard.append(job.hear("held"))

    threading.Thread(target=agent, daemon=True).start()

    def release() -> None:
        wait_for(lambda: bool(saved) and bool(heard))
        assert progress().holding
        flag.value = 1
        blocker.release()
        job.order_resume()

    threading.Thread(target=release, daemon=True).start()
    if where == "device_call":
        job.order_save_later(5)
        check(holding_gil.cudaStreamSynchronize(stream))
    elif where == "foreign_call":
        job.order_save_later(5)
        blocks_holding_gil.sleep_until(ctypes.byref(flag))
    else:
        job.order_save(5)
        wait_for(lambda: bool(progress().holding))
        check(holding_gil.cudaMemsetAsync(None, 0, ctypes.c_size_t(0), stream))
    # The thread has the GIL again and goes on as if nothing had been.
    for _ in range(1000):
        counted[0] += 1
    check(device.cudaStreamSynchronize(stream))
    finish(order=saved[0], held=heard[0], counted=counted[0], holding=progress().holding)


main()
