"""The agent's servers: started as they are asked for, with what came with the question, and ended in time."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from descriptors import held_descriptors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitckpt.agent.proxies import servers
from jitckpt.agent.proxies.servers import Servers
from jitckpt.events import EventLog

SHELL = "/bin/sh"
RANK = 3
LIMIT = 30.0


class Host:
    """An agent's servers, and a worker that asks for them."""

    def __init__(self, folder: Path, session: int) -> None:
        self.path = folder / "servers"
        self.folder = folder
        self.log = EventLog()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(str(self.path))
        listener.listen()
        self.listener = listener
        self.servers = Servers(listener, {RANK: session}, self.log)
        self.selector = selectors.DefaultSelector()
        self.servers.watch(self.selector)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(LIMIT)
        client.connect(str(self.path))
        self.listen()
        return client

    def listen(self) -> None:
        while ready := self.selector.select(0):
            for key, _ in ready:
                key.data()

    def listen_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "it never came"
            for key, _ in self.selector.select(0.1):
                key.data()

    def ask(self, client: socket.socket, question: bytes, files: tuple[int, ...] = ()) -> tuple[str, int]:
        """Return the answer, and the file that came with it; -1: none."""
        socket.send_fds(client, [question], files)
        self.listen()
        answer, given, _, _ = socket.recv_fds(client, servers.MAX_ANSWER, 2)
        assert len(given) <= 1
        return answer.decode(), given[0] if given else -1

    def start(self, client: socket.socket, script: str, **variables: str) -> tuple[str, int]:
        """Have a shell run a script that finds its files as a server does."""
        program = self.folder / "program"
        program.write_text(f"#!{SHELL}\n{script}\n")
        program.chmod(0o700)
        environment = os.memfd_create("environment")
        os.write(environment, b"".join(f"{name}={value}\0".encode() for name, value in variables.items()))
        with ExitStack() as files:
            files.callback(os.close, environment)
            opened = [
                files.enter_context((self.folder / name).open("a+"))
                for name in ("out", "error", "socket", "log", "pinned")
            ]
            numbers = (*(file.fileno() for file in opened), environment)
            return self.ask(client, b"start " + os.fsencode(program), numbers)

    def close(self) -> None:
        self.selector.close()
        self.servers.close()
        self.listener.close()

    def events(self) -> list[tuple[str, object, object]]:
        return [(e["event"], e.get("rank"), e.get("how")) for e in self.log.events]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, os.getsid(0))
    yield made
    made.close()


def pid_of(answer: str) -> int:
    word, number = answer.split()
    assert word == "started"
    return int(number)


def test_a_server_finds_its_files_and_its_environment_and_its_end_is_told(host: Host) -> None:
    client = host.connect()
    script = 'echo "$1 of $0 $NAME"; echo error >&2; for n in 3 4 5; do echo $n >&$n; done; ls -l /proc/$$/fd'
    answer, pidfd = host.start(client, script, NAME="value = with spaces", PATH=os.environ["PATH"])
    pid = pid_of(answer)
    host.listen_until(lambda: ("server_ended", RANK, "ended with status 0") in host.events())
    assert ("server_started", RANK, None) in host.events()
    first, *files = (host.folder / "out").read_text().splitlines()
    assert first == f"{os.getpid()} of {host.folder / 'program'} value = with spaces"
    for name, text in (("error", "error"), ("socket", "3"), ("log", "4"), ("pinned", "5")):
        assert (host.folder / name).read_text() == f"{text}\n"
    opened = {line.split()[-3]: line.split()[-1] for line in files if "->" in line}
    named = ["/dev/null", *(str(host.folder / name) for name in ("out", "error", "socket", "log", "pinned"))]
    script_itself = str(host.folder / "program")
    assert {number: name for number, name in opened.items() if name != script_itself} == {
        str(number): name for number, name in enumerate(named)
    }
    assert host.ask(client, b"end %d" % pid) == ("ended with status 0", -1)
    os.close(pidfd)


def test_the_file_that_is_given_stands_for_the_server_and_how_it_ended_can_be_asked_at_once(
    host: Host,
) -> None:
    client = host.connect()
    answer, pidfd = host.start(client, "exec sleep 1000")
    assert host.ask(client, f"end {pid_of(answer)}".encode()) == ("has not ended", -1)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    selector = selectors.DefaultSelector()
    selector.register(pidfd, selectors.EVENT_READ)
    assert selector.select(LIMIT)  # as the library waits; the agent may not have looked yet
    selector.close()
    assert host.ask(client, f"end {pid_of(answer)}".encode()) == ("was ended by Killed", -1)
    assert host.events().count(("server_ended", RANK, "was ended by Killed")) == 1
    os.close(pidfd)


def test_signals_are_as_a_new_program_expects_them_and_the_terminals_are_not_for_it(host: Host) -> None:
    client = host.connect()
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        answer, pidfd = host.start(client, "exec sleep 1000")
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    pid = pid_of(answer)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    of_ours = sum(1 << (one - 1) for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGINT))
    assert int(status["SigIgn"], 16) & of_ours == 0
    assert int(status["SigBlk"], 16) == 0
    assert os.getsid(pid) == pid
    os.close(pidfd)


