"""How much memory this process may still take: of the machine's, and of what its control groups allow."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Return bytes. root: where /proc and /sys are."""
    return max(0, min([_available(root), *_left_in_groups(root)]))


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left in each control group (version 2, and 1's memory controller) above this process."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != base and base not in folder.parents:
                break
            with suppress(OSError, ValueError):  # no such file at the top; "max"
                yield int((folder / limit).read_text()) - int((folder / used).read_text())
