"""What jitckpt doctor makes of the facts that it is told."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitckpt.bindings import libc
from jitckpt.cli.doctor_table import look_at_rendezvous
from jitckpt.doctor import checks, facts
from jitckpt.doctor.checks import GIB, Disk, Row, SavedRank
from jitckpt.events import Event
from jitckpt.saves import layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity

DISK = Disk("/data", "ext4", 100 * GIB, "", True, 1e9, 0.001)
FACTS = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "bound": {"cudaLaunchKernel": True, "ncclAllReduce": True},
    "steps": 3,
    "made_steps": 3,
}
LIMITS = {"nofile": None, "memlock": None, "core": 0, "fsize": None}


def states(rows: list[Row]) -> list[str]:
    return [row.state for row in rows]


def test_devices() -> None:
    assert checks.check_device("cuda", "NVIDIA H200", "580.65", 8, 8) == Row(
        "device", "ok", "8 x NVIDIA H200, driver 580.65"
    )
    assert checks.check_device("cuda", "NVIDIA H200", "580.65", 1, 2).state == "problem"
    assert checks.check_device("softgpu", "softgpu", "softgpu", 2, 2).state == "warning"


@pytest.mark.parametrize(
    ("changes", "state", "found"),
    [
        ({}, ["ok", "ok"], "loads, binds 2 entry points"),
        ({"torch": "2.9.1", "cuda": "12.8"}, ["problem", "ok"], "2.9.1, CUDA 12.8"),
        ({"torch": "2.11.0+cpu", "cuda": None, "nccl": None}, ["problem", "ok"], "CUDA none"),
        ({"torch": "3.0.0a0+git1"}, ["ok", "ok"], "3.0.0a0"),
        ({"bound": {"ncclAllReduce": False}}, ["ok", "problem"], "ncclAllReduce not bound to libjitckpt.so"),
        ({"steps": 2}, ["ok", "problem"], "it saw 2 of 3 optimizer steps"),
    ],
)
def test_the_small_process(changes: dict[str, object], state: list[str], found: str) -> None:
    rows = checks.check_process(FACTS | changes, "")
    assert states(rows) == state
    assert any(found in row.found for row in rows)


def test_a_small_process_that_did_not_come_back() -> None:
    (row,) = checks.check_process(None, "it ended with status 1: no driver")
    assert (row.state, row.found) == ("problem", "it ended with status 1: no driver")


@pytest.mark.parametrize(("free", "state"), [(10 << 20, "problem"), (100 << 20, "warning"), (4 * GIB, "ok")])
def test_shared_memory(free: int, state: str) -> None:
    assert checks.check_shared_memory(free).state == state


@pytest.mark.parametrize(
    ("changes", "kind", "worst"),
    [
        ({}, "cuda", "ok"),
        ({"nofile": 256}, "softgpu", "problem"),
        ({"nofile": 4096}, "softgpu", "warning"),
        ({"memlock": 8 << 20}, "softgpu", "ok"),
        ({"memlock": 8 << 20}, "cuda", "warning"),
        ({"core": None}, "cuda", "warning"),
        ({"fsize": 1 << 30}, "cuda", "warning"),
    ],
)
def test_limits(changes: dict[str, int | None], kind: str, worst: str) -> None:
    found = set(states(checks.check_limits(LIMITS | changes, kind)))
    assert found - {"ok"} == {worst} - {"ok"}


def test_network() -> None:
    up = {"lo": "unknown", "eth0": "up", "ib0": "down"}
    assert states(checks.check_network({}, up, "node1", "10.0.0.1")) == ["ok", "ok"]
    assert checks.check_network({}, up, "node1", None)[0].state == "problem"
    assert checks.check_network({}, {"eth0": "down"}, "node1", "10.0.0.1")[1].state == "problem"
    rows = checks.check_network({"NCCL_SOCKET_IFNAME": "ib0"}, up, "node1", "10.0.0.1")
    assert rows[-1].found == "NCCL_SOCKET_IFNAME names ib0, which is not up"
    for value in ("eth", "=eth0", "^docker,lo"):
        rows = checks.check_network({"NCCL_SOCKET_IFNAME": value}, up, "node1", "10.0.0.1")
        assert states(rows) == ["ok", "ok"], value


def test_environment() -> None:
    assert states(checks.check_environment({"CUDA_LAUNCH_BLOCKING": "0"})) == ["ok"]
    assert states(checks.check_environment({"CUDA_LAUNCH_BLOCKING": "1"})) == ["problem"]
    assert states(checks.check_environment({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30"})) == ["warning"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ["ok", "ok"]),
        ({"problem": "/data can't be written: Permission denied"}, ["problem"]),
        ({"links": False}, ["problem", "ok"]),
        ({"kind": "tmpfs"}, ["warning", "ok"]),
        ({"write_speed": 1e6}, ["ok", "warning"]),
        ({"sync_seconds": 0.5}, ["ok", "warning"]),
    ],
)
def test_disk(changes: dict[str, object], found: list[str]) -> None:
    assert states(checks.check_disk(replace(DISK, **changes))) == found  # type: ignore[arg-type]


def test_memory_criu_and_clock() -> None:
    assert checks.check_memory(1 << 30).state == "warning"
    assert checks.check_memory(64 * GIB).state == "ok"
    row = checks.check_criu({"criu": "criu 4.2.1 (pycriu)", "seconds": 0.25})
    assert row == Row("CRIU", "ok", "criu 4.2.1 (pycriu): a small process was dumped and restored in 0.2 s")
    row = checks.check_criu({"criu": None, "error": "There is no criu on this machine: install it."})
    assert row.found == "none: worker processes can't be moved. There is no criu on this machine: install it."
    assert [checks.check_clock(value).state for value in (True, False, None)] == ["ok", "warning", "warning"]


def registered(rank: int, shard: int) -> Event:
    return {"event": "registered", "rank": rank, "shard": shard}


def saved(rank: int, shard: int, size: int | None = 1000, missing: tuple[str, ...] = ()) -> SavedRank:
    return SavedRank(rank, shard, size, 0.1, 50, missing, ())


def by_check(rows: list[Row]) -> dict[str, Row]:
    return {row.check: row for row in rows}


def test_a_script_whose_shards_all_have_copies() -> None:
    events = [registered(rank, rank % 2) for rank in range(4)]
    rows = checks.check_script(events, [saved(rank, rank % 2) for rank in range(4)], 4, "", DISK)
    assert states(rows) == ["ok"] * 4
    assert by_check(rows)["replicas"].found == "2 shards, 2 copies or more of each"
    assert by_check(rows)["save"].found == "1 kB a rank in 0.10 s; up to 8 kB on the disk"


def test_shards_without_a_second_copy_are_named() -> None:
    events = [registered(0, 0), registered(1, 0), registered(2, 1)]
    rows = checks.check_script(events, [saved(0, 0), saved(2, 1)], 3, "", DISK)
    assert by_check(rows)["replicas"].found == "rank 2's shard 1 (1 kB) has no second copy"
    assert by_check(rows)["replicas"].state == "problem"


def test_what_a_rank_keeps_no_copy_of_is_named() -> None:
    rows = checks.check_script(
        [registered(0, 0), registered(1, 0)],
        [saved(0, 0), saved(1, 0, missing=("buffers.cache",))],
        2,
        "",
        DISK,
    )
    assert by_check(rows)["rank-local state"].found == "rank 1 keeps no copy of buffers.cache"


def test_a_disk_that_is_too_small_for_two_steps() -> None:
    events = [registered(0, 0), registered(1, 0)]
    rows = checks.check_script(events, [saved(0, 0, 30 * GIB)], 2, "", DISK)
    assert by_check(rows)["save"].state == "problem"
    assert by_check(rows)["save"].advice.startswith("free 21.5 GB in /data")


def test_a_script_of_few_steps_is_not_blamed_for_its_missing_save() -> None:
    events = [registered(0, 0), registered(1, 0), {"event": "finished", "rank": 0, "step": 3}]
    assert by_check(checks.check_script(events, [], 2, "", DISK))["save"].state == "warning"


def test_a_script_that_could_not_be_judged() -> None:
    assert checks.check_script([], [], 2, "it ended with status 1", DISK)[0].found == "it ended with status 1"
    rows = checks.check_script([registered(0, 0)], [], 2, "", DISK)
    assert rows[0].found == "rank 1 did not call jitckpt.init"
    warned = [registered(0, 0), registered(1, 0), {"event": "warning", "rank": 0, "text": "Too large."}]
    rows = checks.check_script(warned, [saved(0, 0, None)], 2, "", DISK)
    assert [row.found for row in rows if row.state == "warning"] == ["Too large."]
    assert by_check(rows)["save"].state == "problem"


def test_the_disk_is_asked_and_nothing_is_left(tmp_path: Path) -> None:
    disk = facts.disk(tmp_path / "not" / "there" / "yet")
    assert (disk.path, disk.problem, disk.links) == (str(tmp_path), "", True)
    assert disk.write_speed > 0
    assert disk.sync_seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_can_t_be_written() -> None:
    assert facts.disk(Path("/proc/jitckpt")).problem.startswith("/proc can't be written: ")


def test_this_machine_answers() -> None:
    assert "lo" in facts.interfaces()
    assert facts.shared_memory_free() > 0
    assert facts.memory_available() > 0
    assert set(facts.limits()) == {"nofile", "memlock", "core", "fsize"}
    assert libc.clock_is_synchronised() in (True, False, None)
    assert facts.store_address({"MASTER_ADDR": "localhost"})[1] in ("127.0.0.1", "::1")
    assert facts.store_address({"MASTER_ADDR": "no-such-host.invalid"})[1] is None


def test_what_the_saves_of_a_rehearsal_say(tmp_path: Path) -> None:
    local = {"final": True, "trees": {}, "missing": ["buffers.cache"], "left_out": ["extra"]}
    for kind, rank in (("rank", 0), ("local", 0), ("local", 1)):
        own = Identity("j", "f", 2, rank, 0, 1)
        saver: layout.SaverName = "builtin" if kind == "rank" else "ring"
        with SaveFolder(tmp_path, own, 3, "rank" if kind == "rank" else "local", saver) as folder:
            folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.zeros(10)})
            folder.add_json(layout.STATE_FILE, {"local": local})
            folder.commit()
    ended = {"event": "save_ended", "rank": 0, "bytes": 123, "seconds": 0.5}
    first, second = facts.saved_ranks(tmp_path, [ended])
    assert (first.rank, first.bytes, first.seconds) == (0, 123, 0.5)
    assert (second.rank, second.bytes, second.missing, second.left_out) == (
        1,
        None,
        ("buffers.cache",),
        ("extra",),
    )
    assert first.local_bytes > 0


@pytest.mark.parametrize(
    ("own", "answers", "state"), [(True, False, "ok"), (False, True, "ok"), (False, False, "warning")]
)
def test_the_rendezvous_is_here_or_somebody_answers_there(own: bool, answers: bool, state: str) -> None:
    assert checks.check_rendezvous("node1:29400", own, answers).state == state


def test_whether_somebody_answers_at_the_rendezvous_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert facts.rendezvous(endpoint) == (True, True)
    assert facts.rendezvous(endpoint) == (True, False)
    assert look_at_rendezvous("node1:port").state == "problem"
