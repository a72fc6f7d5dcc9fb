"""Saves on the disk: whole or not at all."""

import ctypes
import json
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitckpt.errors import CheckpointError, SaveError
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import PIECE_BYTES, HashedFile, SaveFolder
from jitckpt.saves.layout import Identity

IDENTITY = Identity(job="j", fingerprint="f", world_size=2, rank=1, shard=0, shards=1)
WEIGHTS = {"weight": torch.arange(1000.0)}


def save(root: Path, step: int = 3, value: int = 1, rank: int = IDENTITY.rank) -> Path:
    with SaveFolder(root, replace(IDENTITY, rank=rank), step, "rank", "builtin") as folder:
        folder.add_tensors(layout.TENSORS_FILE, WEIGHTS)
        folder.add_json(layout.STATE_FILE, {"value": value})
        path, size = folder.commit()
    assert size == sum(file.stat().st_size for file in path.iterdir())
    return path


def test_a_committed_save_is_found_whole_and_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert path == tmp_path / "step-0000000003" / "rank-00001"
    (record,) = folders.find(tmp_path)
    assert (record.path, record.step, record.rank, record.problem) == (path, 3, 1, None)
    assert folders.verify(record) is None
    state = folders.read(record)
    assert state.document == {"value": 1}
    assert torch.equal(state.tensors["weight"], WEIGHTS["weight"])


def test_nothing_stays_of_a_save_without_commit(tmp_path: Path) -> None:
    with SaveFolder(tmp_path, IDENTITY, 3, "rank", "builtin") as folder:
        folder.add_json("state.json", 1)
    with suppress(RuntimeError), SaveFolder(tmp_path, IDENTITY, 4, "rank", "builtin") as folder:
        folder.add_json("state.json", 1)
        raise RuntimeError
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert folders.find(tmp_path) == []


def test_an_older_save_of_the_same_step_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    save(tmp_path, value=1)
    with pytest.raises(RuntimeError), SaveFolder(tmp_path, IDENTITY, 3, "rank", "builtin"):
        raise RuntimeError
    (record,) = folders.find(tmp_path)
    assert folders.verify(record) is None
    save(tmp_path, value=2)
    (record,) = folders.find(tmp_path)
    assert folders.verify(record) is None
    assert folders.read(record).document == {"value": 2}
    assert [path.name for path in record.path.parent.iterdir()] == ["rank-00001"]


def test_what_a_killed_process_left_is_no_save_and_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "step-0000000003" / "unfinished-rank-00001"
    left.mkdir(parents=True)
    (left / layout.TENSORS_FILE).write_bytes(b"half")
    assert folders.find(tmp_path) == []
    save(tmp_path)
    assert not left.exists()


def test_files_of_others_are_taken_in(tmp_path: Path) -> None:
    with SaveFolder(tmp_path, IDENTITY, 3, "rank", "callback") as folder:
        (folder.path / "deep").mkdir()
        (folder.path / "deep" / "mine.bin").write_bytes(b"123")
        folder.add_existing()
        folder.commit()
    (record,) = folders.find(tmp_path)
    assert record.metadata is not None
    assert [(file.name, file.size) for file in record.metadata.files] == [("deep/mine.bin", 3)]
    (record.path / "deep" / "mine.bin").write_bytes(b"124")
    assert "damaged" in str(folders.verify(record))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state.json").unlink(), "can't be read: No such file"),
        (lambda path: os.truncate(path / "tensors.safetensors", 100), "has 100 bytes instead of"),
        (lambda path: (path / "state.json").write_bytes(b'{"value": 2}'), "is damaged: its checksum"),
        (lambda path: (path / "metadata.json").write_bytes(b"{"), "it is not JSON"),
        (lambda path: (path / "metadata.json").unlink(), "was never finished"),
        (lambda path: path.rename(path.with_name("rank-00000")), "was moved: its metadata is that of step 3"),
    ],
)
def test_damage_is_a_reason(tmp_path: Path, damage: object, reason: str) -> None:
    damage(save(tmp_path))  # type: ignore[operator]
    (record,) = folders.find(tmp_path)
    assert reason in str(folders.verify(record))


