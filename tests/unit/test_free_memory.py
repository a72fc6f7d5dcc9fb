"""How much memory a process may still take."""

from pathlib import Path

import pytest

from jitckpt.system.free_memory import free_memory

GROUPS = {
    "no group has a limit": ({"job.slice/memory.max": "max", "job.slice/memory.current": "5"}, 4000 << 10),
    "its own group": ({"job.slice/run/memory.max": "900", "job.slice/run/memory.current": "200"}, 700),
    "a group above it": (
        {
            "job.slice/run/memory.max": "900",
            "job.slice/run/memory.current": "200",
            "job.slice/memory.max": "1000",
            "job.slice/memory.current": "990",
        },
        10,
    ),
    "more is used than may be": ({"job.slice/run/memory.max": "9", "job.slice/run/memory.current": "12"}, 0),
}


def machine(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_left_in_control_groups_of_version_2(name: str, tmp_path: Path) -> None:
    files, free = GROUPS[name]
    root = machine(tmp_path, "0::/job.slice/run\n")
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert free_memory(root) == free


def test_what_is_left_in_control_groups_of_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n")
    group = root / "sys/fs/cgroup/memory/docker/1"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("5000\n")
    (group / "memory.usage_in_bytes").write_text("2000\n")
    assert free_memory(root) == 3000


def test_this_machine_has_some() -> None:
    assert free_memory() > 0
