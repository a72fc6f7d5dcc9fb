"""A forked child of a process with a job, and with its calls held, has nothing of it."""

import ctypes
import json
import os
import signal
import sys
from typing import Any

from harness import Job, check, device, finish, malloc, new_stream, progress, wait_for


def child_report(agent_fd: int) -> dict[str, Any]:
    """What a forked child sees, by way of a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(agent_fd)
            descriptor = "open"
        except OSError:
            descriptor = "closed"
        device.cudaStreamSynchronize(None)  # whatever it answers, it does not wait at the gate
        report = {
            "threads": len(os.listdir("/proc/self/task")),
            "descriptor": descriptor,
            "holding": progress().holding,
            "report": device.jitckpt_report(b"{}", ctypes.c_size_t(2)),
        }
        os.write(writer, json.dumps(report).encode())
        os.kill(os.getpid(), signal.SIGTERM)  # acts at once
        signal.pause()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seen: dict[str, Any] = json.loads(pipe.read())
    seen["status"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return seen


def main() -> None:
    with_agent = sys.argv[1] == "with_agent"
    saved: list[Any] = []
    job = Job(saved.append, agent=with_agent)
    new_stream()
    check(device.cudaMemset(malloc(16), 0, ctypes.c_size_t(16)))
    running = child_report(job.worker_fd)
    held = None
    if with_agent:
        job.order_save()
        wait_for(lambda: bool(saved))
        held = child_report(job.worker_fd)
    finish(running=running, held=held)


main()
