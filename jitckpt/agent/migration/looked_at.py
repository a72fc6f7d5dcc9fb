"""What /proc and the kernel's socket tables say of processes: the facts for decisions/belongings.py."""

import contextlib
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from jitckpt.decisions.belongings import ESTABLISHED, LISTENS, CarriedProcess, OpenFile, Socket
from jitckpt.system import process_tree

# From linux/sock_diag.h and linux/unix_diag.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_NAME, _UDIAG_SHOW_PEER = 1, 4
_UNIX_DIAG_NAME, _UNIX_DIAG_PEER = 0, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_QUESTION = struct.Struct("=BBHIIIII")  # unix_diag_req
_ANSWER = struct.Struct("=BBBBIII")  # unix_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_MOST_ANSWER = 1 << 18
_APPENDS = os.O_APPEND | os.O_WRONLY
_BLOCK = 512  # bytes, of st_blocks
# The kinds of file systems that hosts share. Of others with FUSE nobody knows.
SHARED = re.compile(
    r"nfs|cifs|smb|lustre|gpfs|ceph|beegfs|9p|virtiofs|glusterfs|wekafs|afs|orangefs|pvfs|fuse"
)
_STATES = {1: ESTABLISHED, 10: LISTENS}  # as the kernel numbers those of TCP, and of all sockets


def tree(root: int) -> list[CarriedProcess]:
    """Return a process and all below it, the first one first. Raises OSError if it has ended."""
    found = [_process(root)]
    for pid in sorted(process_tree.below(process_tree.everybody(), [root]) - {root}):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.append(_process(pid))
    return found