def test_other_folders_are_ignored(tmp_path: Path) -> None:
    save(tmp_path)
    for name in ("step-x", "notes", "step-0000000003/other", "step-0000000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-0000000005").write_text("a file")
    assert [record.step for record in folders.find(tmp_path)] == [3]
    assert folders.find(tmp_path / "not there") == []


def in_child(work: Callable[[], str]) -> str:
    """Return what `work` returns in a process of its own, whose limits and mounts end with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work().encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def save_until_it_fails(root: Path) -> str:
    save(root, step=2)
    try:
        for step in range(3, 1000):
            save(root, step=step)
    except SaveError as error:
        unfinished = [path.name for path in root.rglob("unfinished*")]
        return f"{error} {[folders.verify(record) for record in folders.find(root)]} {unfinished}"
    return "It never failed."


def test_a_limit_on_file_sizes_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    def work() -> str:
        save(tmp_path, step=1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(SaveError) as caught:
            save(tmp_path)
        return str(caught.value)

    assert "tensors.safetensors can't be written or read: File too large; raise the limit" in in_child(work)
    assert [(record.step, folders.verify(record)) for record in folders.find(tmp_path)] == [(1, None)]
    assert list((tmp_path / "step-0000000003").iterdir()) == []


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    clone_newns, clone_newuser = 0x00020000, 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()

    def work() -> str:
        if libc.unshare(clone_newns | clone_newuser) != 0:
            return "skip"
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        if libc.mount(b"none", bytes(tmp_path), b"tmpfs", 0, b"size=256k") != 0:
            return "skip"
        return save_until_it_fails(tmp_path)

    answer = in_child(work)
    if answer == "skip":
        pytest.skip("this machine lets nobody mount a small file system")
    assert "No space left on device; free some space" in answer
    assert "[None, None" in answer
    assert answer.endswith("None] []")


def test_a_file_in_the_place_of_the_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(CheckpointError, match="choose a checkpoint directory whose path is not a file"):
        folders.open_directory(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="choose a checkpoint directory whose path is not a file"):
        folders.open_directory(tmp_path / "ckpt" / "deeper")
    with pytest.raises(SaveError, match="not a file"):
        save(tmp_path / "ckpt")


def test_the_job_id_is_made_once_whoever_comes_first(tmp_path: Path) -> None:
    assert folders.read_job(tmp_path) is None
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(folders.open_directory(tmp_path / "a")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert folders.read_job(tmp_path / "a") == found[0]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["job.json"]
    assert folders.open_directory(tmp_path / "b") != found[0]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"job": 3}', b"[1]"])
def test_a_damaged_job_file_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"job\.json .*choose another"):
        folders.open_directory(tmp_path)


def test_old_steps_are_removed_up_to_the_one_that_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 5):
        save(tmp_path, step=step)
        folders.note_whole(tmp_path, step)
    folders.remove_before(tmp_path, 5, IDENTITY)
    assert [record.step for record in folders.find(tmp_path)] == [5]
    assert len([*tmp_path.glob("step-*")]) == 1, "nothing is left of the others"


def test_the_newest_whole_steps_are_kept_and_what_is_not_whole_counts_for_nothing(tmp_path: Path) -> None:
    def shard(step: int, number: int, **other: object) -> None:
        of = Identity(**(vars(IDENTITY) | {"rank": number, "shard": number, "shards": 2} | other))
        with SaveFolder(tmp_path, of, step, "rank", "builtin") as folder:
            folder.commit()

    ours = Identity(**(vars(IDENTITY) | {"shards": 2}))
    for step in (1, 2, 3, 4):
        shard(step, 0)
    for step in (1, 2, 4):
        shard(step, 1)
    folders.KeptSaves(tmp_path, ours).remove_old(keep=4)
    assert {record.step for record in folders.find(tmp_path)} == {1, 2, 3, 4}
    folders.KeptSaves(tmp_path, ours).remove_old(keep=2)
    assert {record.step for record in folders.find(tmp_path)} == {2, 3, 4}
    folders.KeptSaves(tmp_path, ours).remove_old(keep=1)
    assert {record.step for record in folders.find(tmp_path)} == {4}
    shard(5, 0, job="another")
    shard(6, 0)
    shard(6, 1)
    folders.KeptSaves(tmp_path, ours).remove_old(keep=1)
    assert {record.step for record in folders.find(tmp_path)} == {5, 6}  # what is another's stays


def test_two_writers_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    with (
        SaveFolder(tmp_path, IDENTITY, 3, "rank", "builtin") as one,
        SaveFolder(tmp_path, IDENTITY, 3, "rank", "builtin", by="periodic") as other,
    ):
        one.add_json("state.json", {"by": "one"})
        other.add_json("state.json", {"by": "other"})
        one.commit()
        other.commit()
    (record,) = folders.find(tmp_path)
    assert folders.verify(record) is None
    assert json.loads((record.path / "state.json").read_bytes()) == {"by": "other"}
    assert [path.name for path in record.path.parent.iterdir()] == ["rank-00001"]


def test_later_steps_of_a_rank_are_set_aside(tmp_path: Path) -> None:
    for step in (3, 5):
        save(tmp_path, step=step)
    folders.set_aside_after(tmp_path, 3, rank=0)
    assert [record.step for record in folders.find(tmp_path)] == [5, 3]
    folders.set_aside_after(tmp_path, 3, rank=1)
    assert [record.step for record in folders.find(tmp_path)] == [3]
    save(tmp_path, step=5)
    folders.set_aside_after(tmp_path, 3, rank=1)
    assert [record.step for record in folders.find(tmp_path)] == [3]


def test_later_steps_of_ranks_that_there_are_no_more_are_set_aside_once(tmp_path: Path) -> None:
    """A job of four ranks goes on with two."""
    for rank in range(4):
        for step in (3, 5):
            save(tmp_path, step=step, rank=rank)
    folders.set_aside_after(tmp_path, 3, rank=0, ranks=2)
    assert {one.rank for one in folders.find(tmp_path) if one.step == 5} == {1, 3}
    folders.set_aside_after(tmp_path, 3, rank=1, ranks=2)
    assert {(one.step, one.rank) for one in folders.find(tmp_path)} == {(3, rank) for rank in range(4)}


def test_the_checksum_is_that_of_the_pieces_in_their_order_large_ones_too(tmp_path: Path) -> None:
    pieces = [os.urandom(size) for size in (8, PIECE_BYTES, PIECE_BYTES - 1, 3 * PIECE_BYTES, 0, 5)]
    memory = bytearray(3 * PIECE_BYTES)
    with HashedFile(tmp_path / "file") as file:
        for piece in pieces:
            memory[: len(piece)] = piece  # used again for each, as a staging buffer is
            file.write(memoryview(memory)[: len(piece)])
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert (file.size, file.checksum) == (sum(map(len, pieces)), folders.checksum(tmp_path / "file"))


def test_write_by_rename_leaves_the_old_file_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "f"
    folders.write_by_rename(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            folders.write_by_rename(path, b"new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_is_read_once_to_know_whether_its_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    parse = layout.parse_metadata

    def counted(data: bytes) -> layout.Metadata:
        read.append(data)
        return parse(data)

    monkeypatch.setattr(layout, "parse_metadata", counted)
    kept = folders.KeptSaves(tmp_path, IDENTITY)
    for step in range(1, 21):
        save(tmp_path, step=step)
        kept.remove_old(keep=5)
    assert {record.step for record in folders.find(tmp_path)} == set(range(16, 21))
    looks = 20 + 15 + 5  # at each new one, at each that is removed, and `find` just now
    assert len(read) == looks


def test_what_others_have_put_into_the_folder_of_a_step_stays(tmp_path: Path) -> None:
    folder = save(tmp_path, step=1).parent
    (folder / "notes.txt").write_text("mine")
    (folder / "set-aside-rank-00000").mkdir()
    (folder / "error-rank-00001.txt").write_text("of jitckpt")
    save(tmp_path, step=2)
    folders.KeptSaves(tmp_path, IDENTITY).remove_old(keep=1)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_save_functions_metadata_is_not_written_over(tmp_path: Path) -> None:
    with SaveFolder(tmp_path, IDENTITY, 3, "rank", "callback") as folder:
        (folder.path / "metadata.json").write_text("mine")
        (folder.path / "host_state.json").write_text("mine")
        with pytest.raises(SaveError, match=r"has written host_state\.json, a name that jitckpt itself uses"):
            folder.add_json("host_state.json", {})
        with pytest.raises(SaveError, match=r"has written metadata\.json, a name that jitckpt itself uses"):
            folder.add_existing()


def test_a_pipe_in_a_save_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    with SaveFolder(tmp_path, IDENTITY, 3, "rank", "callback") as folder:
        os.mkfifo(folder.path / "pipe")
        with pytest.raises(SaveError, match="is no file"):
            folder.add_existing()


def test_a_pipe_in_the_place_of_what_is_read_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    record = save(tmp_path, step=3)
    metadata = record / "metadata.json" if record.is_dir() else record
    metadata.unlink()
    os.mkfifo(metadata)
    (found,) = folders.find(tmp_path)
    assert found.metadata is None
    assert "it is no file" in str(found.problem)
    os.mkfifo(tmp_path / "job.json")
    with pytest.raises(CheckpointError, match=r"job\.json can't be written or read: it is no file"):
        folders.open_directory(tmp_path, "job")


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)


def test_a_file_system_that_exchanges_nothing_keeps_the_older_save_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_exchange(monkeypatch)
    path = save(tmp_path, value=1)
    path.rename(path.with_name("replaced-rank-00001"))  # as one leaves it that is killed just then
    (record,) = folders.find(tmp_path)
    assert folders.verify(record) is None
    assert folders.read(record).document == {"value": 1}
    folders.clear_leftovers(tmp_path, 1)
    with suppress(RuntimeError), SaveFolder(tmp_path, IDENTITY, 3, "rank", "builtin"):
        raise RuntimeError
    assert [found.path for found in folders.find(tmp_path)] == [path]
    save(tmp_path, value=2)
    (record,) = folders.find(tmp_path)
    assert folders.read(record).document == {"value": 2}
    assert [path.name for path in record.path.parent.iterdir()] == ["rank-00001"]


def test_leftovers_of_killed_processes_go_at_the_next_start(tmp_path: Path) -> None:
    path = save(tmp_path, step=3)
    for name in ("unfinished-rank-00001", "unfinished-periodic-local-00001", "replaced-rank-00001"):
        (path.parent / name).mkdir()
        (path.parent / name / "file").touch()
    (path.parent / "unfinished-rank-00000").mkdir()
    folders.set_aside_after(tmp_path, 3, rank=1)
    assert sorted(one.name for one in path.parent.iterdir()) == ["rank-00001", "unfinished-rank-00000"]


def test_a_lost_job_file_is_made_again_as_the_saves_say(tmp_path: Path) -> None:
    save(tmp_path)
    assert folders.read_job(tmp_path) == "j"
    assert folders.open_directory(tmp_path) == "j"
    (tmp_path / "job.json").unlink()
    with SaveFolder(tmp_path, Identity("k", "f", 2, 0, 0, 1), 3, "rank", "builtin") as folder:
        folder.commit()
    with pytest.raises(
        CheckpointError, match=r'several jobs \(j, k\): write {"job": "j"} with the right one'
    ):
        folders.open_directory(tmp_path)
    (tmp_path / "job.json").write_text('{"job": "k"}')
    assert folders.open_directory(tmp_path) == "k"


def test_a_job_file_of_a_newer_jitckpt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"format": 99, "job": "j"}')
    with pytest.raises(CheckpointError, match="of a newer jitckpt"):
        folders.open_directory(tmp_path)


def test_what_keeps_a_job_out_of_its_directory_is_one_sentence(tmp_path: Path) -> None:
    """Which ends the user's traceback: no other one stands before it."""
    (tmp_path / layout.JOB_FILE).mkdir()
    with pytest.raises(CheckpointError, match="can't be written or read") as caught:
        folders.open_directory(tmp_path)
    assert caught.value.__suppress_context__
