"""What would hurt a long run, as rows of a table. Each check judges plain facts, and asks no machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jitckpt.console import show_size
from jitckpt.events import Event

State = Literal["ok", "warning", "problem"]
GIB = 1 << 30
LEAST_TORCH = (2, 11)
LEAST_SHARED_MEMORY, LITTLE_SHARED_MEMORY = 64 << 20, GIB
LEAST_FILES, FEW_FILES = 1024, 8192
LITTLE_LOCKED_MEMORY = 64 << 20
SLOW_DISK = 50e6  # bytes a second
SLOW_SYNC = 0.1  # seconds
LITTLE_MEMORY = 2 * GIB
SAVES_ON_DISK = 2  # steps: the newest whole one stays until the next is whole
NOT_PERMANENT = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class Row:
    """One line of the table. advice: what to do, empty if nothing."""

    check: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Disk:
    """The file system of the checkpoint directory.

    free: bytes. problem: why it can't be used. write_speed: bytes a second of a large file, its sync
    included. sync_seconds: to write a small file and sync it.
    """

    path: str
    kind: str
    free: int
    problem: str = ""
    links: bool = True
    write_speed: float = 0.0
    sync_seconds: float = 0.0


def check_device(kind: str, name: str, driver: str, devices: int, ranks: int) -> Row:
    found = f"{devices} x {name}, driver {driver}" if kind == "cuda" else f"softgpu, {devices} devices"
    if kind == "softgpu":
        advice = "for rehearsals only: give --device cuda on the machine that trains"
        return Row("device", "warning", found, advice)
    if devices < ranks:
        advice = f"start at most {devices} ranks on this machine; NCCL refuses two on one GPU"
        return Row("device", "problem", found, advice)
    return Row("device", "ok", found)


def check_process(facts: Mapping[str, Any] | None, error: str) -> list[Row]:
    """Judge what a small process with the libraries preloaded said of itself; `error` if it said nothing."""
    if facts is None:
        advice = "the last lines of its output are shown; install jitckpt again (`pip install .`)"
        return [Row("library", "problem", error, advice)]
    version = tuple(int(part) for part in re.findall(r"\d+", facts["torch"])[:2])
    cuda = facts["cuda"] or "none"
    torch = f"{facts['torch']}, CUDA {cuda}, NCCL {facts['nccl']}"
    rows = [Row("torch", "ok", torch)]
    if version < LEAST_TORCH or facts["cuda"] is None:
        wanted = ".".join(map(str, LEAST_TORCH))
        rows = [Row("torch", "problem", torch, f"install torch {wanted} or newer with CUDA")]
    foreign = sorted(name for name, ours in facts["bound"].items() if not ours)
    if foreign:
        advice = "another preloaded library comes first, or a static one: start it with jitckpt run alone"
        rows.append(Row("library", "problem", f"{', '.join(foreign)} not bound to libjitckpt.so", advice))
    elif facts["steps"] != facts["made_steps"]:
        found = f"it saw {facts['steps']} of {facts['made_steps']} optimizer steps end on the device"
        rows.append(Row("library", "problem", found, "report this with the device and torch versions"))
    else:
        rows.append(Row("library", "ok", f"loads, binds {len(facts['bound'])} entry points, counts steps"))
    return rows


def check_shared_memory(free: int) -> Row:
    found = f"{show_size(free)} free in /dev/shm"
    advice = "make it larger (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)"
    if free < LEAST_SHARED_MEMORY:
        return Row("shared memory", "problem", found, advice)
    state: State = "warning" if free < LITTLE_SHARED_MEMORY else "ok"
    return Row("shared memory", state, found, advice if state != "ok" else "")


def check_limits(limits: Mapping[str, int | None], kind: str) -> list[Row]:
    """limits: soft limits in files and bytes, None for unlimited."""
    files, locked, core, size = (limits[name] for name in ("nofile", "memlock", "core", "fsize"))
    rows = [Row("limit: open files", "ok", _limit(files))]
    if files is not None and files < FEW_FILES:
        state: State = "problem" if files < LEAST_FILES else "warning"
        rows = [Row("limit: open files", state, _limit(files), f"raise it: ulimit -n {FEW_FILES}")]
    if kind == "cuda" and locked is not None and locked < LITTLE_LOCKED_MEMORY:
        advice = "NCCL over InfiniBand needs it: ulimit -l unlimited"
        rows.append(Row("limit: locked memory", "warning", show_size(locked), advice))
    else:
        rows.append(Row("limit: locked memory", "ok", _limit(locked, size=True)))
    if core != 0:
        advice = "a rank that crashes writes a core dump first, and the restart waits for it: ulimit -c 0"
        rows.append(Row("limit: core dumps", "warning", _limit(core, size=True), advice))
    else:
        rows.append(Row("limit: core dumps", "ok", "none are written"))
    if size is not None:
        advice = "a save's file may be as large as the whole state: ulimit -f unlimited"
        rows.append(Row("limit: file size", "warning", show_size(size), advice))
    return rows


def check_network(
    variables: Mapping[str, str], interfaces: Mapping[str, str], host: str, address: str | None
) -> list[Row]:
    """interfaces: their states by name. address: what `host`, the store's, resolves to, None if nothing."""
    if address is None:
        advice = "add it to /etc/hosts or name another (--master-addr, --rdzv-endpoint)"
        rows = [Row("store address", "problem", f"{host} does not resolve", advice)]
    else:
        rows = [Row("store address", "ok", f"{host} is {address}")]
    up = sorted(name for name, state in interfaces.items() if state in ("up", "unknown"))
    rows.append(Row("network interfaces", "ok" if up else "problem", ", ".join(up) or "none is up"))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = [name.lstrip("=^") for name in variables.get(variable, "").split(",") if name]
        missing = [name for name in names if not any(known.startswith(name) for known in up)]
        if missing and not variables[variable].startswith("^"):
            found = f"{variable} names {', '.join(missing)}, which is not up"
            rows.append(Row("network interfaces", "problem", found, f"set it to one of {', '.join(up)}"))
    return rows


