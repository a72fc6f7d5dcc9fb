"""Hosts that have a network of their own each, for tests, which are skipped where there can be none."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import Namespaces, ip
from jitckpt.rehearsal.namespaces import namespaces as make

__all__ = ["Namespaces", "ip", "kill", "namespaces"]


@contextmanager
def namespaces(count: int = 2) -> Iterator[Namespaces]:
    """Make so many hosts, at least 2."""
    if ip("netns list").returncode != 0:
        pytest.skip("the command ip (package iproute2) can't be used")
    made = make(count)
    try:
        found = made.__enter__()
    except HostsError as error:
        pytest.skip(str(error))
    try:
        yield found
    finally:
        made.__exit__(None, None, None)


def kill(hosts: Namespaces, *lost: int) -> None:
    """Kill all processes of these hosts, as if at once; when this returns none of them is there."""
    # Whoever is killed before its agent (guardian, keeper) may be replaced by it at once.
    while pids := [pid for host in lost for pid in hosts.processes(host)]:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
