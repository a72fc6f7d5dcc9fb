"""The facts that jitckpt.doctor.checks judges, asked of this machine."""

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jitckpt.bindings import cuda_driver
from jitckpt.device import LIBRARY_DIR, device_environment
from jitckpt.doctor.checks import Disk, SavedRank
from jitckpt.events import Event
from jitckpt.saves import folders, layout
from jitckpt.system import regular_file

FRAMEWORKS = (
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "deepspeed",
    "megatron-core",
    "torchtitan",
)  # that are protected
PROBE_BYTES = 64 << 20
PROBE_SYNCS = 5
PROCESS_SECONDS = 120


def ask_process(kind: str) -> tuple[Mapping[str, Any] | None, str]:
    """Start the small process; return what it found, or None and the end of what it said."""
    environment = os.environ | device_environment(kind, 1, LIBRARY_DIR, os.environ)
    with tempfile.TemporaryDirectory() as temporary:  # torch leaves a folder there
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "jitckpt.doctor.process"],
                env=environment | {"TMPDIR": temporary},
                capture_output=True,
                text=True,
                timeout=PROCESS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"a small process with the library did not end in {PROCESS_SECONDS} s"
    if done.returncode == 0:
        facts: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts, ""
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return None, f"a small process with the library ended with status {done.returncode}: {last}"


def device(kind: str) -> tuple[str, str, int]:
    """Return name, driver version and number of the devices."""
    if kind == "softgpu":
        return "softgpu", "softgpu", int(os.environ.get("SOFTGPU_DEVICES", "2"))
    name, version, count = cuda_driver.facts()
    module = Path("/sys/module/nvidia/version")
    installed = f"{module.read_text().strip()}, " if module.exists() else ""
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return name, f"{installed}{cuda}", count


def shared_memory_free() -> int:
    return shutil.disk_usage("/dev/shm").free


def limits() -> dict[str, int | None]:
    """Return soft limits, None where there is none."""
    found = {}
    for name in ("nofile", "memlock", "core", "fsize"):
        soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def interfaces() -> dict[str, str]:
    """Return the state of each network interface, as the kernel spells it."""
    folders = sorted(Path("/sys/class/net").iterdir())
    return {path.name: (path / "operstate").read_text().strip() for path in folders if path.is_dir()}


def store_address(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the host of the store and what its name resolves to."""
    host = environment.get("MASTER_ADDR") or socket.gethostname()
    try:
        return host, str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return host, None


def rendezvous(endpoint: str) -> tuple[bool, bool]:
    """Return whether HOST:PORT is this host, and whether somebody listens there. Raises ValueError."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from jitckpt.hosts.rendezvous import DEFAULT_PORT, answers, is_own_address

    host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    return is_own_address(host), answers(host, port)


def memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def frameworks() -> dict[str, str]:
    """Return the versions of the training frameworks that are installed; none is imported."""
    found = {}
    for name in FRAMEWORKS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def existing_parent(path: Path) -> Path:
    """Return the directory itself, or the nearest above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def disk(directory: Path) -> Disk:
    """Write, sync and link small files where checkpoints would go; nothing is left of them."""
    parent = existing_parent(directory.absolute())
    kind = _file_system(parent)
    try:
        free = shutil.disk_usage(parent).free
        with tempfile.TemporaryDirectory(prefix=".jitckpt-doctor-", dir=parent) as temporary:
            folder = Path(temporary)
            began = time.monotonic()
            _write(folder / "large", min(PROBE_BYTES, free // 4))
            speed = min(PROBE_BYTES, free // 4) / (time.monotonic() - began)
            began = time.monotonic()
            for number in range(PROBE_SYNCS):
                _write(folder / f"small-{number}", 4096)
            sync = (time.monotonic() - began) / PROBE_SYNCS
            try:
                os.link(folder / "small-0", folder / "link")
                links = True
            except OSError:
                links = False
    except OSError as error:
        return Disk(str(parent), kind, 0, f"{parent} can't be written: {error.strerror}")
    return Disk(str(parent), kind, free, "", links, speed, sync)


def _write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def _file_system(path: Path) -> str:
    """Return the type of the file system that `path` lies on."""
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(mounted) and len(mounted) > best:
            best, kind = len(mounted), after.split()[0]
    return kind


def saved_ranks(checkpoints: Path, events: Sequence[Event]) -> list[SavedRank]:
    """Return what the saves of a rehearsal say, for each rank that left one, its own state or both."""
    ended = {event["rank"]: event for event in events if event["event"] == "save_ended"}
    found = {}
    for record in folders.find(checkpoints):
        if record.metadata is None or (record.rank in found and record.kind == "rank"):
            continue
        files = layout.state_files(record.metadata.saver)
        local = layout.parse_object(regular_file.content_of(record.path / files.document), "state")["local"]
        sizes = {file.name: file.size for file in record.metadata.files}
        event = ended.get(record.rank)
        found[record.rank] = SavedRank(
            rank=record.rank,
            shard=record.metadata.identity.shard,
            bytes=event["bytes"] if event else None,
            seconds=event["seconds"] if event else None,
            local_bytes=sum(sizes.values()) if record.kind == "local" else 0,
            missing=tuple(local["missing"]),
            left_out=tuple(local["left_out"]),
        )
    return [found[rank] for rank in sorted(found)]
