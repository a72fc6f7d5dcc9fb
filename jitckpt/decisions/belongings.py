"""What a worker's processes have, and how each of it is carried when CRIU dumps them and makes them again.

Or, a sentence each, what keeps them from being moved. All is judged by what /proc says of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# What the kernel shows no way to look into, and CRIU none to make again.
UNKNOWN_TO_CRIU = {
    "anon_inode:[io_uring]": "an io_uring (torch's TCPStore server has one, libuv's loops may)",
    "anon_inode:[perf_event]": "a performance counter (perf_event_open)",
    "anon_inode:[userfaultfd]": "a userfaultfd",
    "anon_inode:bpf-map": "a map of eBPF",
    "anon_inode:bpf-prog": "a program of eBPF",
}
DEVICES = ("/dev/nvidia", "/dev/infiniband/", "/dev/kfd", "/dev/dri/")
TERMINALS = re.compile(r"/dev/(pts/\d+|tty\w*|console)$")
HUGE_PAGES = ("/anon_hugepage", "/dev/hugepages/")
SHARED_WITH_AGENT = re.compile(r"/memfd:(jitckpt-(?:local-state|steps|rest))\b")
EXTERNAL = ("tty[", "file[")  # how the name of a file begins for CRIU that is not in the images
# CRIU cuts the first letter of a regular file's name as it reads the images: with a path it is the slash.
FIRST_OF_A_NAME = "f"
ESTABLISHED, LISTENS = "established", "listens"
SERVER = "device "  # how the name of a socket begins whose other end is a device's server's
GLOO = "pt_gloo_runloop"  # the name of the threads of torch's gloo groups, as the kernel keeps it
GROUP = (
    "a gloo group, by which ranks are connected by TCP (as to {}): a group of NCCL's alone can go, as that "
    "of init_process_group('nccl')"
)
MOST_SHOWN = 3
MOST_WRITTEN = 64 << 20  # bytes of a file that goes to another host with who writes it


@dataclass(frozen=True)
class OpenFile:
    """A descriptor of a process. to: where its link in /proc/PID/fd leads.

    identity: device and inode of the file. device: the number of the device that a character file is. pidfd:
    the process that it stands for. bytes: its size, where no name leads to it any more. mount: the number
    of the mount by which it was opened, where it has a name.
    """

    number: int
    to: str
    identity: tuple[int, int]
    device: int = 0
    pidfd: int | None = None
    bytes: int = 0
    mount: int = 0


@dataclass(frozen=True)
class CarriedProcess:
    """mapped: the names of what is mapped. tracer: its debugger, 0: none. memory: bytes that are written.

    threads: their names.
    """

    pid: int
    name: str
    files: tuple[OpenFile, ...] = ()
    mapped: frozenset[str] = frozenset()
    folder: str = "/"
    tracer: int = 0
    memory: int = 0
    threads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Socket:
    """One of the whole machine.

    family: unix or tcp. ends: of TCP. peer: the inode of a unix socket's other end, 0 if that is gone. kind:
    SOCK_STREAM and its like. path: the name of one that has one.
    """

    inode: int
    family: str
    state: str
    kind: int = 1
    peer: int = 0
    ends: tuple[str, str] = ("", "")
    path: str = ""


@dataclass(frozen=True)
class Surroundings:
    """Whom the processes know. agent: the inodes of the agent's sockets to them, with what each is for.

    outputs: of the agent's first three files: identity and number. servers, servers_sockets: of the servers
    of their devices, which end before the dump, or stay where the processes are only written to files; made
    again, these have no more of them than sockets whose other ends are gone. elsewhere: they are to go on on
    another host. hosts: the addresses of the job's. written: files that they write and other hosts lack, with
    their lengths.
    """

    agent: Mapping[int, str]
    outputs: Mapping[tuple[int, int], int]
    servers: Collection[int] = ()
    servers_sockets: Collection[int] = ()
    elsewhere: bool = False
    hosts: Collection[str] = ()
    written: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SocketEnd:
    """A socket of theirs whose other end is the agent's, which makes a new pair. name: what it is for.

    Or it is a device's server's: then the new pair's other end is closed at once.
    """

    inode: int
    kind: int
    name: str


@dataclass(frozen=True)
class Carried:
    """How it is done.

    sockets: whose other ends are the agent's. outputs: what CRIU calls a file that is one of the agent's
    first three, with its number there. external: those of them that are left out of the images. memory:
    names of memory that is the agent's, too. ghosts: bytes of the largest file that has no name. folders:
    that have to be there. written: files whose content goes with them. obstacles: sentences that say why the
    processes can't be moved.
    """

    sockets: tuple[SocketEnd, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    external: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    ghosts: int = 0
    folders: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


def carried(
    processes: Sequence[CarriedProcess], sockets: Mapping[int, Socket], around: Surroundings
) -> Carried:
    """Return how all belongings of a tree of processes are carried. sockets: by inode."""
    mine = dict(_sockets_of(processes, sockets))
    ends, obstacles = _ends(mine, sockets, around)
    files = [(process, file) for process in processes for file in process.files]
    outputs: dict[str, int] = {}
    for process, file in files:
        if file.identity in around.outputs and not file.to.startswith(("socket:", "/dev/null")):
            outputs[_key(file)] = around.outputs[file.identity]
        elif reason := _obstacle(file, around, {one.pid for one in processes}):
            obstacles.append(_sentence(process, reason))
        elif around.written.get(file.to, 0) > MOST_WRITTEN:
            size = f"{around.written[file.to] / 1e6:.1f} MB"
            obstacles.append(_sentence(process, f"{file.to} open to write, {size} on a disk of this host"))
    for process in processes:
        obstacles += [_sentence(process, reason) for reason in _obstacles_of(process)]
    names = {
        name for process in processes for name in (*process.mapped, *(file.to for file in process.files))
    }
    memory = {found[1] for name in names if (found := SHARED_WITH_AGENT.match(name))}
    bound = [one.path.rpartition("/")[0] for _, one in mine.values() if one.path.startswith("/")]
    return Carried(
        tuple(ends),
        tuple((key.removeprefix(FIRST_OF_A_NAME), number) for key, number in outputs.items()),
        tuple(key for key in outputs if key.startswith(EXTERNAL)),
        tuple(sorted(memory)),
        max((file.bytes for _, file in files), default=0),
        tuple(sorted({*bound, *(process.folder for process in processes)} - {""})),
        tuple(sorted(around.written)),
        tuple(dict.fromkeys(obstacles)),
    )


def shown(obstacles: Sequence[str]) -> str:
    """Return sentences for a line."""
    more = [f"There are {len(obstacles) - MOST_SHOWN} more obstacles."] if len(obstacles) > MOST_SHOWN else []
    return " ".join([*obstacles[:MOST_SHOWN], *more])


def _sockets_of(
    processes: Sequence[CarriedProcess], sockets: Mapping[int, Socket]
) -> Iterator[tuple[int, tuple[CarriedProcess, Socket]]]:
    for process in reversed(processes):  # of those that have one the first counts
        for file in process.files:
            inode = file.identity[1]
            if file.to.startswith("socket:") and inode in sockets:
                yield inode, (process, sockets[inode])


def _ends(
    mine: Mapping[int, tuple[CarriedProcess, Socket]], sockets: Mapping[int, Socket], around: Surroundings
) -> tuple[list[SocketEnd], list[str]]:
    """Return the sockets to the agent, and why others can't be carried."""
    ends, obstacles = [], []
    inside = {one.ends for _, one in mine.values() if one.family == "tcp"}
    in_groups: dict[CarriedProcess, list[str]] = {}
    for inode, (process, one) in sorted(mine.items()):
        stays = one.family == "tcp" and one.state == LISTENS and _is_of_host(one.ends[0])
        if stays and around.elsewhere and GLOO not in process.threads:
            what = f"a TCP socket that listens at {one.ends[0]}, which is an address of this host"
            obstacles.append(_sentence(process, what))
        if one.state != ESTABLISHED:
            continue
        if one.family == "tcp":
            if not around.elsewhere or one.ends[::-1] in inside:
                continue
            if GLOO in process.threads and _is_in_job(one, around.hosts):
                in_groups.setdefault(process, []).append(one.ends[1])
            else:
                obstacles.append(_sentence(process, f"a TCP connection to {one.ends[1]}"))
        elif one.peer in around.agent:
            ends.append(SocketEnd(inode, one.kind, around.agent[one.peer]))
        elif one.peer in around.servers_sockets:
            ends.append(SocketEnd(inode, one.kind, f"{SERVER}{inode}"))
        elif one.peer and one.peer not in mine:
            path = one.path or (sockets[one.peer].path if one.peer in sockets else "")
            where = f" at {path}" if path else ""
            obstacles.append(_sentence(process, f"a socket{where} whose other end is a process's of its own"))
    for process, to in in_groups.items():
        obstacles.append(_sentence(process, GROUP.format(", ".join(to[:MOST_SHOWN]))))
    return ends, obstacles


