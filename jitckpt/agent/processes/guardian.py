"""A small process that sees to it that no process of a job outlives a killed agent for long.

It is started before any worker, without site packages, so it runs in milliseconds. Arguments: the seconds
that registered workers get to save by themselves, the agent's temporary folder or "", the job's mark
(process_tree.MARK). Standard input: a socket, by which the agent tells of its workers. The end of that is the
death of the agent, which kills its guardian before it ends itself.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass

from jitckpt.console import say
from jitckpt.system import datagrams, network_lock, process_tree
from jitckpt.system.empty_folder import remove_if_empty
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.guardian import KINDS, Forget, GuardWorker, Images, Locks, SavesItself


@dataclass
class Guarded:
    """A worker: its process, a descriptor of that, and whether it saves by itself if the agent dies."""

    pid: int
    pidfd: int
    registered: bool = False


def listen(agent: socket.socket) -> tuple[dict[int, Guarded], set[str] | None, str]:
    """Hear of workers until the agent has died; return those that it had last.

    And the locks of connections that were there before one of them was dumped; None: none was being moved.
    And the folder in which they are images, or "".
    """
    guarded: dict[int, Guarded] = {}
    locks: set[str] | None = None
    images = ""
    while True:
        try:
            heard = datagrams.receive(agent, KINDS, 1)
        except ProtocolError as error:
            say(f"the agent tells its guardian what makes no sense: {error}")
            continue
        match heard:
            case None:
                return guarded, locks, images
            case GuardWorker(pid, registered), [pidfd, *_]:
                guarded[pid] = Guarded(pid, pidfd, registered)
            case SavesItself(pid), _ if pid in guarded:
                guarded[pid].registered = True
            case Forget(pid), _ if pid in guarded:
                os.close(guarded.pop(pid).pidfd)
            case Locks(names), _:
                locks = None if names is None else set(names)
            case Images(images), _:
                pass


def has_ended(worker: Guarded) -> bool:
    return bool(select.select([worker.pidfd], [], [], 0)[0])


def main() -> None:
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"):  # sent to all of the job; the agent decides
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    seconds_to_save, temporary, mark = float(sys.argv[1]), sys.argv[2], sys.argv[3]
    workers, locks, images = listen(socket.socket(fileno=0))
    guarded = list(workers.values())
    deadline = time.monotonic() + seconds_to_save
    alive = [worker for worker in guarded if not has_ended(worker)]
    unregistered = {worker.pid for worker in alive if not worker.registered}
    for pid in process_tree.below(process_tree.everybody(), unregistered):
        if not process_tree.is_tidier(pid):
            process_tree.kill(pid)
    # All else may be what a rank needs for its save: a server that has its device, say.
    saving = select.poll()
    for worker in alive:
        if worker.registered:
            saving.register(worker.pidfd, select.POLLIN)
    left = sum(worker.registered for worker in alive)
    while left and time.monotonic() < deadline:
        for pidfd, _ in saving.poll(max(0.0, deadline - time.monotonic()) * 1000):
            saving.unregister(pidfd)
            left -= 1
    sessions = {worker.pid for worker in alive}
    process_tree.end(lambda: process_tree.of_job(mark, sessions))
    if locks is not None:
        network_lock.unlock(network_lock.tables() - locks)
    if images:  # sockets of theirs led to the agent
        shutil.rmtree(images, ignore_errors=True)
    if temporary:
        with contextlib.suppress(OSError):
            remove_if_empty(temporary)
