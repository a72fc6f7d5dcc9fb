"""Whom the control thread tells what others have to act on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jitckpt.agent.processes.workers import Worker
from jitckpt.wire import protocol
from jitckpt.wire.protocol import WorkerMessage


@dataclass(frozen=True)
class Reports:
    """Whom the supervisor tells, on its own thread, what others have to act on."""

    heard: Callable[[Worker, WorkerMessage], None]  # every message, once the log has it
    registered: Callable[[Worker, protocol.Registered], None]  # before that
    failed: Callable[[Worker, int, bool], None]  # with the exit code, and whether the agent killed it
    # On another thread: of a rank, from its ring, into a directory, for these steps and all saved there; the
    # bytes by step. Then who writes, "" for the rank's own host, and whether a host is missed.
    write_local_states: Callable[[int, Path, set[int], str, bool], dict[int, int]]
    blamed: Callable[[Worker], None] = lambda worker: None  # it has failed by itself, and before all others
    # The other hosts are about to be told that a rank dies or has ended: send who keeps a copy of its ring
    # the rest.
    last_copy: Callable[[], None] = lambda: None
