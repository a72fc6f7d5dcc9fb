"""A member of etcd on each rehearsed host, for jobs that meet there; it dies and comes with its host."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import Namespaces

ELECTION = ("--heartbeat-interval", "100", "--election-timeout", "1000")  # milliseconds, as etcd has it


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
        places = ",".join(f"{address}:2379" for address in self._addresses)
        return ["--coordination", f"etcd://{places}", "--rdzv-id", "rehearsal"]

    def start(self, host: int) -> None:
        """Start a host's member, if it does not run."""
        if host in self._running and self._running[host].poll() is None:
            return
        client, peer = (f"http://{self._addresses[host]}:{port}" for port in (2379, 2380))
        everyone = ",".join(
            f"m{number}=http://{address}:2380" for number, address in enumerate(self._addresses)
        )
        command = [*self._hosts.on(host), self._program, "--name", f"m{host}", *ELECTION]
        command += ["--data-dir", str(self._folder / f"etcd-{host}"), "--initial-cluster", everyone]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with open(self._folder / f"etcd-{host}.txt", "ab") as log:
            self._running[host] = subprocess.Popen(command, stdout=log, stderr=log)

    def end(self) -> None:
        """End all members."""
        for member in self._running.values():
            member.kill()
            member.wait()
