"""Without an agent the library saves on its own. Arguments: what happens, the file that the save writes."""

import os
import signal
import sys
import time
from typing import Any

from harness import Job, all_reduce, check, communicators, device, finish, malloc, new_stream

COUNT = 256


def main() -> None:
    what, path = sys.argv[1:]

    def save(order: dict[str, Any]) -> int:
        with open(path, "w") as file:
            file.write(order["reason"])
        return 0

    if what == "sigterm_handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
    if what == "sigterm_ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with_agent = what in ("agent_dies", "sigterm_with_agent")
    job = Job(save, agent=with_agent, hang_timeout=1.0 if what == "hang" else 0)
    first, _ = communicators(2)
    stream, buffer = new_stream(), malloc(4 * COUNT)
    check(all_reduce(first, buffer, COUNT, stream))
    if what.startswith("sigterm"):
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "agent_dies":
        job.agent.close()
    if what == "sigterm_ignored":
        time.sleep(0.5)
        finish(saved=os.path.exists(path))
    if what == "sigterm_handled":
        while True:
            time.sleep(0.01)
    check(device.cudaStreamSynchronize(stream))  # for ever


main()
