"""A trial of what a move of a worker needs: a small process is dumped and restored by CRIU.

Whether that works here depends on the kernel, its settings, rights and the container; only doing it tells.
Runs as a program, in a PID namespace of its own where that is allowed, so that nobody is in its way.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError, Options
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.system import network_lock

SECONDS = 10.0  # for each part: a hanging restore is one of the ways in which it fails
STARTING_SECONDS = 30.0  # on a machine that does much else
# Has what a worker has: a socket to its agent, one to itself by TCP as it may have to the store, memory that
# has a file, a semaphore that no folder has any more, another thread.
_CHILD = """
import multiprocessing, os, socket, sys, threading
agent = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
store, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
memory = os.memfd_create("trial")
os.ftruncate(memory, 4096)
semaphore = multiprocessing.Semaphore(1)
threading.Thread(target=threading.Event().wait, daemon=True).start()
count = 0
while agent.recv(1):
    count += 1
    with semaphore:
        store.send(b"%d" % count)
        os.pwrite(memory, theirs.recv(8), 0)
    agent.send(os.pread(memory, 8, 0).rstrip(b"\\0"))
"""


def try_it() -> dict[str, Any]:
    """Return what a trial says: criu, and seconds or error, a sentence.

    In namespaces of its own if that is allowed, else among all other processes.
    """
    try:
        found = criu.find()
    except CriuError as error:
        return {"criu": None, "error": str(error)}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    program = (
        "import sys; sys.path.append(sys.argv[1]); from jitckpt.doctor.moved_process import main; main()"
    )
    command = [sys.executable, "-c", program, root]
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        alone = shutil.which("unshare") is not None
        said = _said([*unshare, *command] if alone else command)
        if alone and not said.stdout:
            said = _said(command)
        answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"criu": str(found), "error": "A small process was not dumped and restored in time."}
    except OSError as error:
        return {"criu": str(found), "error": f"The trial with a small process can't be started: {error}."}
    except (IndexError, ValueError):
        last = (said.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"criu": str(found), "error": f"The trial with a small process has failed: {last}."}
    return answer


def _said(command: list[str]) -> "subprocess.CompletedProcess[str]":
    limit = STARTING_SECONDS + 3 * SECONDS
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


def main() -> None:
    """Print as JSON how the trial went."""
    found = criu.find()
    begun = time.monotonic()
    try:
        _dump_and_restore(found)
        said = {"criu": str(found), "seconds": time.monotonic() - begun}
    except (CriuError, OSError) as error:
        said = {"criu": str(found), "error": str(error)}
    print(json.dumps(said))


def _dump_and_restore(found: Criu) -> None:
    """Raises CriuError or OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        inode = os.fstat(theirs.fileno()).st_ino
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _expect(ours, STARTING_SECONDS, b"1")
            with nameless_folder() as folder:
                try:
                    _move(found, child, inode, folder)
                finally:
                    network_lock.unlock(criu.locks(folder) & network_lock.tables())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # whichever of the two lives


def _move(found: Criu, child: "subprocess.Popen[bytes]", inode: int, folder: int) -> None:
    criu.dump(found, child.pid, Options(folder, SECONDS, external=[f"unix[{inode}]"]))
    child.wait()
    again, inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with again, inherited:
        stands_for = [(inherited.fileno(), f"socket:[{inode}]")]
        criu.restore(found, Options(folder, SECONDS, inherit=stands_for))
        _expect(again, SECONDS, b"2")


def _expect(child: socket.socket, seconds: float, count: bytes) -> None:
    child.settimeout(seconds)
    child.send(b"?")
    if (said := child.recv(8)) != count:
        raise CriuError(f"A small process says {said!r} where it should say {count!r}.")
