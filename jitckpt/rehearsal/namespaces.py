"""Hosts that have a network of their own each, on one machine: network namespaces joined by cables."""

import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jitckpt.errors import HostsError

LISTENS = "0A"  # the state of a socket in /proc/net/tcp
EVERYTHING = ("",)
CUT = "jitckpt_cut"  # nftables' name for what a host does not let through
PLUGGED_IN_SECONDS = 30.0
QUEUE_SECONDS = 0.2  # longer than that nothing waits for a slowed cable: it is lost, and sent again
# A host of its own, but for its files: it has none of the others' processes, and none of their shared memory.
# That of System V is of an IPC namespace, and that with names is a file system of its own.
APART = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc"),
    *("sh", "-c", 'mount -t tmpfs jitckpt /dev/shm && exec "$@"', "sh"),
)


def ip(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run iproute2's `ip`."""
    return _run("ip", arguments)


def _run(program: str, arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments.split()], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Namespaces:
    """On all hosts the cable is called `cable`; host 0 has the address 10.79.0.1, host 1 has 10.79.0.2 ..."""

    names: tuple[str, ...]

    def on(self, host: int) -> list[str]:
        """Return what comes before a command that is to run there."""
        return ["ip", "netns", "exec", self.names[host]]

    def in_network_of(self, host: int) -> list[str]:
        """Return the same, but with the mounts of this process, where CRIU looks for files."""
        return ["nsenter", f"--net=/run/netns/{self.names[host]}"]

    def processes(self, host: int) -> list[int]:
        """Return the processes that run there."""
        return [int(pid) for pid in ip(f"netns pids {self.names[host]}").stdout.split()]

    def listening(self, host: int) -> list[str]:
        """Return the local addresses, as in /proc/net/tcp, of the sockets that listen there."""
        lines = ip(f"netns exec {self.names[host]} cat /proc/net/tcp /proc/net/tcp6").stdout.splitlines()
        sockets = [line.split() for line in lines if ":" in line.split()[0]]
        return [fields[1] for fields in sockets if fields[3] == LISTENS]

    def left_behind(self) -> list[str]:
        """Return the names of those that are there still."""
        return [name for name in self.names if Path("/run/netns", name).exists()]

    @contextmanager
    def cable_cut(self) -> Iterator[None]:
        """Cut the cable, so that nobody hears of the end of a connection, and mend it in the end."""
        _do(f"-n {self.names[0]} link set cable down")
        try:
            yield
        finally:
            _do(f"-n {self.names[0]} link set cable up")

    @contextmanager
    def cut_off(self, host: int, incoming: Sequence[str], outgoing: Sequence[str]) -> Iterator[None]:
        """Let nothing come to a host, or go from it, without a word to anybody, and mend it in the end.

        incoming, outgoing: what is dropped, as nftables says it; EVERYTHING: all; none: nothing.
        Raises HostsError where that can't be done.
        """
        chains = [
            f"chain {hook} {{ type filter hook {hook} priority 0; "
            + "".join(f"{side} cable {what} drop; " for what in dropped)
            + "}\n"
            for hook, side, dropped in (("input", "iifname", incoming), ("output", "oifname", outgoing))
        ]
        self._filter(host, f"add table inet {CUT} {{ {''.join(chains)} }}")
        try:
            yield
        finally:
            self._filter(host, f"delete table inet {CUT}")

    def _filter(self, host: int, rules: str) -> None:
        try:
            done = subprocess.run(
                [*self.on(host), "nft", "-f", "-"], input=rules, capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise HostsError("The command ip is not there: install the package iproute2.") from error
        if done.returncode != 0:
            raise HostsError(
                f"A network can't be cut: 'nft {rules}' says: {done.stderr.strip()}. It takes root, and the "
                "package nftables."
            )

    @contextmanager
    def slowed(self, host: int, bits_per_second: int) -> Iterator[None]:
        """Let what a host sends go no faster than that."""
        with _limited(self.names[host], "cable", bits_per_second):
            yield

    @contextmanager
    def slow_to_reach(self, host: int, bits_per_second: int) -> Iterator[None]:
        """Let what is sent to a host, not the second one of three or more, come no faster than that."""
        with _limited(self.names[1], f"port{host}", bits_per_second):
            yield


@contextmanager
def _limited(name: str, device: str, bits_per_second: int) -> Iterator[None]:
    place = f"-n {name} qdisc"
    limit = f"rate {bits_per_second}bit burst 64kb latency {QUEUE_SECONDS:g}s"
    _do(f"{place} add dev {device} root tbf {limit}", program="tc")
    try:
        yield
    finally:
        _do(f"{place} delete dev {device} root", program="tc")


@contextmanager
def namespaces(count: int = 2) -> Iterator[Namespaces]:
    """Make so many hosts, at least 2; of more, host 1 is also the switch between the others.

    Raises HostsError where they can't be made.
    """
    names = tuple(f"jitckpt-{uuid.uuid4().hex[:8]}-{host}" for host in range(count))
    try:
        for step in [*(f"netns add {name}" for name in names), *_steps(names)]:
            _do(step)
        deadline = time.monotonic() + PLUGGED_IN_SECONDS
        for name in names:  # the kernel takes its time to see that it is plugged in
            while "state UP" not in ip(f"-n {name} link show cable").stdout:
                if time.monotonic() > deadline:
                    raise HostsError(f"The cable of {name} has not come up in {PLUGGED_IN_SECONDS:g} s.")
        yield Namespaces(names)
    finally:
        for name in names:
            ip(f"netns delete {name}")


def _do(step: str, program: str = "ip") -> None:
    try:
        done = _run(program, step)
    except FileNotFoundError as error:
        raise HostsError(f"The command {program} is not there: install the package iproute2.") from error
    if done.returncode != 0:
        raise HostsError(
            f"This user may not make network namespaces, or change them: '{program} {step}' says: "
            f"{done.stderr.strip()}. Root may."
        )


def _steps(names: Sequence[str]) -> list[str]:
    first, second, *others = names
    if others:
        steps = [f"-n {second} link add cable type bridge"]
        for number, name in ((0, first), *enumerate(others, 2)):
            steps += [
                f"link add cable netns {name} type veth peer name port{number} netns {second}",
                f"-n {second} link set port{number} master cable up",
            ]
    else:
        steps = [f"link add cable netns {first} type veth peer name cable netns {second}"]
    for host, name in enumerate(names):
        steps += [
            f"-n {name} link set lo up",
            f"-n {name} address add 10.79.0.{host + 1}/24 dev cable",
            f"-n {name} link set cable up",
        ]
    return steps
