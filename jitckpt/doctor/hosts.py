"""Hosts of one job beside each other: what differs, where a rank or a process is to go on elsewhere."""

import json
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitckpt.doctor.checks import Row, State
from jitckpt.system import machine, regular_file
from jitckpt.system.versions import versions

SHOWN = 6


@dataclass(frozen=True)
class HostFacts:
    """What a host has of what all have to have alike.

    processor: what it can do. software: versions by names. python: the program's path. criu: which there is;
    "" if it can't dump and restore here. devices: their kind and driver.
    """

    name: str
    kernel: str
    processor: tuple[str, ...]
    software: Mapping[str, str]
    python: str
    criu: str
    devices: str


def this_host(trial: Mapping[str, Any], devices: str) -> HostFacts:
    """Return what this one has. trial: as of moved_process.try_it."""
    criu = "" if "error" in trial else str(trial["criu"])
    can = tuple(machine.processor())
    return HostFacts(socket.gethostname(), machine.kernel(), can, versions(), sys.executable, criu, devices)


def said_in(path: Path) -> HostFacts:
    """Return the host whose `jitckpt doctor --json` has printed this file. Raises ValueError if none has."""
    try:
        said = json.loads(regular_file.text_of(path))["host"]
        host = HostFacts(**said | {"processor": tuple(said["processor"])})
        texts = [host.name, host.kernel, *host.processor, host.python, host.criu, host.devices]
        if not all(isinstance(one, str) for one in [*texts, *host.software, *host.software.values()]):
            raise TypeError("something in it is no text")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what `jitckpt doctor --json` prints of a host: {type(error).__name__}: {error}"
        ) from error
    return host


def check_hosts(hosts: Sequence[HostFacts]) -> list[Row]:
    """Judge what differs; the first is this host."""
    rows = [*_differing(hosts)]
    if any(row.state == "problem" for row in rows):
        return rows
    names = ", ".join(host.name for host in hosts[:SHOWN]) + (" ..." if hosts[SHOWN:] else "")
    alike = "otherwise alike" if rows else "alike: kernel, processor, versions, paths, CRIU and devices"
    return [Row("hosts", "ok", f"{len(hosts)} ({names}) are {alike}"), *rows]


def _differing(hosts: Sequence[HostFacts]) -> Iterator[Row]:
    for name in sorted({name for host in hosts for name in host.software} - {"hash"}):
        found = [host.software.get(name, "none") for host in hosts]
        yield from _unlike(f"hosts: {name}", "problem", hosts, found, "install the same version on all hosts")
    if len({tuple(sorted(host.software.items())) for host in hosts}) > 1:
        built = [host.software.get("hash", "") for host in hosts]
        advice = "install the same build of jitckpt on all hosts"
        yield from _unlike("hosts: jitckpt's libraries", "problem", hosts, built, advice)
    advice = "a worker's process finds its files elsewhere: it can't be moved between these hosts"
    yield from _unlike("hosts: python", "warning", hosts, [host.python for host in hosts], advice)
    advice = "ranks of one job want devices and drivers alike"
    yield from _unlike("hosts: devices", "warning", hosts, [host.devices for host in hosts], advice)
    advice = "a move between these may be refused by CRIU: rehearse it"
    yield from _unlike("hosts: kernel", "warning", hosts, [host.kernel for host in hosts], advice)
    found = [host.criu or "none that works" for host in hosts]
    advice = "a worker's process can be moved between hosts with the same CRIU alone"
    yield from _unlike("hosts: CRIU", "warning", hosts, found, advice)
    yield from _processors(hosts)


def _unlike(
    check: str, state: State, hosts: Sequence[HostFacts], found: Sequence[str], advice: str
) -> Iterator[Row]:
    """Yield a row if they have not found the same."""
    by_value: dict[str, list[str]] = {}
    for host, value in zip(hosts, found, strict=True):
        by_value.setdefault(value, []).append(host.name)
    if len(by_value) > 1:
        text = "; ".join(f"{value} on {_some(names)}" for value, names in by_value.items())
        yield Row(check, state, text, advice)


def _processors(hosts: Sequence[HostFacts]) -> Iterator[Row]:
    """Yield a row of each kind of processor that lacks what others have."""
    every = {one for host in hosts for one in host.processor}
    lacking: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        if without := every.difference(host.processor):
            lacking.setdefault(tuple(sorted(without)), []).append(host.name)
    for lacks, names in lacking.items():
        found = f"{_some(names)}: no {_some(lacks)}, which others have"
        advice = "a process of the others can't go on there: take standby hosts with equal processors"
        yield Row("hosts: processor", "warning", found, advice)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