def image_bytes(root: int) -> int:
    """Return about how large the images of a process and all below it get. Raises OSError if it has ended."""
    own, shared = 0, {}
    for process in tree(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            own += _resident(process.pid, "Anon")
            for file in process.files:
                if file.to.startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(f"/proc/{process.pid}/fd/{file.number}")
                    shared[file.identity] = status.st_blocks * _BLOCK
    return own + sum(shared.values())


def written_files(root: int) -> dict[str, int]:
    """Return the files with a name that a process and all below it write, with their lengths.

    But for those of the first three that are this process's, too.
    """
    return {file.to: size for _, file, size in _written(root)}


def written_here(root: int) -> dict[str, int]:
    """Return those of them that other hosts lack, by the kinds of their file systems."""
    found = {}
    for pid, file, size in _written(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if not SHARED.match(_file_system(pid, file.mount)):
                found[file.to] = size
    return found


def shared_lengths(root: int, other: int) -> list[str]:
    """Return the files of a process and all below it whose length another, or one below it, may change.

    CRIU makes no process again that has a file open which is longer than at its dump, unless it does nothing
    but append to it. Empty ones, and those on which it has a lock, are there to be locked, and those in
    /dev/shm are memory of ranks: nobody makes them longer.
    """
    written = {file.identity for _, file, flags, _, _ in _named(other) if flags & os.O_ACCMODE != os.O_RDONLY}
    return sorted(
        {
            file.to
            for _, file, flags, size, is_locked in _named(root)
            if file.identity in written
            and flags & _APPENDS != _APPENDS
            and size
            and not (is_locked or _is_memory(file))
        }
    )


def _is_memory(file: OpenFile) -> bool:
    return file.to.startswith("/dev/shm/")


def _written(root: int) -> Iterator[tuple[int, OpenFile, int]]:
    """Yield who writes which file, and its length."""
    for pid, file, flags, size, _ in _named(root):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            yield pid, file, size


def _named(root: int) -> Iterator[tuple[int, OpenFile, int, int, bool]]:
    """Yield who has which file with a name open, with the flags of that, its length, and if it locks it."""
    own = {(status.st_dev, status.st_ino) for status in map(os.fstat, range(3))}
    for process in tree(root):
        for file in process.files:
            if not file.to.startswith("/") or file.to.startswith("/memfd:") or file.identity in own:
                continue
            with contextlib.suppress(FileNotFoundError):
                info = Path(f"/proc/{process.pid}/fdinfo/{file.number}").read_text()
                flags = int(re.search(r"^flags:\t(\d+)", info, re.MULTILINE)[1], 8)  # type: ignore[index]
                status = os.stat(file.to)
                same = (status.st_dev, status.st_ino) == file.identity
                if same and stat.S_ISREG(status.st_mode):
                    yield process.pid, file, flags, status.st_size, "\nlock:" in info


def _file_system(pid: int, mount: int) -> str:
    """Return of which kind a mount is."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines():
        if line.startswith(f"{mount} "):
            return line.partition(" - ")[2].partition(" ")[0]
    return ""


def resident_bytes() -> int:
    """Return the memory that this process has of its own."""
    return _resident(os.getpid(), "Anon")


def available_memory() -> int:
    """Return the memory of this machine that can be had, in bytes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


def name_of(number: int) -> str:
    """Return what the process or thread of this number is called; "" if there is none."""
    try:
        return Path(f"/proc/{number}/comm").read_text(errors="replace").strip() or "?"
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _resident(pid: int, kind: str) -> int:
    found = re.search(rf"^Rss{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def sockets() -> dict[int, Socket]:
    """Return the unix and the TCP sockets of this network namespace by inode. Raises OSError."""
    return {one.inode: one for one in (*_unix_sockets(), *_tcp_sockets())}


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of a process's sockets; none if it has ended."""
    try:
        return {file.identity[1] for file in _files(pid) if file.to.startswith("socket:")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def _process(pid: int) -> CarriedProcess:
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text(errors="replace")
    tracer = re.search(r"^TracerPid:\t(\d+)", status, re.MULTILINE)
    written = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    lines = (folder / "maps").read_text(errors="replace").splitlines()
    mapped = frozenset(line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6)
    return CarriedProcess(
        pid,
        (folder / "comm").read_text(errors="replace").strip(),
        tuple(_files(pid)),
        mapped,
        "" if not lines else os.readlink(folder / "cwd"),  # a zombie has none
        int(tracer[1]) if tracer else 0,
        sum(map(int, written)) << 10,
        frozenset(map(name_of, map(int, os.listdir(folder / "task")))),
    )


def _files(pid: int) -> Iterator[OpenFile]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            to, status = os.readlink(f"{folder}/{name}"), os.stat(f"{folder}/{name}")
            pidfd, mount = None, 0
            if to.startswith("/"):
                info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                number = re.search(r"^mnt_id:\t(\d+)", info, re.MULTILINE)
                mount = int(number[1]) if number else 0
            if to == "anon_inode:[pidfd]" or to.startswith("pidfd:"):
                info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                number = re.search(r"^Pid:\t(-?\d+)", info, re.MULTILINE)
                pidfd = int(number[1]) if number else None
            gone = stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and not to.startswith("/memfd:")
            yield OpenFile(
                int(name),
                to,
                (status.st_dev, status.st_ino),
                status.st_rdev,
                pidfd,
                status.st_size if gone else 0,
                mount,
            )


def _unix_sockets() -> Iterator[Socket]:
    show = _UDIAG_SHOW_NAME | _UDIAG_SHOW_PEER
    question = _QUESTION.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show, 0, 0)
    header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(5)
        kernel.send(header + question)
        while True:
            data = kernel.recv(_MOST_ANSWER)
            at = 0
            while at < len(data):
                size, kind, _, _, _ = _HEADER.unpack_from(data, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not tell which unix sockets belong together (UNIX_DIAG)")
                yield _unix_socket(data[at + _HEADER.size : at + size])
                at += size + -size % 4


def _unix_socket(data: bytes) -> Socket:
    _, kind, state, _, inode, _, _ = _ANSWER.unpack_from(data)
    peer, path, at = 0, "", _ANSWER.size
    while at + _ATTRIBUTE.size <= len(data):
        size, attribute = _ATTRIBUTE.unpack_from(data, at)
        content = data[at + _ATTRIBUTE.size : at + size]
        if attribute == _UNIX_DIAG_PEER:
            peer = int.from_bytes(content[:4], "little")
        elif attribute == _UNIX_DIAG_NAME:
            path = content.rstrip(b"\0").decode(errors="replace").replace("\0", "@")
        at += size + -size % 4
    return Socket(inode, "unix", _STATES.get(state, ""), kind, peer, path=path)


def _tcp_sockets() -> Iterator[Socket]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                ends = _address(words[1]), _address(words[2])
                yield Socket(int(words[9]), "tcp", _STATES.get(int(words[3], 16), ""), ends=ends)


def _address(text: str) -> str:
    """Return ADDRESS:PORT for the kernel's hexadecimal form; IPv4 in IPv6 is the same as without."""
    digits, port = text.split(":")
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    raw = b"".join(words)
    if len(raw) == 16 and raw.startswith(bytes(10) + b"\xff\xff"):
        raw = raw[12:]
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, raw)}:{int(port, 16)}"
