"""The main thread ends the process while a save is under way. Argument: the file that the save writes."""

import atexit
import sys
import time
from typing import Any

from harness import Job, check, device, malloc


def main() -> None:
    path = sys.argv[1]

    def save(order: dict[str, Any]) -> int:
        time.sleep(1)
        with open(path, "w") as file:
            file.write("whole")
        return 0

    check(device.cudaSetDevice(0))
    malloc(16)
    job = Job(save)
    atexit.register(device.jitckpt_stop)
    job.order_save()
    job.hear("held")
    sys.exit(5)


main()
