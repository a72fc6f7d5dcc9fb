"""CRIU, which writes processes to images and makes them again: found, asked, and understood where it fails.

It is asked by its RPC (`criu swrk`, with the messages of the pycriu that belongs to it) where protobuf is
installed, else by its command line. Neither is ever waited for without a limit.
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from jitckpt.errors import JitckptError
from jitckpt.wire.environment import CRIU

LEAST_VERSION = (4, 2)  # older ones can't read what newer kernels say of sockets and of the vDSO
ADVICE = "scripts/setup --criu brings criu 4.2.1"
# A dump has to name its run. At a restore more than warnings would be two lines a page that processes share,
# each written on its own: 200,000 of a rank with two loaders.
LOG_LEVELS = {"dump": 3, "restore": 2}
SOONEST_GHOST = 1 << 20  # bytes: files without a name up to this size go into the images by themselves
MOST_ANSWER = 1 << 16
RIGHTS = "it needs root, or CAP_CHECKPOINT_RESTORE, CAP_SETPCAP and CAP_NET_ADMIN as ambient capabilities"
_MOST_OF_TABLE = 26  # characters: for "inet " and its name CRIU has 32 bytes, with the zero behind
_ASKING_SECONDS = 10.0  # for its version
# What the log says at every failure, or always.
_NO_REASON = ("FAILED", "RLIMIT_NOFILE", "Dump files (pid:")
_ERROR = re.compile(r"^\([\d.]+\)\s+(?:\d+: )?Error \((?P<where>[^)]*)\): (?P<what>.*)$")


class CriuError(JitckptError):
    """CRIU is missing, or could not do what was asked; the text is a sentence."""


@dataclass(frozen=True)
class Criu:
    """An installed one. messages: pycriu's, None where they can't be had."""

    program: Path
    version: str
    messages: ModuleType | None

    @property
    def tells_when_stopped(self) -> bool:
        """Whether it tells when the processes of a dump are all stopped."""
        return self.messages is not None

    def __str__(self) -> str:
        return f"criu {self.version} ({'pycriu' if self.messages else 'its command line'})"


@dataclass(frozen=True)
class Options:
    """What goes with a dump or a restore.

    folder: a descriptor of the directory of the images. external: what is not in the images, such as
    unix[INODE]. inherit: at a restore, descriptors of this process with what they stand for. ghosts: bytes of
    the largest file without a name. seconds: the limit. variables: more of CRIU's own environment.
    leaves_running: at a dump, the processes go on afterwards. while_stopped: at a dump, called when all is
    written and none of them runs yet, if `tells_when_stopped`; it does not raise.
    """

    folder: int
    seconds: float
    external: Sequence[str] = ()
    inherit: Sequence[tuple[int, str]] = ()
    ghosts: int = SOONEST_GHOST
    variables: Mapping[str, str] = field(default_factory=dict)
    leaves_running: bool = False
    while_stopped: Callable[[], None] | None = None


def find() -> Criu:
    """Return the CRIU of this machine. Raises CriuError with what to install."""
    named = CRIU.get()
    beside = Path(sys.prefix, "lib", "criu", "criu")  # where scripts/setup unpacks it
    program = named or (str(beside) if beside.exists() else shutil.which("criu"))
    if program is None:
        raise CriuError(f"There is no criu on this machine: {ADVICE}.")
    try:
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_ASKING_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CriuError(f"{program} can't be run: {error}.") from error
    found = re.search(r"Version: ([\d.]+)", told.stdout)
    if found is None:
        raise CriuError(f"{program} does not say which version it is: {told.stderr.strip()[-200:]!r}.")
    version = found[1]
    if tuple(map(int, version.split(".")[:2])) < LEAST_VERSION:
        wanted = ".".join(map(str, LEAST_VERSION))
        raise CriuError(f"{program} is criu {version}, and at least {wanted} is needed: {ADVICE}.")
    return Criu(Path(program), version, _messages(Path(program)))


def dump(criu: Criu, pid: int, options: Options) -> None:
    """Write the process and all below it to images; they are killed then, and zombies of their parents.

    Unless they are to run on. Raises CriuError; then they run on as they were.
    """
    _ask(criu, "dump", pid, options)


def restore(criu: Criu, options: Options) -> int:
    """Make the processes of the images again, the first one as a child of this process; return its number.

    All numbers have to be free. Raises CriuError; then some of the processes may be left.
    """
    return _ask(criu, "restore", 0, options)


def processes(folder: int) -> list[int]:
    """Return the numbers of the processes whose images are in this folder."""
    found = (re.fullmatch(r"ids-(\d+)\.img", name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match)


def numbers(folder: int) -> list[int]:
    """Return the numbers of the processes and threads whose images are in this folder."""
    found = (re.fullmatch(r"core-(\d+)\.img", name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match)


def locks(folder: int) -> set[str]:
    """Return the tables of nftables by which the dump into this folder has locked connections.

    There is one, of the dump's own number, where there was no connection, too. Asked by RPC, CRIU names two
    numbers, of which one has none.
    """
    log = _read(folder, "dump.log")
    numbers = re.findall(r"\bCRIU run id = ([\w-]+)", log)
    named = {f"CRIU-{number}"[:_MOST_OF_TABLE] for number in numbers}
    return named | set(re.findall(r"\binet (CRIU-[\w-]+)", log))


def last_error(log: str) -> str:
    """Return the last error that a log of CRIU's names, with the place in its source; "" if there is none."""
    found = [match for line in log.splitlines() if (match := _ERROR.match(line))]
    errors = [one for one in found if not any(word in one["what"] for word in _NO_REASON)]
    return f"{errors[-1]['what'].rstrip('.')} ({errors[-1]['where']})" if errors else ""


