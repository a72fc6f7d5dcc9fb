"""Ranks on two hosts, each with a network of its own: network namespaces joined by a cable."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from conftest import PROGRAMS

PATIENCE = 150  # seconds

Ranks = list[subprocess.Popen[str]]
Start = Callable[[str], Ranks]


def ip(arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs iproute2's `ip`."""
    return subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Hosts:
    """Two namespaces; on both the cable is called `cable`, and host 0 has the address 10.79.0.1."""

    names: tuple[str, str]

    def start(self, program: str, environment: dict[str, str]) -> Ranks:
        """Starts one rank on each host."""
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, str(PROGRAMS / program)],
                env=environment
                | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(self.names)
        ]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"softgpu-{os.getpid()}-0", f"softgpu-{os.getpid()}-1")
    try:
        for name in names:
            try:
                made = ip(f"netns add {name}")
            except FileNotFoundError:
                pytest.skip("the command ip (package iproute2) is not there")
            if made.returncode != 0:
                pytest.skip(f"this user may not make network namespaces: {made.stderr.strip()}")
        steps = [f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}"]
        for host, name in enumerate(names):
            steps += [
                f"-n {name} link set lo up",
                f"-n {name} address add 10.79.0.{host + 1}/24 dev cable",
                f"-n {name} link set cable up",
            ]
        for step in steps:
            done = ip(step)
            assert done.returncode == 0, f"ip {step}: {done.stderr}"
        for name in names:  # the kernel takes its time to see that it is plugged in
            while "state UP" not in ip(f"-n {name} link show cable").stdout:
                pass
        yield Hosts(names)
    finally:
        for name in names:
            ip(f"netns delete {name}")


@pytest.fixture
def start(hosts: Hosts, softgpu_environment: dict[str, str]) -> Iterator[Start]:
    """Starts a program on both hosts, and ends what is left of it."""
    ranks: Ranks = []

    def start(program: str) -> Ranks:
        ranks.extend(hosts.start(program, softgpu_environment))
        return ranks

    yield start
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_two_hosts_equal_one_process(start: Start) -> None:
    for rank in start("ranks.py"):
        output, errors = rank.communicate(timeout=PATIENCE)
        assert rank.returncode == 0, output + errors


def tell(ranks: Ranks, order: str) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(order + "\n")
        rank.stdin.flush()


def expect(ranks: Ranks, answer: str) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        assert line == answer + "\n", line + (rank.communicate()[1] if not line else "")


def test_a_cut_network_hangs_and_a_killed_process_is_an_error(hosts: Hosts, start: Start) -> None:
    ranks = start("two_hosts.py")
    expect(ranks, "sum 3")
    assert ip(f"-n {hosts.names[1]} link set cable down").returncode == 0
    tell(ranks, "sum")
    expect(ranks, "waits")
    assert ip(f"-n {hosts.names[1]} link set cable up").returncode == 0
    expect(ranks, "sum 3")
    ranks[1].kill()
    tell(ranks[:1], "sum")
    _, errors = ranks[0].communicate(timeout=PATIENCE)
    assert ranks[0].returncode != 0
    assert "remote process exited or there was a network error" in errors, errors
    assert "The connection from rank 1 has ended" in errors, errors