def _is_of_host(end: str) -> bool:
    """Return whether it is an address that no other host has."""
    address = end.rpartition(":")[0]
    return address not in ("0.0.0.0", "::", "::1") and not address.startswith("127.")


def _is_in_job(one: Socket, hosts: Collection[str]) -> bool:
    """Return whether a TCP connection leads to a host of the job, maybe this one."""
    here, there = (end.rpartition(":")[0] for end in one.ends)
    return there == here or there in hosts


def _key(file: OpenFile) -> str:
    """Return what CRIU calls a file that the restored process gets from outside."""
    if TERMINALS.match(file.to):
        return f"tty[{file.device:x}:{file.identity[0]:x}]"
    if file.to.startswith("/") and not file.device:
        return f"file[{file.mount:x}:{file.identity[1]:x}]"
    return file.to.removeprefix("/")


def _obstacle(file: OpenFile, around: Surroundings, inside: Collection[int]) -> str:
    """Return why a file can't be carried, as what the process has; "" if it can."""
    if file.to in UNKNOWN_TO_CRIU:
        return UNKNOWN_TO_CRIU[file.to]
    if file.to.startswith(DEVICES):
        return f"{file.to} open, a device's own file"
    if TERMINALS.match(file.to):
        return f"the terminal {file.to} open"
    if file.pidfd is not None and file.pidfd > 0 and file.pidfd not in (*inside, *around.servers):
        return f"a file that stands for process {file.pidfd}, which is none of its own (pidfd)"
    return ""


def _obstacles_of(process: CarriedProcess) -> Iterator[str]:
    if process.tracer:
        yield f"a debugger, process {process.tracer}"
    for name in sorted(process.mapped):
        if name in UNKNOWN_TO_CRIU:
            yield UNKNOWN_TO_CRIU[name]
        elif name.startswith(HUGE_PAGES):
            yield "huge pages that it has reserved (hugetlbfs)"
        elif name.startswith(DEVICES):
            yield f"{name} mapped, a device's own file"


def _sentence(process: CarriedProcess, what: str) -> str:
    return f"Process {process.pid} ({process.name}) has {what}."
