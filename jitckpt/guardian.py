"""A small process that sees to it that no worker outlives a killed agent for long.

It is run as a script, without site packages, so that it starts in milliseconds. Arguments: the seconds that
registered workers get to save by themselves, the agent's temporary folder or "", then PID:PIDFD of each
worker. Standard input: the process ids of workers that have registered, one a line. The end of that input is
the death of the agent, which kills its guardian before it ends itself.
"""

import contextlib
import os
import select
import signal
import sys
import time


def kill_group(pid: int) -> None:
    """Kill a worker and all that it has started, unless nothing is left of them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def remove_if_empty(folder: str) -> None:
    """Remove a folder with the folders in it, unless there is a file anywhere."""
    if not any(files for _, _, files in os.walk(folder)):
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to all processes of the job; the agent decides about them
    seconds_to_save = float(sys.argv[1])
    workers = {int(pidfd): int(pid) for pid, pidfd in (pair.split(":") for pair in sys.argv[3:])}
    registered = {int(line) for line in sys.stdin}
    deadline = time.monotonic() + seconds_to_save
    waiting = select.poll()
    for pidfd in workers:
        waiting.register(pidfd, select.POLLIN)
    ended = {pidfd for pidfd, _ in waiting.poll(0)}
    for pidfd, pid in workers.items():
        if pidfd not in ended and pid not in registered:
            kill_group(pid)
    for pidfd in ended:  # before the agent died: their process ids may be somebody else's by now
        waiting.unregister(pidfd)
        del workers[pidfd]
    while workers and time.monotonic() < deadline:
        for pidfd, _ in waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            waiting.unregister(pidfd)
            kill_group(workers.pop(pidfd))
    for pid in workers.values():
        kill_group(pid)
    if sys.argv[2]:
        remove_if_empty(sys.argv[2])


if __name__ == "__main__":
    main()
