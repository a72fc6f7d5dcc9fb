"""Ranks on two hosts, each with a network of its own: network namespaces joined by a cable."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from conftest import PROGRAMS
from namespaces import Namespaces, ip, namespaces

PATIENCE = 150  # seconds

Ranks = list[subprocess.Popen[str]]
Start = Callable[[str], Ranks]


def start_ranks(hosts: Namespaces, program: str, environment: dict[str, str]) -> Ranks:
    """Starts one rank on each host."""
    return [
        subprocess.Popen(
            [*hosts.on(rank), sys.executable, str(PROGRAMS / program)],
            env=environment
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces() as two:
        yield two


@pytest.fixture
def start(hosts: Namespaces, softgpu_environment: dict[str, str]) -> Iterator[Start]:
    """Starts a program on both hosts, and ends what is left of it."""
    ranks: Ranks = []

    def start(program: str) -> Ranks:
        ranks.extend(start_ranks(hosts, program, softgpu_environment))
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


def test_a_cut_network_hangs_and_a_killed_process_is_an_error(hosts: Namespaces, start: Start) -> None:
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