def _messages(program: Path) -> ModuleType | None:
    """Return pycriu's messages, from beside the program: those of another version may mean other things."""
    for folder in (
        program.parent / "root/usr/lib/python3/dist-packages",
        Path("/usr/lib/python3/dist-packages"),
    ):
        file = folder / "pycriu" / "rpc_pb2.py"
        if file.exists() and (
            folder != Path("/usr/lib/python3/dist-packages") or program.is_relative_to("/usr")
        ):
            spec = importlib.util.spec_from_file_location("jitckpt_criu_messages", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except (ImportError, TypeError):  # no protobuf, or one that is too old for it
                return None
            return module
    return None


def _ask(criu: Criu, what: str, pid: int, options: Options) -> int:
    log = f"{what}.log"
    ask: Callable[[Criu, str, int, Options], int] = _by_rpc if criu.messages else _by_command
    try:
        return ask(criu, what, pid, options)
    except subprocess.TimeoutExpired:
        why = f"it took longer than {options.seconds:g} s"
    except (OSError, EOFError, CriuError) as error:
        why = str(error)
    reason = last_error(_read(options.folder, log)) or why
    reason += "" if os.geteuid() == 0 else f" ({RIGHTS})"
    raise CriuError(f"criu can't {what} the process{f' {pid}' if pid else ''}: {reason}.")


def _read(folder: int, name: str) -> str:
    try:
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _by_rpc(criu: Criu, what: str, pid: int, options: Options) -> int:
    rpc: Any = criu.messages
    request = rpc.criu_req()
    request.type = rpc.DUMP if what == "dump" else rpc.RESTORE
    opts = request.opts
    opts.images_dir_fd = options.folder
    opts.log_file, opts.log_level = f"{what}.log", LOG_LEVELS[what]
    opts.tcp_established = opts.file_locks = True
    opts.network_lock = rpc.NFTABLES
    opts.manage_cgroups, opts.manage_cgroups_mode = True, rpc.IGNORE
    opts.ghost_limit = options.ghosts
    opts.unprivileged = os.geteuid() != 0
    opts.external.extend(options.external)
    if what == "dump":
        opts.pid, opts.leave_running = pid, options.leaves_running
        opts.notify_scripts = options.while_stopped is not None
    else:
        opts.rst_sibling = True
        for number, key in options.inherit:
            one = opts.inherit_fd.add()
            one.fd, one.key = number, key
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        files = (theirs.fileno(), options.folder, *(number for number, _ in options.inherit))
        process = subprocess.Popen(
            [str(criu.program), "swrk", str(theirs.fileno())],
            pass_fds=files,
            env={**os.environ, **options.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            ours.settimeout(options.seconds)
            ours.send(request.SerializeToString())
            answer = _answer(rpc, ours, options.while_stopped)
            ours.close()
            process.wait(options.seconds)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(process.args, options.seconds) from error
        finally:
            process.kill()
            process.wait()
    if not answer.success:
        raise CriuError(answer.cr_errmsg or f"error {answer.cr_errno}")
    return int(answer.restore.pid) if what == "restore" else pid


def _answer(rpc: Any, ours: socket.socket, while_stopped: Callable[[], None] | None) -> Any:
    """Return its answer, after what it tells before. Raises OSError or EOFError."""
    while True:
        answer = rpc.criu_resp()
        data = ours.recv(MOST_ANSWER)
        if not data:
            raise EOFError("it has ended without an answer")
        answer.ParseFromString(data)
        if answer.type != rpc.NOTIFY:
            return answer
        if answer.notify.script == "post-dump" and while_stopped is not None:
            while_stopped()
        go_on = rpc.criu_req()
        go_on.type, go_on.notify_success = rpc.NOTIFY, True
        ours.send(go_on.SerializeToString())


def _by_command(criu: Criu, what: str, pid: int, options: Options) -> int:
    folder = f"/proc/{os.getpid()}/fd/{options.folder}"
    words = [
        str(criu.program),
        what,
        "--images-dir",
        folder,
        "--log-file",
        f"{what}.log",
        f"-v{LOG_LEVELS[what]}",
    ]
    words += ["--tcp-established", "--file-locks", "--network-lock", "nftables", "--manage-cgroups=ignore"]
    words += ["--unprivileged"] if os.geteuid() != 0 else []
    words += [word for one in options.external for word in ("--external", one)]
    if what == "dump":
        words += ["--tree", str(pid), "--ghost-limit", str(options.ghosts)]
        words += ["--leave-running"] if options.leaves_running else []
    else:
        words += ["--restore-detached", "--restore-sibling", "--pidfile", "restored.pid"]
        words += [word for number, key in options.inherit for word in ("--inherit-fd", f"fd[{number}]:{key}")]
    ended = subprocess.run(
        words,
        pass_fds=tuple(number for number, _ in options.inherit),
        env={**os.environ, **options.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=options.seconds,
        check=False,
    )
    if ended.returncode != 0:
        raise CriuError(f"it has ended with status {ended.returncode}")
    return int(_read(options.folder, "restored.pid")) if what == "restore" else pid
