"""Debian's etcd for tests: clusters of one member or three, each a process; skipped where there is none."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60.0
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode())
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""
WITHOUT = "there is no etcd: apt-get install etcd-server"


@dataclass
class Cluster:
    """Its members' places, and their processes in the same order."""

    places: list[tuple[str, int]]
    members: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    on: Sequence[Sequence[str]] = ()

    @property
    def url(self) -> str:
        """What --coordination takes."""
        return "etcd://" + ",".join(f"{host}:{port}" for host, port in self.places)

    def ask(self, member: int, call: str, body: dict[str, Any]) -> Any:
        """Ask one member, without the client that is tested."""
        host, port = self.places[member]
        place = f"http://{host}:{port}/v3/{call}"
        if self.on:
            command = [*self.on[member], sys.executable, "-c", ASK, place, json.dumps(body)]
            asked = subprocess.run(command, capture_output=True, check=False)
            if asked.returncode != 0:
                raise OSError(asked.stderr.decode())
            return json.loads(asked.stdout)
        request = urllib.request.Request(place, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def leader(self) -> int:
        """Return which member leads."""
        for number in range(len(self.places)):
            with suppress(OSError):
                status = self.ask(number, "maintenance/status", {})
                if status.get("leader") == status["header"]["member_id"]:
                    return number
        raise AssertionError("nobody leads")

    def wait(self, members: Sequence[int] | None = None) -> None:
        """Wait until these members serve."""
        end = time.monotonic() + LIMIT
        for number in range(len(self.places)) if members is None else members:
            while True:
                with suppress(OSError):
                    self.ask(number, "kv/range", {"key": "AA=="})
                    break
                assert time.monotonic() < end, "etcd does not come up"
                time.sleep(0.05)

    def kill(self, member: int) -> None:
        """Kill a member."""
        self.members[member].kill()
        self.members[member].wait()

    def stop(self, member: int) -> None:
        """Stop a member, with SIGSTOP, until it is continued; when this returns none of its threads runs."""
        pid = self.members[member].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)

    def start(self, member: int) -> None:
        """Start a member, again if it was killed."""
        process = subprocess.Popen(
            self.commands[member], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if member < len(self.members):
            self.members[member] = process
        else:
            self.members.append(process)


@contextmanager
def kept_ports(address: str, count: int) -> Iterator[list[int]]:
    """Ports that nobody else is given meanwhile: only who names one can listen there, and again."""
    with ExitStack() as kept:
        sockets = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server sets it
            one.bind((address, 0))
        yield [one.getsockname()[1] for one in sockets]


def free_ports(address: str, count: int) -> list[int]:
    """Return ports that nobody has there, nor is given who asks for any: they stay free until their use."""
    lowest, highest = map(int, GIVEN.read_text().split())
    candidates = [port for port in range(1024, 1 << 16) if not lowest <= port <= highest]
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            with suppress(OSError):  # somebody has it
                sockets.append(socket.create_server((address, secrets.choice(candidates))))
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()


@contextmanager
def etcd(
    folder: Path,
    count: int = 1,
    *options: str,
    addresses: Sequence[str] = (),
    on: Sequence[Sequence[str]] = (),
) -> Iterator[Cluster]:
    """Run a cluster. on: what comes before each member's command, such as that it runs in a namespace."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip(WITHOUT)
    tls = "--cert-file" in options
    addresses = list(addresses) or ["127.0.0.1"] * count
    kept = ExitStack()
    ports = [2379, 2380] * count if on else kept.enter_context(kept_ports("127.0.0.1", 2 * count))
    clients, peers = ports[::2], ports[1::2]
    everyone = ",".join(f"m{n}=http://{addresses[n]}:{peers[n]}" for n in range(count))
    cluster = Cluster([(addresses[n], clients[n]) for n in range(count)], on=on)
    for n in range(count):
        client, peer = (
            f"http{'s' if tls else ''}://{addresses[n]}:{clients[n]}",
            f"http://{addresses[n]}:{peers[n]}",
        )
        command = [*(on[n] if on else ()), program, "--name", f"m{n}", "--data-dir", str(folder / f"m{n}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", everyone, "--unsafe-no-fsync", *options]
        cluster.commands.append(command)
    try:
        for n in range(count):
            cluster.start(n)
        if not tls:
            cluster.wait()
        yield cluster
    finally:
        for member in cluster.members:
            with suppress(ProcessLookupError):
                member.send_signal(signal.SIGCONT)
            member.kill()
            member.wait()
        kept.close()
