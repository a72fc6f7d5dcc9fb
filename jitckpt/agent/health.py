"""--health-check: a command of the user's says whether this host may have a part in the next start."""

import os
import signal
import subprocess
import time
from contextlib import suppress

from jitckpt.console import say
from jitckpt.errors import HostsMissing

SECONDS = 120.0  # that a check may take
PAUSE_SECONDS = 10.0  # between two of a host that is not well
LONGEST = 200  # characters of what a check says


def why_unfit(command: str, seconds: float = SECONDS) -> str:
    """Run the check; return why this host is to have no part, as a clause; empty if it is well."""
    # A group of its own, to be ended whole; the agent's session, of which nobody else waits for a process.
    process = subprocess.Popen(
        command,
        shell=True,
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
        process.communicate()
    if process.returncode == 0:
        return ""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")[:LONGEST]
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    return f"`{command}` ended with {ended}" + (f": {last.strip()}" if last else "")


def wait_until_well(command: str, timeout: float) -> None:
    """Check again and again until this host is well. Raises HostsMissing if it is not within the timeout."""
    begun, told = time.monotonic(), ""
    while why := why_unfit(command):
        if why != told:
            told = why
            say(
                f"this host is not taken: {why}. The check is run again every {PAUSE_SECONDS:g} s, for at "
                f"most {timeout:g} s."
            )
        if time.monotonic() - begun > timeout:
            raise HostsMissing(f"The health check of this host has not passed in {timeout:g} s: {why}.")
        time.sleep(PAUSE_SECONDS)
    if told:
        say("this host's health check passes; it may be taken again.")
