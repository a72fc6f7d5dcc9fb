"""What processes have, and how it is carried: made-up processes, and real ones as /proc shows them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitckpt.agent.migration import looked_at
from jitckpt.decisions.belongings import (
    ESTABLISHED,
    GLOO,
    LISTENS,
    MOST_WRITTEN,
    SERVER,
    Carried,
    CarriedProcess,
    OpenFile,
    Socket,
    SocketEnd,
    Surroundings,
    carried,
    shown,
)

OUTPUT, TERMINAL, NOWHERE = (8, 100), (24, 3), (6, 3)
AROUND = Surroundings(
    agent={501: "agent", 502: "control"},
    outputs={OUTPUT: 1, NOWHERE: 0},
    servers=[77],
    servers_sockets=[503],
)


def has(*files: OpenFile, **more: object) -> CarriedProcess:
    return CarriedProcess(10, "python", files, **more)  # type: ignore[arg-type]


def socket_file(number: int, inode: int) -> OpenFile:
    return OpenFile(number, f"socket:[{inode}]", (9, inode))


def look(
    processes: list[CarriedProcess], sockets: list[Socket] | None = None, around: Surroundings = AROUND
) -> Carried:
    return carried(processes, {one.inode: one for one in sockets or []}, around)


def test_what_leads_to_the_agent_is_made_anew() -> None:
    ends = [Socket(20, "unix", ESTABLISHED, 5, 501), Socket(21, "unix", ESTABLISHED, 5, 502)]
    child = CarriedProcess(11, "pt_data_worker", (socket_file(3, 20),))
    found = look([has(socket_file(30, 20), socket_file(7, 21)), child], ends)
    assert found.sockets == (SocketEnd(20, 5, "agent"), SocketEnd(21, 5, "control"))
    assert found.obstacles == ()


def test_what_is_between_servers_and_ranks_or_stays_within_is_no_obstacle() -> None:
    sockets = [
        Socket(22, "unix", ESTABLISHED, 5, 503),  # a server's, which ends before, or stays
        Socket(23, "unix", ESTABLISHED, 1, 24),
        Socket(24, "unix", ESTABLISHED, 1, 23),
        Socket(25, "unix", ESTABLISHED, 1, 0),  # whose other end is gone
        Socket(26, "unix", LISTENS, path="/tmp/pymp-1/listener-2"),
        Socket(27, "tcp", ESTABLISHED, ends=("10.0.0.1:4000", "10.0.0.2:29500")),  # on the same host
    ]
    process = has(
        *(socket_file(one.inode, one.inode) for one in sockets),
        OpenFile(5, "anon_inode:[pidfd]", (5, 1), pidfd=77),
    )
    found = look([process], sockets)
    assert (found.sockets, found.obstacles) == ((SocketEnd(22, 5, f"{SERVER}22"),), ())
    assert found.folders == ("/", "/tmp/pymp-1")


def test_outputs_are_the_agents_own_and_are_left_out_of_the_images() -> None:
    around = Surroundings({}, {OUTPUT: 1, TERMINAL: 2, NOWHERE: 0})
    files = [
        OpenFile(0, "/dev/null", NOWHERE),
        OpenFile(1, "/var/log/job.txt", OUTPUT, mount=0x1B),
        OpenFile(2, "/dev/pts/3", TERMINAL, device=0x8803),
    ]
    found = look([has(*files)], around=around)
    assert found.outputs == ((f"ile[1b:{OUTPUT[1]:x}]", 1), ("tty[8803:18]", 2))
    assert found.external == (f"file[1b:{OUTPUT[1]:x}]", "tty[8803:18]")
    assert found.obstacles == ()
    pipe = look([has(OpenFile(1, "pipe:[900]", OUTPUT))], around=around)
    assert pipe.outputs == (("pipe:[900]", 1),)


def test_memory_of_the_agents_and_files_without_a_name() -> None:
    process = has(
        OpenFile(31, "/memfd:jitckpt-lifeline (deleted)", (1, 5)),
        OpenFile(9, "/tmp/gone (deleted)", (8, 6), bytes=5 << 20),
        mapped=frozenset(
            {"/memfd:jitckpt-steps (deleted)", "/memfd:jitckpt-local-state (deleted)", "[heap]"}
        ),
    )
    found = look([process])
    assert found.memory == ("jitckpt-local-state", "jitckpt-steps")
    assert found.ghosts == 5 << 20


@pytest.mark.parametrize(
    ("process", "sentence"),
    [
        (has(OpenFile(3, "anon_inode:[io_uring]", (1, 1))), "an io_uring (torch's TCPStore server has one"),
        (has(OpenFile(3, "anon_inode:[perf_event]", (1, 1))), "a performance counter"),
        (has(OpenFile(3, "/dev/nvidia0", (6, 9))), "/dev/nvidia0 open, a device's own file"),
        (has(OpenFile(3, "/dev/pts/9", (24, 12))), "the terminal /dev/pts/9 open"),
        (has(OpenFile(3, "anon_inode:[pidfd]", (5, 1), pidfd=4)), "a file that stands for process 4"),
        (has(socket_file(3, 40)), "a socket at /run/daemon whose other end is a process's of its own"),
        (has(mapped=frozenset({"/anon_hugepage (deleted)"})), "huge pages"),
        (has(mapped=frozenset({"anon_inode:[io_uring]"})), "an io_uring"),
        (has(tracer=99), "a debugger, process 99"),
    ],
)
def test_what_can_not_be_carried_is_a_sentence(process: CarriedProcess, sentence: str) -> None:
    (found,) = look([process], [Socket(40, "unix", ESTABLISHED, 1, 999, path="/run/daemon")]).obstacles
    assert found.startswith("Process 10 (python) has ")
    assert sentence in found
    assert found.endswith(".")


def test_a_connection_to_outside_keeps_them_from_going_elsewhere_alone() -> None:
    tcp = Socket(27, "tcp", ESTABLISHED, ends=("10.0.0.1:4000", "10.0.0.2:29500"))
    elsewhere = Surroundings({}, {}, elsewhere=True)
    found = look([has(socket_file(3, 27))], [tcp], elsewhere)
    assert found.obstacles == ("Process 10 (python) has a TCP connection to 10.0.0.2:29500.",)
    both = [tcp, Socket(28, "tcp", ESTABLISHED, ends=tcp.ends[::-1])]
    assert look([has(socket_file(3, 27), socket_file(4, 28))], both, elsewhere).obstacles == ()


def test_a_gloo_group_is_named_as_one() -> None:
    elsewhere = Surroundings({}, {}, elsewhere=True, hosts=["10.0.0.1", "10.0.0.2"])
    ends = [
        Socket(27, "tcp", ESTABLISHED, ends=("10.0.0.1:4000", "10.0.0.2:4001")),
        Socket(28, "tcp", ESTABLISHED, ends=("10.0.0.1:4000", "10.0.0.1:4002")),
        Socket(29, "tcp", LISTENS, ends=("10.0.0.1:4000", "0.0.0.0:0")),
        Socket(30, "tcp", ESTABLISHED, ends=("10.0.0.1:4009", "10.9.9.9:443")),
    ]
    files = [socket_file(number, number) for number in range(27, 31)]
    other, group = look([has(*files, threads=frozenset({"python", GLOO}))], ends, elsewhere).obstacles
    assert (
        "has a gloo group, by which ranks are connected by TCP (as to 10.0.0.2:4001, 10.0.0.1:4002)" in group
    )
    assert other == "Process 10 (python) has a TCP connection to 10.9.9.9:443."
    assert len(look([has(*files)], ends, elsewhere).obstacles) == 4, "without such a thread it is none"


@pytest.mark.parametrize(
    ("place", "stays"),
    [
        ("10.0.0.1:80", True),
        ("0.0.0.0:80", False),
        ("::1:80", False),
        (":::80", False),
        ("127.0.0.5:80", False),
    ],
)
def test_who_listens_at_an_address_of_this_host_can_not_do_so_elsewhere(place: str, stays: bool) -> None:
    listens = Socket(27, "tcp", LISTENS, ends=(place, "0.0.0.0:0"))
    found = look([has(socket_file(3, 27))], [listens], Surroundings({}, {}, elsewhere=True))
    sentence = (
        f"Process 10 (python) has a TCP socket that listens at {place}, which is an address of this host."
    )
    assert found.obstacles == ((sentence,) if stays else ())
    assert look([has(socket_file(3, 27))], [listens]).obstacles == ()


def test_files_that_are_written_go_with_them_unless_they_are_large() -> None:
    small, large = OpenFile(3, "/tmp/log", (8, 6)), OpenFile(4, "/data/all.bin", (8, 7))
    written = {"/tmp/log": 5, "/data/all.bin": MOST_WRITTEN + 1}
    found = look([has(small, large)], around=Surroundings({}, {}, elsewhere=True, written=written))
    assert found.written == ("/data/all.bin", "/tmp/log")
    (sentence,) = found.obstacles
    assert sentence == "Process 10 (python) has /data/all.bin open to write, 67.1 MB on a disk of this host."


def test_of_many_obstacles_three_are_shown() -> None:
    assert shown(["A.", "B."]) == "A. B."
    assert shown(["A.", "B.", "C.", "D.", "E."]) == "A. B. C. There are 2 more obstacles."


def test_which_files_are_written_is_seen(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, (tmp_path / "data").open("w") as data:
        log.write("text")
        log.flush()
        data.close()
        with (tmp_path / "data").open():
            assert looked_at.written_here(os.getpid())[log.name] == len("text")
            assert data.name not in looked_at.written_here(os.getpid())


def test_threads_are_seen_by_their_names() -> None:
    program = "open('/proc/self/comm', 'w').write('so called'); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while looked_at.tree(process.pid)[0].threads != {"so called"}:
            time.sleep(0.01)
        process.communicate(b"\n")


CHILD = """
import multiprocessing, os, socket, sys
a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname()); c = a.accept()[0]
pair = socket.socketpair()
memory = os.memfd_create("jitckpt-steps")
pidfd = os.pidfd_open(os.getppid())
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(flush=True)
sys.stdin.read()
os.wait()
"""


@pytest.fixture
def child() -> Iterator["tuple[subprocess.Popen[bytes], socket.socket]"]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    assert process.stdout is not None
    process.stdout.readline()
    yield process, ours
    process.communicate()
    ours.close()


def test_a_real_process_is_seen_as_it_is(child: "tuple[subprocess.Popen[bytes], socket.socket]") -> None:
    process, ours = child
    processes = looked_at.tree(process.pid)
    assert processes[0].pid == process.pid
    assert len(processes) == 2
    assert all(one.folder == os.getcwd() and one.memory > 1 << 20 for one in processes)
    around = Surroundings({os.fstat(ours.fileno()).st_ino: "agent"}, {}, elsewhere=True)
    found = carried(processes, looked_at.sockets(), around)
    (end,) = found.sockets
    assert (end.name, end.kind) == ("agent", socket.SOCK_SEQPACKET)
    assert found.memory == ("jitckpt-steps",)
    # Its pair and its TCP connection have both ends within.
    assert [one for one in found.obstacles if str(os.getpid()) not in one] == []
    assert len(found.obstacles) == 2  # both have the pidfd
    assert looked_at.sockets_of(process.pid) >= {end.inode}
    assert looked_at.sockets_of(2**22 - 1) == set()
