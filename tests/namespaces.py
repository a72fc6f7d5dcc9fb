"""Two hosts, each with a network of its own: network namespaces joined by a cable."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


def ip(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run iproute2's `ip`."""
    return subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Namespaces:
    """On both hosts the cable is called `cable`; host 0 has the address 10.79.0.1, host 1 has 10.79.0.2."""

    names: tuple[str, str]

    def on(self, host: int) -> list[str]:
        """Return what comes before a command that is to run there."""
        return ["ip", "netns", "exec", self.names[host]]


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    names = (f"jitckpt-{os.getpid()}-0", f"jitckpt-{os.getpid()}-1")
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
        yield Namespaces(names)
    finally:
        for name in names:
            ip(f"netns delete {name}")
