"""What a job has left whose launcher has ended: whose it is, and who has its numbers by now."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.shelf import DamagedSnapshot, ProcessSnapshot, left, of_hosts, told_of
from jitckpt.bindings import criu
from jitckpt.decisions.transparent.whose import begin_of_largest_gap
from jitckpt.system import machine, process_tree
from jitckpt.system.versions import versions

MOST_BYTES = 16 << 20  # of a file that the command names: larger ones are data
HIGHEST = "/proc/sys/kernel/pid_max"


def whose(
    command: str,
    arguments: Sequence[object],
    ranks: int,
    devices: Sequence[str],
    place: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Return what a snapshot that this job goes on from has to be of (decisions/transparent/whose.py).

    place: this host's number, and of how many.
    """
    words = [command, *map(str, arguments)]
    return {
        "command": words,
        "folder": os.getcwd(),
        "files": {word: digest for word in words[1:] if (digest := _digest(Path(word)))},
        "ranks": ranks,
        "place": list(place),
        "devices": list(devices),
        "user": os.geteuid(),
        "versions": versions(),
        "kernel": machine.kernel(),
        "processor": machine.processor(),
    }


def where_to_count_from(directory: Path) -> int | None:
    """Return the number of a first process for namespaces in which a snapshot's numbers are free.

    None if they are free here: those of the lost job itself are about to end. directory: the job's, in which
    there may be a folder for each host.
    """
    every: list[int] = []
    is_taken = False
    for folder in (directory, *of_hosts(directory)):
        for snapshot in reversed(left(folder)):
            try:
                mark = str(told_of(snapshot)["mark"])
                numbers = _numbers(snapshot)
            except (DamagedSnapshot, KeyError, OSError):
                continue
            own = process_tree.of_job(mark, ())
            every += numbers
            is_taken |= any(looked_at.name_of(one) and _process_of(one) not in own for one in numbers)
            break
    return begin_of_largest_gap(every, int(Path(HIGHEST).read_text())) if is_taken else None


def _numbers(snapshot: ProcessSnapshot) -> list[int]:
    found = []
    for folder in snapshot.path.glob("rank-*"):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found += criu.numbers(file)
        finally:
            os.close(file)
    return found


def _process_of(number: int) -> int:
    """Return the process of a thread."""
    try:
        status = Path(f"/proc/{number}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return number
    told = re.search(r"^Tgid:\t(\d+)", status, re.MULTILINE)
    return int(told[1]) if told else number


def _digest(path: Path) -> str:
    """Return that of a file that a word of the command may name; "" if it is none, or data."""
    try:
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except (OSError, ValueError):  # too long for a name, say
        pass
    return ""
