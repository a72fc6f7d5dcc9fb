"""Snapshots of processes: what is whole, what is said and not heard, and what a new store begins with."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from descriptors import held_descriptors

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.host_dumps import HostDumps
from jitckpt.agent.migration.host_part import Place
from jitckpt.agent.migration.move import MoveError, peeked
from jitckpt.agent.migration.shelf import Shelf, Size
from jitckpt.agent.migration.snapshots import ProcessSnapshots, client_of, contents, empty, fill
from jitckpt.agent.migration.suspended_job import SuspendedJob
from jitckpt.decisions.transparent import validation
from jitckpt.events import EventLog
from jitckpt.hosts.store_server import store_at
from jitckpt.system.resting_place import Guest, RestingPlace
from jitckpt.wire.environment import REST


def write(shelf: Shelf, step: int) -> list[object]:
    """Put a snapshot of two ranks there; return what was said in the end."""
    draft, said = shelf.begin(step, in_memory=True), list[object]()
    for rank in (0, 1):
        for name in ("pages-1.img", "dump.log"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=draft.of(rank)), "wb") as file:
                file.write(b"pages")
    shelf.put(draft, {"step": step, "name": f"the {step}"}, lambda size, error: said.extend([size, error]))
    shelf.settle()
    return said


def test_what_can_not_be_put_on_the_disk_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, {})
    write(shelf, 7)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        size, error = write(shelf, 12)
    assert size == Size(0, 0, 0)
    assert "No space left" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0000000007"]
    assert shelf.step == 7


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_what_nobody_has_read_is_looked_at_and_stays(kind: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        ours.setblocking(False)
        assert peeked(ours) == []
        theirs.send(b"one")
        theirs.send(b"other")
        for _ in range(2):
            assert b"".join(peeked(ours)) == b"oneother"
        assert ours.recv(100) == (b"one" if kind == socket.SOCK_SEQPACKET else b"oneother")
        if kind == socket.SOCK_SEQPACKET:
            assert peeked(ours) == [b"other"]
            socket.send_fds(theirs, [b"start"], [0])
            before = held_descriptors()
            with pytest.raises(MoveError, match="asking for a server"):
                peeked(ours)
            assert held_descriptors() <= before


def test_the_files_that_a_process_writes_are_found_with_their_lengths(tmp_path: Path) -> None:
    path, gone = tmp_path / "log", tmp_path / "gone"
    with path.open("a") as log, gone.open("w"), Path(__file__).open():
        log.write("a line")
        log.flush()
        gone.unlink()
        found = looked_at.written_files(os.getpid())
    assert found[str(path)] == 6
    assert __file__ not in found
    assert not any("gone" in name for name in found)


def test_a_new_store_gets_what_the_old_one_had() -> None:
    old, new = store_at("127.0.0.1"), store_at("127.0.0.1")
    old.set("text", b"\x00\xff\n")
    assert old.add("count", 7) == 7
    old.set("gone", "soon")
    old.delete_key("gone")
    keys = {b"/text", b"/count", b"/gone", b"/never"}
    found = contents(client_of("127.0.0.1", old.port), keys)
    assert found == {b"/text": b"\x00\xff\n", b"/count": b"7"}
    fill("127.0.0.1", new.port, found)
    assert new.get("text") == b"\x00\xff\n"
    assert new.add("count", 1) == 8
    empty("127.0.0.1", new.port, found)
    assert not new.check(["text"])
    old.queue_push("queue", b"something")
    with pytest.raises(MoveError, match="queue"):
        contents(client_of("127.0.0.1", old.port), {b"/queue"})


def test_a_rank_that_was_made_again_hears_which_failures_have_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place = RestingPlace(2)
    guest = Guest(place.of(1)[REST.name])
    assert guest.fired == []
    place.go_on_from([13, 14], ["rank=1 step=15 kind=kill"])
    assert place.steps == [13, 14]
    assert guest.fired == ["rank=1 step=15 kind=kill"]
    assert not guest.begins(15)
    assert guest.fired == ["rank=1 step=15 kind=kill"]
    guest.close()
    place.close()


@pytest.mark.parametrize(("relied", "left"), [(False, 7), (True, None)])
def test_a_snapshot_that_may_have_a_wrong_result_is_dropped(
    tmp_path: Path, relied: bool, left: int | None
) -> None:
    shelf, place = Shelf(tmp_path, {}), RestingPlace(2)
    write(shelf, 7)
    mover: Any = None  # which is not asked
    dumps = HostDumps(mover, [0, 1], shelf, EventLog(), place=place, barrier=None)
    here = Place(SuspendedJob([], [], ""))
    snapshots = ProcessSnapshots(dumps, here, EventLog(), every=60, say=lambda text: None, gone_back_to=7)
    snapshots.note("switched_off", {"text": validation.told("it differs", relied)})
    assert shelf.step == left
    assert snapshots.next_look is None
    snapshots.close()
    place.close()
