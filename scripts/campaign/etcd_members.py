"""A member of etcd on each rehearsed host, for jobs that meet there; it dies and comes with its host."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import Namespaces

ELECTION = ("--heartbeat-interval", "100", "--election-timeout", "1000")  # milliseconds, as etcd has it
CLIENT_PORT, PEER_PORT = 2379, 2380
# What nftables calls a member's own traffic with other hosts: agents ask it, and the members each other.
TO_MEMBER = f"tcp dport {{ {CLIENT_PORT}, {PEER_PORT} }}", f"tcp sport {PEER_PORT}"
FROM_MEMBER = f"tcp sport {{ {CLIENT_PORT}, {PEER_PORT} }}", f"tcp dport {PEER_PORT}"
ASK_STATUS = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/v3/maintenance/status", b"{}")
print(urllib.request.urlopen(request, timeout=2).read().decode())
"""


class EtcdMembers:
    """Of as many hosts as there are; what a member has on its disk stays when its host dies."""

    def __init__(self, hosts: Namespaces, folder: Path) -> None:
        """Raises HostsError where there is no etcd."""
        program = shutil.which("etcd")
        if program is None:
            raise HostsError("There is no etcd: install the package etcd-server.")
        self._program, self._hosts, self._folder = program, hosts, folder
        self._addresses = [f"10.79.0.{host + 1}" for host in range(len(hosts.names))]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def options(self) -> Sequence[str]:
        """Of `jitckpt run`, for a job that meets here."""
        places = ",".join(f"{address}:{CLIENT_PORT}" for address in self._addresses)
        return ["--coordination", f"etcd://{places}", "--rdzv-id", "rehearsal"]

    def start(self, host: int) -> None:
        """Start a host's member, if it does not run."""
        if host in self._running and self._running[host].poll() is None:
            return
        client, peer = (f"http://{self._addresses[host]}:{port}" for port in (CLIENT_PORT, PEER_PORT))
        everyone = ",".join(
            f"m{number}=http://{address}:{PEER_PORT}" for number, address in enumerate(self._addresses)
        )
        command = [*self._hosts.on(host), self._program, "--name", f"m{host}", *ELECTION]
        command += ["--data-dir", str(self._folder / f"etcd-{host}"), "--initial-cluster", everyone]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with open(self._folder / f"etcd-{host}.txt", "ab") as log:
            self._running[host] = subprocess.Popen(command, stdout=log, stderr=log)

    def leader(self) -> int | None:
        """Return on which host the member is that leads, None if nobody knows."""
        for host, member in self._running.items():
            if member.poll() is None and self._leads(host):
                return host
        return None

    def _leads(self, host: int) -> bool:
        ask = [sys.executable, "-c", ASK_STATUS, f"http://{self._addresses[host]}:{CLIENT_PORT}"]
        asked = subprocess.run([*self._hosts.on(host), *ask], capture_output=True, check=False)
        if asked.returncode != 0:  # it is cut off, or just begins
            return False
        status = json.loads(asked.stdout)
        return bool(status.get("leader", "") == status["header"]["member_id"])

    def kill(self, host: int) -> None:
        """Kill a host's member; `start` starts it again, with what it has on its disk."""
        self._running[host].kill()
        self._running[host].wait()

    def pid(self, host: int) -> int:
        """Return the process of a host's member."""
        return self._running[host].pid

    def signal(self, host: int, number: int) -> None:
        """Send a signal to a host's member, such as SIGSTOP."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(host), number)

    def end(self) -> None:
        """End all members."""
        for member in self._running.values():
            member.kill()
            member.wait()
