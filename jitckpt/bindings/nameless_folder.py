"""A folder in memory without a name: it goes with the last process that has it open, however that ends."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

# fsopen(2) and its like, which only newer libcs have: the same numbers on all architectures.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6
_NAMESPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_MOUNT_SECONDS = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def nameless_folder() -> Iterator[int]:
    """Give a descriptor of a new, empty folder.

    Who may not mount, not even in a user namespace, gets one in /dev/shm, which stays if this process is
    killed. Raises OSError.
    """
    named = None
    try:
        folder = _mounted() if os.geteuid() == 0 else _mounted_elsewhere()
    except PermissionError:
        named = tempfile.mkdtemp(prefix="jitckpt-images-", dir="/dev/shm")
        folder = os.open(named, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)
        if named is not None:
            shutil.rmtree(named)


def _mounted() -> int:
    """Return a file system's root that is mounted nowhere. Raises OSError."""
    kind = _call(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
    try:
        _call(_FSCONFIG, kind, _FSCONFIG_CMD_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, kind, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(kind)
    try:
        root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchmod(root, 0o700)
        return root
    finally:
        os.close(mount)


def _mounted_elsewhere() -> int:
    """Return the same for a user: made by a process in a user namespace, where it may mount.

    It is another program, as a process with threads can't enter one. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(theirs.fileno())]
        try:
            made = subprocess.run(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_MOUNT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PermissionError(str(error)) from error
        if made.returncode:
            raise PermissionError("This user may not mount.")
        return socket.recv_fds(ours, 1, 1)[1][0]


def _mount_for(other: socket.socket) -> None:
    """Send a new folder to another process of this user's."""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_NAMESPACES):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Without these its files could belong to nobody.
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    socket.send_fds(other, [b"."], [_mounted()])


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    _mount_for(socket.socket(fileno=int(sys.argv[1])))