def test_those_of_a_rank_whose_worker_has_ended_are_killed_and_no_others(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", ASKS, str(tmp_path)], start_new_session=True)
    host = Host(tmp_path, worker.pid)
    try:
        host.listen_until(lambda: ("server_started", RANK, None) in host.events())
        pid = host.log.events[-1]["pid"]
        host.servers.end(RANK + 1)
        host.listen()
        assert Path(f"/proc/{pid}").exists()
        worker.kill()
        worker.wait()
        host.servers.end(RANK)
        host.listen_until(lambda: ("server_ended", RANK, "was ended by Killed") in host.events())
        assert not Path(f"/proc/{pid}").exists()
    finally:
        worker.kill()
        worker.wait()
        host.close()


ASKS = """
import os, socket, sys, time
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
while client.connect_ex(sys.argv[1] + "/servers"):
    time.sleep(0.01)
null = os.open("/dev/null", os.O_RDWR)
files = [null] * 5 + [os.memfd_create("none")]
socket.send_fds(client, [b"start " + sys.argv[1].encode() + b"/program"], files)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{SHELL}\nexec sleep 1000\n")
    program.chmod(0o700)


def test_at_the_close_all_end_and_nothing_is_left(tmp_path: Path) -> None:
    files = held_descriptors()
    host = Host(tmp_path, os.getsid(0))
    client = host.connect()
    started = [host.start(client, "kill -STOP $$") for _ in range(3)]
    host.close()
    client.close()
    for answer, pidfd in started:
        assert not Path(f"/proc/{pid_of(answer)}").exists()
        os.close(pidfd)
    assert held_descriptors() <= files
    assert not any(event == "warning" for event, _, _ in host.events())


def test_servers_that_have_ended_cost_nothing_any_more(host: Host) -> None:
    client = host.connect()
    files = held_descriptors()
    for _ in range(5):
        _, pidfd = host.start(client, "exit 3")
        os.close(pidfd)
    host.listen_until(lambda: sum(event == "server_ended" for event, _, _ in host.events()) == 5)
    assert held_descriptors() <= files


def test_who_hangs_up_keeps_its_servers_until_they_end(host: Host) -> None:
    client = host.connect()
    answer, pidfd = host.start(client, "read line <&3; exec sleep 1000")
    client.close()
    host.listen()
    assert Path(f"/proc/{pid_of(answer)}").exists()
    os.close(pidfd)
    host.servers.end(RANK)
    host.listen_until(lambda: ("server_ended", RANK, "was ended by Killed") in host.events())


def test_strangers_are_sent_away(tmp_path: Path) -> None:
    host = Host(tmp_path, 1)  # the session of somebody else
    client = host.connect()
    assert client.recv(100) == b""
    client.close()
    host.close()


def test_who_sees_other_files_starts_its_own(host: Host) -> None:
    asks = [sys.executable, "-c", CONNECTS, str(host.path)]
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces")
    for command, answer in ((asks, b"listens"), (["unshare", "--mount", *asks], b"")):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            host.listen_until(lambda: process.poll() is not None)
            assert process.stdout is not None
            assert process.stdout.read() == answer


CONNECTS = """
import socket, sys
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
client.send(b"end 1")
print("listens" if client.recv(100) else "", end="")
"""


def test_once_all_have_come_nobody_else_is_listened_to(host: Host) -> None:
    known = host.connect()
    host.servers.listen_no_more()
    host.listener.close()
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(ConnectionRefusedError):
        client.connect(str(host.path))
    client.close()
    answer, pidfd = host.start(known, "exec sleep 1000")
    assert pid_of(answer)
    os.close(pidfd)


def test_what_can_not_be_started_is_said(host: Host) -> None:
    client = host.connect()
    null = os.open(os.devnull, os.O_RDWR)
    variables = os.memfd_create("environment")
    files = (null,) * 5 + (variables,)
    assert host.ask(client, b"start /nowhere", files) == ("No such file or directory", -1)
    assert host.ask(client, b"start " + os.fsencode(host.folder), files) == ("Permission denied", -1)
    assert host.ask(client, b"start /bin\0/sh", files) == ("embedded null byte", -1)
    for question, sent in (
        (b"start /bin/sh", files[1:]),
        (b"start /bin/sh", ()),
        (b"end 1", ()),
        (b"x", ()),
    ):
        assert host.ask(client, question, sent) == ("the agent does not understand what it is asked", -1)
    assert host.ask(client, b"start /" + b"x" * servers.MAX_BYTES, files)[1] == -1
    os.close(null)
    os.close(variables)
    assert host.events() == []


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    question=st.binary(min_size=1, max_size=60)
    | st.sampled_from([b"start", b"end", b"start ", b"end "]).flatmap(
        lambda word: st.binary(max_size=20).map(lambda rest: word + rest)
    ),
    files=st.integers(0, 8),
    variables=st.binary(max_size=60),
)
def test_whatever_is_asked_is_answered(host: Host, question: bytes, files: int, variables: bytes) -> None:
    client = host.connect()
    environment = os.memfd_create("environment")
    os.write(environment, variables)
    answer, given = host.ask(client, question, (environment,) * files)
    os.close(environment)
    if given >= 0:
        os.close(given)
    assert answer
    client.close()
    host.listen()
