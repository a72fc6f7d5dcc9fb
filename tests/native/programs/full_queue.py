"""A save while the host puts one call after the other behind work that hangs.

Arguments: how many may wait, and after how many the save is ordered.
"""

import sys
import time
from ctypes import byref, c_int, c_size_t
from typing import Any

from harness import (
    DEVICE_TO_HOST,
    Blocker,
    HostThread,
    Job,
    check,
    device,
    finish,
    malloc,
    new_stream,
    wait_for,
)

CALLS = 3000
BYTES = c_size_t(4)


def main() -> None:
    stream, host, buffer, content = new_stream(), HostThread(), malloc(8), c_int(0)
    check(device.cudaMemset(buffer, 1, BYTES))
    saved: list[int] = []

    def save(_: dict[str, Any]) -> None:
        check(device.cudaMemcpy(byref(content), buffer, BYTES, DEVICE_TO_HOST))
        saved.append(content.value)

    job = Job(save, max_calls_ahead=int(sys.argv[1]))
    blocker = Blocker(stream)
    for _ in range(CALLS):
        host.call(lambda: check(device.cudaMemsetAsync(buffer, 2, BYTES, stream)))
    wait_for(lambda: host.done >= int(sys.argv[2]))
    time.sleep(0.5)  # it is in its next call, which waits
    came = host.done
    job.order_save()
    try:
        wait_for(lambda: bool(saved), timeout=4)
    except TimeoutError:
        finish(saved=None, came=came)
    job.order_resume()
    blocker.release()
    wait_for(lambda: host.done == CALLS)
    finish(saved=saved[0], came=came)


main()
