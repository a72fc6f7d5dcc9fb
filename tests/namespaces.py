"""Hosts that have a network of their own each, for tests, which are skipped where there can be none."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import Namespaces, ip
from jitckpt.rehearsal.namespaces import namespaces as make

__all__ = ["Namespaces", "ip", "namespaces"]


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
