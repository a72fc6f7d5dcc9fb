"""CRIU as it is found and asked; what needs it is left out where it is missing."""

import contextlib
import dataclasses
import fcntl
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine

from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError, Options
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.doctor import moved_process
from jitckpt.system import network_lock
from jitckpt.wire import environment

CONNECTED = (
    "import socket\na = socket.create_server(('127.0.0.1', 0))\n"
    "b = socket.create_connection(a.getsockname())\nc = a.accept()[0]; print(flush=True); c.recv(1)"
)
COUNTS = "import time\nfor i in range(3000): print(i, flush=True); time.sleep(0.01)"


@pytest.fixture(scope="module")
def found() -> Criu:
    return criu_of_this_machine()


@pytest.fixture
def folder() -> Iterator[int]:
    with nameless_folder() as one:
        yield one


def fake(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_the_reason_of_a_failure_is_the_logs_last_error() -> None:
    log = (
        "(00.000003) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Not permitted\n"
        "(00.040000) Error (criu/files-reg.c:2303): File out.txt has bad size 1612 (expect 1426)\n"
        "(00.041000)   6936: Error (criu/files.c:1240): Unable to open fd=1 id=0x2\n"
        "(00.060159) Error (criu/cr-restore.c:2331): Restoring FAILED.\n"
    )
    assert criu.last_error(log) == "Unable to open fd=1 id=0x2 (criu/files.c:1240)"
    assert criu.last_error(log.splitlines()[0]) == criu.last_error("") == ""


def test_a_criu_that_is_missing_old_or_silent_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CRIU.name, str(tmp_path / "none"))
    with pytest.raises(CriuError, match="none can't be run"):
        criu.find()
    monkeypatch.setenv(environment.CRIU.name, fake(tmp_path / "old", "echo Version: 3.17.1"))
    with pytest.raises(
        CriuError, match=r"is criu 3\.17\.1, and at least 4\.2 is needed: scripts/setup --criu"
    ):
        criu.find()
    monkeypatch.setenv(environment.CRIU.name, fake(tmp_path / "silent", "echo broken >&2"))
    with pytest.raises(CriuError, match="does not say which version it is: 'broken'"):
        criu.find()
    monkeypatch.delenv(environment.CRIU.name)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(CriuError, match="There is no criu on this machine"):
        criu.find()
    assert moved_process.try_it() == {
        "criu": None,
        "error": "There is no criu on this machine: scripts/setup --criu brings criu 4.2.1.",
    }


def test_a_criu_that_hangs_is_not_waited_for(tmp_path: Path, folder: int) -> None:
    hanging = Criu(Path(fake(tmp_path / "criu", "exec sleep 1000")), "4.2.1", None)
    with pytest.raises(CriuError, match=r"can't dump the process 1: it took longer than 0\.2 s"):
        criu.dump(hanging, 1, Options(folder, seconds=0.2))


@pytest.mark.parametrize("way", ["rpc", "command"])
def test_a_process_goes_on_where_it_was(found: Criu, folder: int, way: str) -> None:
    if way == "command":
        found = dataclasses.replace(found, messages=None)
    elif found.messages is None:
        pytest.skip("protobuf is not installed")
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTS],
        stdin=subprocess.DEVNULL,
        stdout=writes,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with open(reads, "rb") as said:
        assert said.readline() == b"0\n"
        criu.dump(found, process.pid, Options(folder, 10))
        assert process.wait() == -9
        assert criu.processes(folder) == [process.pid]
        key = f"pipe:[{os.fstat(writes).st_ino}]"
        assert criu.restore(found, Options(folder, 10, inherit=[(writes, key)])) == process.pid
        os.close(writes)
        numbers = [int(said.readline()) for _ in range(20)]
        os.kill(process.pid, 9)
        assert os.waitpid(process.pid, 0)[1] == 9
    assert numbers == list(range(1, 21))
    assert sorted(name for name in os.listdir(folder) if name.endswith(".log")) == ["dump.log", "restore.log"]


