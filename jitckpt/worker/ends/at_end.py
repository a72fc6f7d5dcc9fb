"""The end of a rank's script: its process stays, with what it holds, until the agent needs it no more.

Should another rank fail meanwhile, this one can save (jitckpt.init) or take part in the recovery (transparent
mode).
"""

import atexit
import os
import select
import socket
import sys
import time
from collections.abc import Callable

from jitckpt.ring import wishes
from jitckpt.system import descriptors
from jitckpt.wire import protocol
from jitckpt.worker.ends.exceptions import ExitHook, flush_output

LOOK_SECONDS = 0.01  # between two looks whether all ranks are at their ends


def stay(may_end: Callable[[], bool]) -> None:
    """Return once the agent, which was told of the end, lets this process end."""
    flush_output()
    while not may_end():
        time.sleep(LOOK_SECONDS)


def stay_with_the_device() -> None:
    """Have this process stay at its end, if it is a rank's own and one of several."""
    if os.getsid(0) == os.getpid() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit.register(_stay, ExitHook())  # the first that is registered is the last that runs


def _stay(exit_hook: ExitHook) -> None:
    if hasattr(sys, "last_value") or exit_hook.status != 0:
        return  # its end is a failure
    try:
        given = descriptors.given()
        if given is None or wishes.may_end(given.state):
            return  # it has stayed already
        ring = given.state
        with socket.socket(fileno=os.dup(given.agent)) as agent:
            agent.send(protocol.encode(protocol.AtEnd(given.rank)))
            gone = select.poll()
            gone.register(agent, 0)  # of an agent that has ended is told all the same
            stay(lambda: bool(gone.poll(0)) or wishes.may_end(ring))
    except (OSError, descriptors.NotOursError):
        return  # the program has closed what it did not open, or the agent has ended
