"""Jobs of tests are forked from a process that has loaded torch: else that is most of a small job's time.

One server for each kind of device serves all jobs of a pytest process. It has what workers preload, so the
process that jitckpt's launcher forks its workers from (jitckpt/worker/spare.py) is forked as well, where it
would load nothing else. What is started otherwise, or with other variables for its libraries, is a process
of its own as ever.
"""

import array
import ctypes
import fcntl
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from jitckpt.agent.processes import spare_template
from jitckpt.device import device_environment
from jitckpt.worker import autoload, spare

LIBRARIES = Path(spare.__file__).parents[1] / "lib"
MARK = "TEST_MARK"  # of as many characters as those that jobs have
MODULES = (*spare.MODULES, "torch.distributed.run", "jitckpt.cli.run", "jitckpt.agent.agent")
MOST_BYTES = 128 * 1024
HIGH = 500  # no process of a test has so many descriptors
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MNT_DETACH, MS_REC, MS_SLAVE = 2, 1 << 14, 1 << 19
# What is not read by a library when it is loaded, and may so differ from job to job.
RANKS = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_")
LATER = (*RANKS, "JITCKPT_", "SOFTGPU_", "TEST_", "TMPDIR")

Popen = subprocess.Popen[str]
START = spare_template._start


def python_path() -> str:
    """Return the PYTHONPATH with this folder and that of all tests first; one jitckpt is tested as before.

    And with what makes the import of torch quicker, of which most of a small job's time is.
    """
    ours = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    ours += [str(Path(__file__).parents[2] / "scripts" / "campaign_start")]
    return os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


class Forked(subprocess.Popen[Any]):
    """A child of this process that another has forked, with what tests and the agent ask of a Popen."""

    def __init__(
        self,
        pid: int,
        command: Sequence[str],
        out: "IO[str] | None" = None,
        err: "IO[str] | None" = None,
    ) -> None:
        self.args = command
        self.pid = pid
        self.returncode: Any = None
        self.stdin, self.stdout, self.stderr = None, out, err
        self.text_mode = True
        self.encoding = self.errors = None
        for name, value in {
            "_child_created": True,
            "_communication_started": False,
            "_closed_child_pipe_fds": True,
            "_input": None,
            "_sigint_wait_secs": 0.25,
            "_waitpid_lock": threading.Lock(),
        }.items():
            setattr(self, name, value)


class ForkServer:
    """A process that forks commands of Python's, as children of this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with these variables, and MARK."""
        self.environment = dict(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from fork_server import main; main()", str(theirs.fileno())],
                env={**self.environment, MARK: "0" * 32},
                pass_fds=(theirs.fileno(),),
                cwd="/",
            )

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        network: str = "",
    ) -> Popen:
        """Run `command` (of Python's) in the folder, with exactly these variables, its output in pipes.

        network: the name of the one that it is to run in (ip-netns(8)), if not in this process's.
        """
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        order = {
            "command": list(command),
            "folder": str(folder),
            "environment": dict(environment),
            "descriptors": [1, 2, *pass_fds],
            "network": network,
        }
        _adopt_orphans(True)  # the process is one at first
        try:
            _send(self._socket, order, [their_out, their_err, *pass_fds])
            answer, _ = _receive(self._socket)
        finally:
            _adopt_orphans(False)
            os.close(their_out)
            os.close(their_err)
        if not isinstance(answer, int):
            raise OSError(f"the fork server ended with {self._process.wait()} or could not fork: {answer}")
        return Forked(answer, command, os.fdopen(out), os.fdopen(err))

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._socket.close()
        self._process.wait()


