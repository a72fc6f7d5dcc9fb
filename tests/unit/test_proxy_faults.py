"""Rehearsed failures of a device's server: each reaches the server, with the words that softgpu knows."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jitckpt.faults.injection import FaultError, parse_fault, to_environment
from jitckpt.ring import local_state
from jitckpt.system import descriptors
from jitckpt.wire import protocol
from jitckpt.worker.in_place import proxy_faults
from jitckpt.worker.in_place.proxy_faults import Server


@pytest.fixture
def ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a server with the number 7 is told; it refuses what is meant for an allocation."""
    monkeypatch.setattr(proxy_faults, "_control_of", lambda server: tmp_path / str(server))
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: lines.append("synchronized"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("7")
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, client.makefile("rw") as stream:
                    lines.append(stream.readline().strip())
                    stream.write("error: no memory here.\n" if "oom" in lines[-1] else "ok: armed.\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield lines
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_says_itself_where_it_is_told(tmp_path: Path) -> None:
    """Its environment is not this process's: that may have begun on another host."""
    variables = {"SOFTGPU_CONTROL": str(tmp_path)}
    with subprocess.Popen(["cat"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        other.stdout.readline()  # before its program runs a process has no environment for a moment
        assert proxy_faults._control_of(other.pid) == tmp_path / str(other.pid)


def server(number: int) -> Server:
    return Server(SimpleNamespace(jitckpt_proxy_server=lambda: number))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kind=sticky phase=optimizer call=3", "kind=sticky call=3"),
        ("kind=collective-error phase=allreduce", "kind=collective-error call=1"),
        ("kind=driver-suspect phase=backward", "kind=collective-error result=system"),
        ("kind=driver-suspect phase=allreduce call=2", "kind=collective-error call=2 result=system"),
    ],
)
def test_the_servers_device_is_told(ordered: list[str], fault: str, told: str) -> None:
    server(7).befall(parse_fault(f"rank=1 step=2 {fault}"))
    assert ordered == ["synchronized", told]


def test_a_server_that_takes_anothers_place_is_told(ordered: list[str]) -> None:
    """The first one is gone for another rank's failure; a recovery puts the next in its place."""
    servers = iter([6, 6, 7, 7])
    process = SimpleNamespace(jitckpt_proxy_server=lambda: next(servers))
    Server(process).befall(parse_fault("rank=1 step=2 phase=optimizer kind=ecc call=3"))
    assert ordered == ["synchronized"] * 3 + ["kind=ecc call=3"]


def test_a_server_that_can_not_be_reached_is_named(ordered: list[str]) -> None:
    with pytest.raises(FaultError, match=r"Process 6 can't be reached at .*: No such file or directory"):
        server(6).befall(parse_fault("rank=1 step=2 phase=optimizer kind=ecc call=3"))


def test_a_server_that_is_dead_already_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        server(process.pid).befall(parse_fault("rank=1 step=2 phase=forward kind=proxy-kill"))


def test_what_the_server_refuses_is_told(ordered: list[str]) -> None:
    with pytest.raises(FaultError, match="no memory here"):
        server(7).befall(parse_fault("rank=1 step=2 phase=forward kind=oom call=1"))
    with pytest.raises(FaultError, match="this process has no device yet"):
        server(0).befall(parse_fault("rank=1 step=2 phase=forward kind=proxy-kill"))


def test_a_server_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        server(process.pid).befall(parse_fault("rank=1 step=2 phase=forward kind=proxy-kill"))
        assert process.wait() == -signal.SIGKILL


def test_a_script_that_knows_nothing_of_it_is_hit_in_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    numbers = {descriptors.AGENT: theirs.fileno(), descriptors.STATE: local_state.create()}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv(descriptors.PROOF, descriptors.proof(1, numbers))
    monkeypatch.setenv("RANK", "1")
    at, happened = "", list[str]()
    monkeypatch.setattr(Server, "befall", lambda self, spec: happened.append(f"{at} {spec.phase}"))
    texts = [f"rank=1 step=2 phase={phase} kind=proxy-kill" for phase in ("backward", "optimizer", "between")]
    monkeypatch.setenv("JITCKPT_FAULTS", f'["{texts[0]}", "{texts[1]}", "{texts[2]}", "rank=0 step=1"]')
    hooks = proxy_faults.begin(None)
    assert hooks is not None
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for step in (1, 2, 3):
        at = f"{step} forward"
        loss = model(torch.ones(2)).sum()
        at = f"{step} backward"
        loss.backward()
        at = f"{step} step"
        optimizer.step()
    hooks.detach()
    assert happened == ["2 backward backward", "2 step optimizer", "2 step between"]
    said = [protocol.decode(agent.recv(protocol.MAX_BYTES)) for _ in range(3)]
    assert [one.fault for one in said if isinstance(one, protocol.Fault)] == [
        str(parse_fault(text)) for text in texts
    ]
    agent.close()
    theirs.close()
    os.close(numbers[descriptors.STATE])
    monkeypatch.delenv("JITCKPT_FAULTS")
    assert proxy_faults.begin(None) is None


def test_whoever_knows_the_jobs_steps_takes_a_ranks_faults_over(
    ordered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_faults, "_begun", None)
    monkeypatch.setenv("RANK", "1")
    fault = parse_fault("rank=1 step=1 phase=forward kind=kill")
    monkeypatch.setenv("JITCKPT_FAULTS", to_environment([fault]))
    assert proxy_faults.begin(SimpleNamespace(jitckpt_proxy_server=lambda: 7)) is not None
    befall = proxy_faults.taken_over()
    assert befall is not None
    assert proxy_faults.taken_over() is None
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()  # which would have ended this process
    befall(parse_fault("rank=1 step=1 phase=forward kind=sticky"))
    assert ordered[-1] == "kind=sticky"
