"""The user's commands: whether this host may have a part in the next start, and who hears of a lost one."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from jitckpt.console import say
from jitckpt.errors import HostsMissing

SECONDS = 120.0  # that a check may take
PAUSE_SECONDS = 10.0  # between two of a host that is not well
LAST_SECONDS = 10.0  # that the end of the job waits for reports
LONGEST = 200  # characters of what a check says
# What a report is about: the job goes on without the host, its check has failed, or a device may be broken.
LOST, UNFIT, SUSPECT = "lost", "unfit", "suspect"


def nobody(why: str) -> None:
    """Nobody else is told."""
    del why


def why_unfit(command: str, seconds: float = SECONDS, arguments: Sequence[str] = ()) -> str:
    """Run the check; return why this host is to have no part, as a clause; empty if it is well."""
    # A group of its own, to be ended whole; the agent's session, of which nobody else waits for a process.
    process = subprocess.Popen(
        ["/bin/sh", "-c", command, "jitckpt", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"`{command}` has not ended in {seconds:g} s"
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Not read to its end: what has left the group, as a daemon, may hold the other one for ever.
        assert process.stdout is not None
        process.stdout.close()
    if process.returncode == 0:
        return ""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")[:LONGEST]
    last = "".join(one if one.isprintable() else "?" for one in last)  # no codes for the terminal
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    return f"`{command}` ended with {ended}" + (f": {last.strip()}" if last else "")


def wait_until_well(command: str, timeout: float, tell: Callable[[str], None] = nobody) -> None:
    """Check again and again until this host is well. Raises HostsMissing if it is not within the timeout.

    tell: what the others are told, each time: why it is not well, in the end "".
    """
    begun, told = time.monotonic(), ""
    while why := why_unfit(command):
        tell(why)
        if why != told:
            told = why
            say(
                f"this host is not taken: {why}. The check is run again every {PAUSE_SECONDS:g} s, for at "
                f"most {timeout:g} s."
            )
        if time.monotonic() - begun > timeout:
            raise HostsMissing(f"The health check of this host has not passed in {timeout:g} s: {why}.")
        time.sleep(PAUSE_SECONDS)
    tell("")
    if told:
        say("this host's health check passes; it may be taken again.")


class HostReports:
    """Tells a scheduler of hosts, by the user's command. Nothing waits for it but the job's end."""

    def __init__(self, command: str | None) -> None:
        self._command = command
        self._told: set[tuple[str, str]] = set()
        self._running: list[threading.Thread] = []

    def tell(self, host: str, why: str, kind: str) -> None:
        """Tell of a host, once of each kind. kind: LOST, UNFIT or SUSPECT."""
        if self._command is None or (host, kind) in self._told:
            return
        self._told.add((host, kind))
        told = (self._command, host, why, kind)
        thread = threading.Thread(target=report, args=told, name="jitckpt-report", daemon=True)
        self._running.append(thread)
        thread.start()

    def finish(self) -> None:
        """The job ends: wait for what is being told, but not for a scheduler that gives no answer."""
        until = time.monotonic() + LAST_SECONDS
        for thread in self._running:
            thread.join(max(0.0, until - time.monotonic()))


def report(command: str, host: str, why: str, kind: str) -> None:
    """Run the command that tells a scheduler of a host."""
    try:
        failed = why_unfit(command, arguments=(host, why, kind))
    except OSError as error:  # no room for another process
        failed = f"`{command}` can't be run: {error}"
    say(f"{host} could not be reported: {failed}." if failed else f"{host} is reported: {why}.")