def test_what_a_process_has_said_is_seen_as_it_is_in_its_image(found: Criu, folder: int) -> None:
    """It runs on afterwards, and says more."""
    if not found.tells_when_stopped:
        pytest.skip("protobuf is not installed")
    ours, theirs = socket.socketpair()
    text = f"""
import itertools, os
for number in itertools.count():
    os.write({theirs.fileno()}, b"x")  # as long as there is room
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    seen = []

    def look() -> None:
        for _ in range(2):
            time.sleep(0.05)
            seen.append(int.from_bytes(fcntl.ioctl(ours, termios.FIONREAD, bytes(4)), sys.byteorder))

    with ours:
        ours.recv(1)
        inode = os.stat(f"/proc/{process.pid}/fd/{theirs_number(process.pid)}").st_ino
        options = Options(folder, 10, [f"unix[{inode}]"], leaves_running=True, while_stopped=look)
        criu.dump(found, process.pid, options)
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert process.poll() is None
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while ours.recv(1 << 20):
                pass
        ours.setblocking(True)
        assert ours.recv(1) == b"x"
        process.kill()
        process.wait()


def theirs_number(pid: int) -> str:
    """Return the number that a process's one socket has there."""
    names = os.listdir(f"/proc/{pid}/fd")
    return next(name for name in names if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"))


@pytest.mark.parametrize("mode", ["a", "a+", "r"])
def test_of_files_that_grow_meanwhile_only_those_that_are_appended_to_are_taken(
    found: Criu, folder: int, tmp_path: Path, mode: str
) -> None:
    """What keeps ranks from being moved (Mover.look) stands on this."""
    (log := tmp_path / "log").write_text("before\n")
    text = (
        f"file = open({str(log)!r}, {mode!r}); open({str(log)!r} + '-open', 'w'); import time; time.sleep(99)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (tmp_path / "log-open").exists():
        assert process.poll() is None
    criu.dump(found, process.pid, Options(folder, 10))
    process.wait()
    with log.open("a") as another:
        another.write("meanwhile\n")
    if mode != "a":
        with pytest.raises(CriuError):
            criu.restore(found, Options(folder, 10))
        log_of_criu = os.open("restore.log", os.O_RDONLY, dir_fd=folder)
        with open(log_of_criu) as said:
            assert f"{str(log)[1:]} has bad size 17 (expect 7)" in said.read()
        return
    assert criu.restore(found, Options(folder, 10)) == process.pid
    os.kill(process.pid, 9)
    assert os.waitpid(process.pid, 0)[1] == 9


def test_a_dump_that_fails_leaves_the_process_as_it_was(found: Criu, folder: int) -> None:
    # Its output is a socket whose other end, here, nobody has said to be left out.
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # of this session
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with pytest.raises(CriuError, match=rf"criu can't dump the process {process.pid}: .+ \(criu/.+\)\."):
            criu.dump(found, process.pid, Options(folder, 10))
        process.stdin.write(b"here\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"here\n"
    finally:
        process.stdin.close()
        process.wait()


@pytest.mark.parametrize("program", [CONNECTED, "print(flush=True); import time; time.sleep(99)"])
def test_connections_of_processes_that_are_never_restored_do_not_stay_locked(
    found: Criu, folder: int, program: str
) -> None:
    before = network_lock.tables()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    output = f"pipe:[{os.fstat(process.stdout.fileno()).st_ino}]"
    criu.dump(found, process.pid, Options(folder, 10, external=[output]))
    process.communicate()
    names = criu.locks(folder)
    made = network_lock.tables() - before
    assert len(made) == 1
    assert made <= names
    network_lock.unlock(names)
    network_lock.unlock(names)  # it is not there any more
    assert not names & network_lock.tables()


def test_doctor_dumps_and_restores_a_small_process(found: Criu) -> None:
    said = moved_process.try_it()
    assert said["criu"] == str(found)
    assert 0 < said["seconds"] < moved_process.SECONDS


@pytest.mark.parametrize("alone", [True, False])
def test_who_is_not_allowed_to_is_told_what_is_needed(found: Criu, alone: bool) -> None:
    """Not even a PID namespace; with three capabilities of a user's own it works."""
    if os.geteuid() != 0:
        pytest.skip("only root can have another user's rights")
    capabilities = "+checkpoint_restore,+setpcap,+net_admin"
    rights = ["--inh-caps", capabilities, "--ambient-caps", capabilities] if not alone else []
    python = "/usr/bin/python3"  # which any user can run
    text = (
        f"import sys; sys.path.insert(0, {str(Path(moved_process.__file__).parents[2])!r})\n"
        "from jitckpt.doctor import moved_process; print(moved_process.try_it())"
    )
    command = ["setpriv", "--reuid", "nobody", "--clear-groups", *rights, python, "-c", text]
    theirs = os.environ | {
        environment.CRIU.name: str(found.program)
    }  # beside an environment that is not theirs
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=theirs, cwd="/")
    if "No module named 'jitckpt'" in ended.stderr or "Permission denied" in ended.stderr:
        pytest.skip("another user can't read this installation")
    said = ended.stdout
    assert (criu.RIGHTS in said) is alone, said
    assert ("seconds" in said) is not alone, said


def test_a_nameless_folder_goes_with_its_descriptor() -> None:
    with nameless_folder() as folder:
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=folder))
        assert os.listdir(folder) == ["file"]
        assert "jitckpt" not in os.readlink(f"/proc/self/fd/{folder}") or os.geteuid() != 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.listdir(folder)