def check_rendezvous(endpoint: str, own: bool, answers: bool) -> Row:
    """own: it is an address of this host. answers: somebody listens there."""
    if own:
        return Row("rendezvous", "ok", f"{endpoint} is this host: its launcher will hold the store")
    if answers:
        return Row("rendezvous", "ok", f"{endpoint} answers")
    advice = (
        "start that host's launcher, or open the port; launchers also connect to each other on free ports"
    )
    return Row("rendezvous", "warning", f"nobody answers at {endpoint}", advice)


def check_environment(variables: Mapping[str, str]) -> list[Row]:
    rows = []
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found = "CUDA_LAUNCH_BLOCKING is set"
        rows.append(Row("environment", "problem", found, "unset it: a hung device would hold every thread"))
    heartbeat = variables.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if heartbeat is not None and heartbeat.isdigit() and int(heartbeat) < 120:
        found = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is {heartbeat}"
        rows.append(
            Row("environment", "warning", found, "torch may end healthy ranks before they have saved: 480")
        )
    return rows or [Row("environment", "ok", "no variable that is known to hurt")]


def check_disk(disk: Disk) -> list[Row]:
    where = f"{disk.path} ({disk.kind}), {show_size(disk.free)} free"
    if disk.problem:
        return [Row("checkpoint directory", "problem", disk.problem, "choose another directory")]
    rows = [Row("checkpoint directory", "ok", where)]
    if not disk.links:
        rows = [
            Row("checkpoint directory", "problem", f"{where}: no hard links", "choose another file system")
        ]
    elif disk.kind in NOT_PERMANENT:
        advice = "it ends with the machine or its container: use a disk, or a file system that all nodes see"
        rows = [Row("checkpoint directory", "warning", where, advice)]
    speed = f"{show_size(int(disk.write_speed))}/s, a sync takes {1000 * disk.sync_seconds:.1f} ms"
    if disk.write_speed < SLOW_DISK or disk.sync_seconds > SLOW_SYNC:
        advice = "saves will be slow, and so will recoveries: use a faster disk, raise --save-deadline"
        rows.append(Row("write and sync speed", "warning", speed, advice))
    else:
        rows.append(Row("write and sync speed", "ok", speed))
    return rows


def check_memory(available: int) -> Row:
    found = f"{show_size(available)} available"
    if available < LITTLE_MEMORY:
        advice = "warm spares and the ranks' own state take memory: --warm-spares 0, or a smaller limit"
        return Row("host memory", "warning", found, advice)
    return Row("host memory", "ok", found)


def check_criu(trial: Mapping[str, Any]) -> Row:
    """Judge what the trial of moved_process.py says. Without CRIU a training lacks nothing else."""
    found = trial["criu"] or "none"
    if "error" in trial:
        return Row("CRIU", "ok", f"{found}: worker processes can't be moved. {trial['error']}")
    seconds = trial["seconds"]
    return Row("CRIU", "ok", f"{found}: a small process was dumped and restored in {seconds:.1f} s")


def check_frameworks(installed: Mapping[str, str]) -> list[Row]:
    """Tell which of the frameworks that jitckpt knows are there, by name with their versions."""
    if not installed:
        return []
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    text = f"{named}: `jitckpt run` protects unchanged programs of these in user mode"
    return [Row("frameworks", "ok", text)]


def check_clock(synchronised: bool | None) -> Row:
    if synchronised is None:
        return Row("clock", "warning", "the kernel does not say whether it is synchronised")
    if not synchronised:
        advice = "run chrony or ntpd, or events of several machines can't be put in order"
        return Row("clock", "warning", "not synchronised", advice)
    return Row("clock", "ok", "synchronised")


@dataclass(frozen=True)
class SavedRank:
    """What the rehearsal's save says of one rank: bytes of its save, and what it kept of its own state.

    bytes, seconds: of its save, None if it made none. missing: tensors too large to be kept; left_out: parts.
    """

    rank: int
    shard: int
    bytes: int | None
    seconds: float | None
    local_bytes: int
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


