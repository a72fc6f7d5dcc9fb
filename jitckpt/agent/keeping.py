"""The agent's side of the keeper (tiers/keeper.py), which it starts, or finds as an agent before left it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from jitckpt.agent.processes.children import starting, waited_for
from jitckpt.errors import JitckptError
from jitckpt.system import datagrams, process_tree
from jitckpt.tiers import host_memory, keeper
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.keeper import FROM_KEEPER, Hold, Holds, HoldsNoMore, LetAllGo, LetGo

MOST_AGENTS = 64  # of one job in one network namespace
ANSWER_SECONDS = 10.0
END_SECONDS = 5.0
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from jitckpt.tiers.keeper import main; main()"


class LeftMemory:
    """What an agent before this one has left in memory. is_taken_over: a step of a later start is safe."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self.is_taken_over = False
        self._descriptors = [one for one in descriptors if _has_a_step(one)]

    def is_there(self) -> bool:
        """Return whether nothing has come in its place yet."""
        return not self.is_taken_over and any(map(_has_a_step, self._descriptors))

    def in_words(self, keep_seconds: float) -> str:
        return (
            f"what an earlier start of this job has left in memory stays there for {keep_seconds:g} s "
            "(--memory-keep): start the job as it was, to go on from it"
        )


def _has_a_step(descriptor: int) -> bool:
    return next(host_memory.found(descriptor), None) is not None


class KeptMemory:
    """A connection to the keeper. descriptors: by rank, what it has held for an agent before this one."""

    def __init__(self, job: str, keep_seconds: float, *, start: bool = True) -> None:
        """job: what tells the job from others of this user on this host. start: it, if it is not there.

        Raises JitckptError or OSError.
        """
        self.descriptors: dict[int, int] = {}
        self.is_there = False
        self._process: subprocess.Popen[bytes] | None = None
        key = xxhash.xxh3_128_hexdigest(job.encode())
        self._names = [
            f"\0jitckpt memory keeper {os.getuid()} {key} {number}" for number in range(MOST_AGENTS)
        ]
        if start:
            self.start(keep_seconds)
        else:
            self.is_there = any(map(self._connect, self._names))

    def start(self, keep_seconds: float) -> None:
        """See to it that there is one. Raises JitckptError or OSError."""
        self.is_there = self.is_there or any(
            self._connect(name) or self._start(name, keep_seconds) for name in self._names
        )
        if not self.is_there:
            raise JitckptError(f"{MOST_AGENTS} agents of this job run on this host already.")

    def hold(self, rank: int, descriptor: int) -> None:
        """Have a memfd outlive this process. Raises OSError if the keeper has been killed."""
        datagrams.send(self._socket, Hold(rank), [descriptor])

    def drop(self, rank: int) -> None:
        if not self.is_there:
            return
        with suppress(OSError):
            datagrams.send(self._socket, LetGo(rank))

    def close(self, *, end: bool) -> None:
        """Let go of it; end: nothing in it is needed any more."""
        if not self.is_there:
            return
        if end:
            with suppress(OSError):
                datagrams.send(self._socket, LetAllGo())
        self._socket.close()
        if self._process is not None and end:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            waited_for(self._process.pid)

    def _connect(self, name: str) -> bool:
        """Connect to a keeper that is there, and free. Takes no other user's for one."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(name)
            if keeper.uid_of(self._socket) == os.getuid() and self._take():
                return True
        except (OSError, ProtocolError):  # nobody listens there, it has just ended, or is of another version
            pass
        self._socket.close()
        return False

    def _take(self) -> bool:
        while True:
            match datagrams.receive(self._socket, FROM_KEEPER, 1):
                case Holds(rank), [descriptor]:
                    if host_memory.is_one(descriptor):
                        self.descriptors[rank] = descriptor
                    else:
                        os.close(descriptor)
                case HoldsNoMore(), _:
                    return True
                case _:
                    return False

    def _start(self, name: str, keep_seconds: float) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(name)
            except OSError:  # it is another agent's, or another user's
                return False
            listener.listen()
            root = str(Path(__file__).parents[2])
            environment = {key: value for key, value in os.environ.items() if key != process_tree.MARK}
            with starting() as note:
                # Without the job's mark: what ends all processes of a job whose agent was killed spares it.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, root, str(keep_seconds)],
                    stdin=listener.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # who reads the agent's does not wait for this process's end
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
                note(self._process.pid)
        return self._connect(name)
