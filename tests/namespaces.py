"""Hosts that have a network of their own each: network namespaces joined by cables."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


def ip(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run iproute2's `ip`."""
    return subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Namespaces:
    """On all hosts the cable is called `cable`; host 0 has the address 10.79.0.1, host 1 has 10.79.0.2 ..."""

    names: tuple[str, ...]

    def on(self, host: int) -> list[str]:
        """Return what comes before a command that is to run there."""
        return ["ip", "netns", "exec", self.names[host]]

    @contextmanager
    def cable_cut(self) -> Iterator[None]:
        """Cut the cable, so that nobody hears of the end of a connection, and mend it in the end."""
        _switch(self.names[0], "down")
        try:
            yield
        finally:
            _switch(self.names[0], "up")


def _switch(name: str, state: str) -> None:
    done = ip(f"-n {name} link set cable {state}")
    assert done.returncode == 0, done.stderr


@contextmanager
def namespaces(count: int = 2) -> Iterator[Namespaces]:
    """Make so many hosts, 2 or 3; of three, host 1 is also the switch between the others."""
    names = tuple(f"jitckpt-{os.getpid()}-{host}" for host in range(count))
    try:
        for name in names:
            try:
                made = ip(f"netns add {name}")
            except FileNotFoundError:
                pytest.skip("the command ip (package iproute2) is not there")
            if made.returncode != 0:
                pytest.skip(f"this user may not make network namespaces: {made.stderr.strip()}")
        for step in _steps(names):
            done = ip(step)
            assert done.returncode == 0, f"ip {step}: {done.stderr}"
        for name in names:  # the kernel takes its time to see that it is plugged in
            while "state UP" not in ip(f"-n {name} link show cable").stdout:
                pass
        yield Namespaces(names)
    finally:
        for name in names:
            ip(f"netns delete {name}")


def _steps(names: Sequence[str]) -> list[str]:
    first, second, *others = names
    if others:
        (third,) = others
        steps = [f"-n {second} link add cable type bridge"]
        for number, name in ((0, first), (2, third)):
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
