"""A host of a job's own: its network, /dev/shm and perhaps disk are nobody else's; what is left is the job's.

Every process that starts there stays in its network namespace, whatever session, name and environment it
takes; so that namespace tells what belongs to the job.
"""

import ctypes
import ipaddress
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jitckpt.errors import HostsError

PLAIN, SMALL, LOOP = (
    "plain",
    "small",
    "loop",
)  # disks: of the machine; one that is soon full; one that can be frozen
SMALL_SIZE = "24m"  # of which a job needs a few: a save of a rank has 0.1 MB
LOOP_BYTES = 64 << 20
SEMAPHORE_BYTES = 32
CLONE_NEWNET = 0x40000000
MOUNTS = {
    PLAIN: "",
    SMALL: f'mount -t tmpfs -o size={SMALL_SIZE} tmpfs "$1"',
    LOOP: f'truncate -s {LOOP_BYTES} "$1.image" && mkfs.ext4 -q "$1.image" && mount -o loop "$1.image" "$1"',
}
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def is_half_made(file: Path) -> bool:
    """Return whether it is what the C library's sem_open leaves if it is killed before it has named the file.

    A DataLoader makes eight semaphores for each pass. Nobody can tell such a file from one that another
    process is just making, so nobody can remove it.
    """
    return (
        re.fullmatch(r"sem\.[A-Za-z0-9]{6}", file.name) is not None and file.stat().st_size == SEMAPHORE_BYTES
    )


def reached_at(local: str) -> tuple[str, int]:
    """Return address and port at which a socket is reached that has this local address in /proc/net/tcp."""
    address, port = local.split(":")
    # The words of four bytes stand there as this machine's numbers.
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_unspecified:
        found = ipaddress.ip_address("127.0.0.1" if found.version == 4 else "::1")
    return str(found), int(port, 16)


class Place:
    """A host. disk: the folder for the checkpoint directory; outside it is seen under `seen`."""

    def __init__(
        self, folder: Path, disk: Path, kind: str = PLAIN, network: Sequence[str] = ("unshare", "--net")
    ) -> None:
        """Make it, with what is its alone below `folder`. network: what starts a command in its network.

        Raises HostsError where this user may not.
        """
        self.disk, self.home, self.temporary = disk, folder / "home", folder / "tmp"
        for path in (self.disk, self.home, self.temporary):
            path.mkdir(parents=True, exist_ok=True)
        up = "ip link set lo up && mount -t tmpfs tmpfs /dev/shm"
        script = " && ".join(filter(None, (up, MOUNTS[kind], "echo ready && exec cat > /dev/null")))
        # It lives until its standard input ends, and so with this process at most: then the mounts go, too.
        self._holder = subprocess.Popen(
            [
                *network,
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                script,
                "sh",
                str(self.disk),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate()
            raise HostsError(f"A host for a hostile run can't be made: {said.strip()} Root may, if anybody.")
        self._network = self._inode(self._holder.pid)

    @property
    def seen(self) -> Path:
        """The disk, as this process reaches it."""
        return Path(f"/proc/{self._holder.pid}/root{self.disk}")

    def command(self, command: Sequence[str], folder: Path) -> list[str]:
        """Return the command that runs `command` there, in that folder, without a fork."""
        own = f"/proc/{self._holder.pid}/ns"
        enter = ["nsenter", f"--net={own}/net", f"--mount={own}/mnt", "--"]
        return [*enter, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(folder), *command]

    def processes(self) -> list[int]:
        """Return the living processes of the job there."""
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in numbers if pid != self._holder.pid and self._inode(pid) == self._network]

    def kill_all(self) -> None:
        """Kill what runs there; a process that waits for a frozen disk goes when that is thawed."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def listening(self) -> list[tuple[str, int]]:
        """Return address and port of the sockets that listen there."""
        lines = Path(f"/proc/{self._holder.pid}/net/tcp").read_text().splitlines()[1:]
        lines += Path(f"/proc/{self._holder.pid}/net/tcp6").read_text().splitlines()[1:]
        return [reached_at(line.split()[1]) for line in lines if line.split()[3] == LISTENS]

    def left(self) -> list[str]:
        """Return what is there of files that nobody uses any more once all processes have ended."""
        shared = Path(f"/proc/{self._holder.pid}/root/dev/shm")
        names = [name for name in sorted(os.listdir(shared)) if not is_half_made(shared / name)]
        found = [f"/dev/shm/{name}" for name in names]
        for folder in (self.temporary, self.home):
            found += [str(path.relative_to(folder.parent)) for path in sorted(folder.rglob("*"))]
        return found

    def fill(self) -> None:
        """Take all that is free on a small disk, to the last byte."""
        with (self.seen / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))

    def make_room(self) -> None:
        """Undo `fill`."""
        (self.seen / "filler").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Let nothing be written to a loop disk: who tries waits, and not even SIGKILL ends him."""
        self._run("fsfreeze", "--freeze", str(self.disk))

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._run("fsfreeze", "--unfreeze", str(self.disk))

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Let sockets that the calling thread makes be in this host's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._holder.pid}/ns/net") as theirs:
            if libc.setns(theirs.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "the job's network can't be entered")
            try:
                yield
            finally:
                libc.setns(own.fileno(), CLONE_NEWNET)

    def close(self) -> None:
        """End all that is there, and the place with it."""
        with suppress(subprocess.CalledProcessError):  # it is not frozen
            self.thaw()
        while self.processes():
            self.kill_all()
        self._holder.communicate()
        (self.disk.parent / f"{self.disk.name}.image").unlink(missing_ok=True)

    def _run(self, *command: str) -> None:
        subprocess.run(self.command(command, Path("/")), check=True, capture_output=True)

    @staticmethod
    def _inode(pid: int) -> int:
        """Return which network a process is in; 0 where there is none, as of one that has ended."""
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino
        except OSError:
            return 0