class ForkServers:
    """Servers by what a job's processes have loaded, each started when it is first needed."""

    def __init__(self) -> None:
        self._servers: dict[tuple[bool, str], ForkServer] = {}

    def start(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> "Popen | None":
        """Run a launcher; return None for what has to be a process of its own."""
        network = ""
        if [*command[:3]] == ["ip", "netns", "exec"]:
            network, command = command[3], command[4:]
        if command[0] == "env":
            command = command[1:]
            if command[0] == "-C":
                folder, command = Path(command[1]), command[2:]
            first = next(place for place, word in enumerate(command) if "=" not in word)
            environment = {**environment, **dict(word.split("=", 1) for word in command[:first])}
            command = command[first:]
        runs = "run" in command or "torch.distributed.run" in command
        if command[0] != sys.executable or not runs or "cuda" in command:
            return None
        if any(word in command for word in BY_CRIU):
            return None
        if _of_tests_own(environment) != PLAIN:  # a library that blocks the disk, say
            return None
        several = "--nproc-per-node" in command and command[command.index("--nproc-per-node") + 1] != "1"
        threads = environment.get("OMP_NUM_THREADS", "1" if several else "")  # as torchrun has it
        server = self._server(environment, "transparent" in command, threads)
        return server.start(command, folder, environment, network=network)

    def start_worker(
        self, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
    ) -> Popen:
        """Run a worker without a launcher, `python script arguments`, on softgpu."""
        server = self._server(environment, False, environment["OMP_NUM_THREADS"])
        return server.start(command, Path.cwd(), environment, pass_fds)

    def _server(self, environment: Mapping[str, str], transparent: bool, threads: str) -> ForkServer:
        kind = (transparent, threads)
        if kind not in self._servers:
            own = {name: value for name, value in environment.items() if not name.startswith(LATER)}
            own["PYTHONPATH"] = python_path()
            own |= device_environment("softgpu", 1, LIBRARIES, own, proxy=transparent)
            own["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
            if threads:
                own["OMP_NUM_THREADS"] = threads
            self._servers[kind] = ForkServer(own)
        return self._servers[kind]

    def close(self) -> None:
        """End them."""
        for server in self._servers.values():
            server.close()


SERVERS = ForkServers()


def main() -> None:
    """Fork as one is told; in what is forked, be that."""
    control = socket.socket(fileno=int(sys.argv[1]))
    loaded_with = dict(os.environ)
    gc.disable()  # modules are no garbage
    spare._import(["torch"])
    spare._device_count.in_children(sys.modules.get("torch"))
    for module in MODULES:
        import_module(module)
    inspect.stack()  # torch's rendezvous asks again and again; the first time looks through all modules
    gc.freeze()
    gc.enable()
    while (heard := _receive(control))[0] is not None:
        order, descriptors = heard
        try:
            pid = spare._fork_spare()
        except OSError as error:
            _send(control, str(error))
            pid = -1
        if pid == 0:
            control.close()
            _be_command(order, descriptors, loaded_with)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            _send(control, pid)


def _be_command(order: Any, descriptors: Sequence[int], loaded_with: Mapping[str, str]) -> None:
    # None of their own numbers is in the way of the next.
    higher = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, HIGH) for one in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(order["descriptors"], higher, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["network"]:
        _enter(order["network"])
    os.chdir(order["folder"])
    _mark(order["environment"].get(MARK, "0"))
    _take_over(order["environment"])
    sys.orig_argv[:] = order["command"]  # with which a launcher may begin once more
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    spare._device_count.by_itself()
    ready = _Ready(loaded_with)
    if ready.is_template:
        spare.main()
        return
    spare_template._start = ready.start
    _run(order["command"][1:])


def _run(words: Sequence[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        autoload.begin()
        runpy.run_path(words[0], run_name="__main__")


def _enter(network: str) -> None:
    """Go into a network as `ip netns exec` does: with a /sys of that network, and without what lay in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{network}", os.O_RDONLY | os.O_CLOEXEC)
    entered = (
        libc.setns(descriptor, CLONE_NEWNET) == 0
        and libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None) == 0
        and libc.umount2(b"/sys", MNT_DETACH) == 0
        and libc.mount(network.encode(), b"/sys", b"sysfs", 0, None) == 0
    )
    os.close(descriptor)
    if not entered:
        raise OSError(ctypes.get_errno(), f"can't enter the network {network}")


def _mark(mark: str) -> None:
    """Have /proc/PID/environ, which is what the process began with, show this job's mark."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark.encode(), len(mark))


def _take_over(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


class _Ready:
    """A process that waits to be what a launcher forks its workers from. In that, `is_template`."""

    def __init__(self, loaded_with: Mapping[str, str]) -> None:
        self._loaded_with = _that_counts(loaded_with)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        self.is_template = self._pid == 0
        if not self.is_template:
            theirs.close()
            return
        self._socket.close()
        order, descriptors = _receive(theirs)
        theirs.close()
        if order is None:
            os._exit(0)
        os.setsid()
        _take_over(order["environment"])
        os.set_inheritable(descriptors[0], True)
        sys.argv = ["-c", str(descriptors[0]), order["folder"]]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptor: int
    ) -> "subprocess.Popen[Any]":
        """In the place of spare_template._start: the first time this process, if it has loaded the same."""
        pid, self._pid = self._pid, 0
        if pid == 0 or _that_counts(environment) != self._loaded_with:
            self._socket.close()
            if pid:
                os.waitpid(pid, 0)
            return START(command, environment, descriptor)
        order = {"environment": dict(environment), "folder": command[-1]}
        _send(self._socket, order, [descriptor])
        self._socket.close()
        return Forked(pid, command)


def _that_counts(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(LATER)}


def _of_tests_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a server has only if they were there before any test."""
    return {
        name: value
        for name, value in _that_counts(environment).items()
        if name not in ("PYTHONPATH", "OMP_NUM_THREADS") and not name.startswith("PYTEST_")
    }


def _adopt_orphans(adopts: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopts)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _send(to: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    rights = array.array("i", descriptors).tobytes()
    to.sendmsg(
        [json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    )


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message with its descriptors, None at the end."""
    data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 8)
    return (json.loads(data) if data else None), descriptors


# Whose processes are written to files: with all that a server has loaded for any test these would be larger.
BY_CRIU = ("--suspendable", "--snapshot-every", "--broken-device", "--standby")
PLAIN = _of_tests_own(os.environ)