RECOGNISED, PROTECTED = ": recognised", ": recognised. Protected: "


def check_script(
    events: Sequence[Event], saved: Sequence[SavedRank], ranks: int, status: str, disk: Disk
) -> list[Row]:
    """Judge a rehearsal of the first steps. status: how it ended, empty if it came to its first steps."""
    registered = {event["rank"]: event for event in events if event["event"] == "registered"}
    if status:
        return [Row("script", "problem", status, "see its output; it must call jitckpt.init and train")]
    unprotected = [rank for rank in range(ranks) if rank not in registered]
    if unprotected:
        found = f"rank {_some(unprotected)} did not call jitckpt.init"
        return [Row("script", "problem", found, "call it on every rank")]
    rows = [Row("script", "ok", f"{ranks} ranks trained under protection")]
    rows += [Row("script", "warning", event["text"]) for event in events if event["event"] == "warning"]
    rows += check_self_checks(events)
    rows += _check_copies(registered, saved)
    for own in saved:
        if own.missing or own.left_out:
            found = f"rank {own.rank} keeps no copy of {_some([*own.left_out, *own.missing])}"
            advice = "give jitckpt.init a larger local_state_limit"
            rows.append(Row("rank-local state", "problem", found, advice))
    if saved and not any(own.missing or own.left_out for own in saved):
        most = max(own.local_bytes for own in saved)
        rows.append(Row("rank-local state", "ok", f"{show_size(most)} a rank, in the agent's memory"))
    sizes = [own.bytes for own in saved if own.bytes is not None]
    times = [own.seconds for own in saved if own.seconds is not None]
    if not sizes and any(event["event"] == "finished" for event in events):
        found = "the script ended before it was told to save"
        return [*rows, Row("save", "warning", found, "give it more steps to have its save measured")]
    if not sizes:
        return [*rows, Row("save", "problem", "no rank could save", "see the output and the events")]
    needed = SAVES_ON_DISK * max(sizes) * ranks
    found = f"{show_size(max(sizes))} a rank in {max(times):.2f} s; up to {show_size(needed)} on the disk"
    if needed > disk.free:
        advice = f"free {show_size(needed - disk.free)} in {disk.path}, or choose another directory"
        return [*rows, Row("save", "problem", found, advice)]
    return [*rows, Row("save", "ok", found)]


def check_recognised(said: str) -> list[Row]:
    """Return what `jitckpt run` said of a framework's training (jitckpt.frameworks), in a script's output."""
    lines = dict.fromkeys(
        line for line in said.splitlines() if line.startswith("jitckpt: ") and RECOGNISED in line
    )
    return [
        Row("framework", "ok" if PROTECTED in line else "problem", line.removeprefix("jitckpt: "))
        for line in lines
    ]


def check_self_checks(events: Sequence[Event]) -> list[Row]:
    """Judge whether what a save would hold brings the training back (jitckpt.worker.self_check.checker)."""
    checks = [event for event in events if event["event"] == "self_check"]
    if not checks:
        return []
    kept = dict.fromkeys(name for check in checks for name in check.get("kept", []))
    known = [Row("kept by itself", "ok", name) for name in kept]
    differences = dict.fromkeys(text for check in checks for text in check["differences"])
    if differences:
        advice = "a restart would go on otherwise: keep it in state_dict() or in jitckpt.init(extra=...)"
        return [*known, *(Row("self-check", "problem", text, advice) for text in differences)]
    skipped = dict.fromkeys(text for check in checks for text in check["skipped"])
    rows = [*known, *(Row("self-check", "warning", one, "rehearse it: jitckpt verify") for one in skipped)]
    whole = [check for check in checks if not check["skipped"]]
    if whole:
        most = max(whole, key=lambda check: int(check["bytes"]))
        found = f"a save brings {most['tensors']} tensors ({show_size(most['bytes'])}) of a rank back"
        rows.append(Row("self-check", "ok", found))
    return rows


def _check_copies(registered: Mapping[int, Event], saved: Sequence[SavedRank]) -> list[Row]:
    holders: dict[int, list[int]] = {}
    for rank, event in sorted(registered.items()):
        holders.setdefault(event["shard"], []).append(rank)
    alone = {shard: ranks[0] for shard, ranks in holders.items() if len(ranks) == 1}
    sizes = {own.shard: own.bytes for own in saved if own.bytes}
    rows = []
    for shard, rank in alone.items():
        size = f" ({show_size(sizes[shard])})" if shard in sizes else ""
        found = f"rank {rank}'s shard {shard}{size} has no second copy"
        advice = "if that rank dies its state is lost: train with 2 replicas, or save periodically too"
        rows.append(Row("replicas", "problem", found, advice))
    fewest = min(map(len, holders.values()))
    if not alone:
        found = f"{len(holders)} shard{'s' if len(holders) > 1 else ''}, {fewest} copies or more of each"
        rows.append(Row("replicas", "ok", found))
    return rows


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _limit(value: int | None, size: bool = False) -> str:
    return "unlimited" if value is None else show_size(value) if size else str(value)
