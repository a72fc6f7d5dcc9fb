"""Copies of saves in an object store: a real server, reached through a door that lets faults in."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import SLOW_SECONDS, Door, Request, is_part, is_read_of, object_store

from jitckpt.cli import main
from jitckpt.errors import CheckpointError
from jitckpt.objects import bucket
from jitckpt.objects.bucket import Bucket, ObjectsError
from jitckpt.objects.copier import ObjectCopier
from jitckpt.objects.saves import ObjectSaves
from jitckpt.saves import folders, layout, starts
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.saves.starts import Start, Superseded

PART = 5 << 20  # the least that S3 takes
NO_START, FIRST, SECOND = Start(), Start(1, 50), Start(2, 70)
DATA = random.Random(0).randbytes(2 * PART + 12345)


@pytest.fixture(scope="module")
def server() -> Iterator[Door]:
    with object_store() as door:
        yield door


@pytest.fixture
def door(server: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    server.fault = lambda request: ""
    server.seen.clear()
    server.done.clear()
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "TRY_SECONDS", 0.01)
    return server


@pytest.fixture
def there(door: Door, tmp_path: Path) -> Bucket:
    return Bucket(f"s3://saves/{tmp_path.name}", part_bytes=PART)


def impatient(there: Bucket) -> Bucket:
    """Return the same place, for one that waits for less than a slow answer takes."""
    return Bucket(there.url, part_bytes=PART, patience=0.8 * SLOW_SECONDS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def put(there: Bucket, file: Path) -> int:
    shown: list[bytes] = []
    count = there.put_file("data", file, shown.append)
    assert b"".join(shown) == DATA
    return count


@pytest.mark.parametrize("what", ["500", "slow", "cut request", "change request"])
def test_a_part_that_goes_wrong_is_sent_again(door: Door, there: Bucket, file: Path, what: str) -> None:
    door.once(what, is_part)
    put(impatient(there) if what == "slow" else there, file)
    assert door.done == [what]
    assert there.get("data") == DATA
    parts = sum(map(is_part, door.seen))
    assert parts == 3 + 1, "the others are not sent again"


@pytest.mark.parametrize("what", ["500", "slow", "cut answer"])
def test_a_read_that_breaks_off_goes_on(door: Door, there: Bucket, file: Path, what: str) -> None:
    put(there, file)
    door.once(what, is_read_of("/data"))
    assert (impatient(there) if what == "slow" else there).get("data") == DATA
    assert door.done == [what]


def test_a_store_that_always_fails_is_given_up_with_a_sentence(door: Door, there: Bucket, file: Path) -> None:
    door.fault = lambda request: "cut request" if request.method == "PUT" else ""
    with pytest.raises(ObjectsError, match=r"s3://saves/.*/data can't be reached"):
        put(there, file)


def test_wrong_bytes_again_and_again_are_no_object(door: Door, there: Bucket, file: Path) -> None:
    door.fault = lambda request: "change request" if is_part(request) else ""
    with pytest.raises(ObjectsError):
        put(there, file)
    door.fault = lambda request: ""
    assert there.sizes() == {}


def test_what_was_sent_before_is_not_sent_again(door: Door, there: Bucket, file: Path) -> None:
    door.fault = lambda request: "500" if "partNumber=3" in request.path else ""
    with pytest.raises(ObjectsError):
        put(there, file)
    door.fault = lambda request: ""
    door.seen.clear()
    assert put(there, file) == 2 * PART
    assert sum(map(is_part, door.seen)) == 1
    assert there.get("data") == DATA


def test_without_credentials_a_sentence_says_so(
    door: Door, there: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ObjectsError, match="there are no credentials"):
        Bucket(there.url).sizes()


def test_a_bucket_that_is_not_there_is_named(door: Door) -> None:
    with pytest.raises(ObjectsError, match=r"s3://nowhere/a/step- is refused: NoSuchBucket"):
        Bucket("s3://nowhere/a").sizes("step-")


@pytest.mark.parametrize("text", ["s3:/a/b", "s3://", "http://a/b", "s3://A B/c"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form s3://BUCKET/PREFIX"):
        bucket.parse(text)


# Saves.


def save(
    root: Path, rank: int, step: int, content: bytes = b"state", *, shards: int = 1, start: int = 0
) -> Path:
    job = "one" if start else None  # also where hosts have a directory each
    identity = Identity(folders.open_directory(root, job), "", 2, rank, rank % shards, shards, start=start)
    with SaveFolder(root, identity, step, "rank", "builtin") as folder:
        (folder.path / "content").write_bytes(content)
        folder.add_existing()
        return folder.commit()[0]


def copier(
    there: Bucket,
    root: Path,
    ranks: tuple[int, ...] = (0, 1),
    keep: int = 2,
    start: Start = NO_START,
) -> tuple[ObjectCopier, list[str]]:
    said: list[str] = []
    saves = ObjectSaves(there, start)
    return ObjectCopier(saves, root, keep, ranks, lambda one: said.append(str(one))), said


def steps(there: Bucket) -> set[tuple[int, int]]:
    return {
        (step, rank)
        for (step, _, rank), files in ObjectSaves(there).files().items()
        if layout.METADATA_FILE in files
    }


def test_what_is_lost_comes_back_whole(there: Bucket, tmp_path: Path) -> None:
    ours, lost = tmp_path / "ckpt", tmp_path / "lost"
    for rank in range(2):
        save(ours, rank, 3, b"older", shards=2)
        save(ours, rank, 5, bytes([rank]) * 1000, shards=2)
    copier(there, ours)[0].look()
    fetched = ObjectSaves(there).fetch(lost, [0, 1])
    assert fetched is not None
    assert (fetched.step, fetched.saves) == (5, 2)
    assert folders.read_job(lost) == folders.read_job(ours)
    for record in folders.find(lost):
        assert folders.verify(record) is None
        assert (record.path / "content").read_bytes() == bytes([record.rank]) * 1000
    assert ObjectSaves(there).fetch(lost, [0, 1]) is None, "nothing is lacking any more"


@pytest.mark.parametrize("where", ["there", "on the way"])
def test_damage_is_passed_over_for_an_older_step(
    door: Door, there: Bucket, tmp_path: Path, where: str
) -> None:
    ours, lost = tmp_path / "ckpt", tmp_path / "lost"
    save(ours, 0, 3, b"older")
    save(ours, 0, 5)
    copier(there, ours)[0].look()
    if where == "there":
        there.put("step-0000000005/rank-00000/content", b"stale")
    else:
        content = is_read_of("step-0000000005/rank-00000/content")
        door.once("change answer", content, times=99)
    fetched = ObjectSaves(there).fetch(lost, [0])
    assert fetched is not None
    assert fetched.step == 3
    assert [record.step for record in folders.find(lost)] == [3]


def test_what_is_damaged_on_the_way_once_is_asked_for_again(
    door: Door, there: Bucket, tmp_path: Path
) -> None:
    save(tmp_path / "ckpt", 0, 5)
    copier(there, tmp_path / "ckpt")[0].look()
    door.once("change answer", is_read_of("/content"))
    fetched = ObjectSaves(there).fetch(tmp_path / "lost", [0])
    assert fetched is not None
    assert (fetched.step, door.done) == (5, ["change answer"])
    (record,) = folders.find(tmp_path / "lost")
    assert folders.verify(record) is None


def test_a_save_without_its_last_file_is_none(door: Door, there: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 0, 5)
    door.fault = lambda one: "500" if one.method == "PUT" and "metadata.json" in one.path else ""
    with pytest.raises(ObjectsError):
        copier(there, tmp_path / "ckpt")[0].look()
    door.fault = lambda one: ""
    assert ObjectSaves(there).fetch(tmp_path / "lost", [0]) is None


def test_damage_here_is_said_and_not_copied(there: Bucket, tmp_path: Path) -> None:
    folder = save(tmp_path / "ckpt", 0, 5)
    (folder / "content").write_bytes(b"stale")
    save(tmp_path / "ckpt", 1, 5)
    one, said = copier(there, tmp_path / "ckpt")
    one.look()
    assert steps(there) == {(5, 1)}
    assert "is damaged, and is not copied" in "".join(said)


def test_old_steps_go_once_newer_ones_are_whole(there: Bucket, tmp_path: Path) -> None:
    one, _ = copier(there, tmp_path / "ckpt", keep=1)
    for step in (1, 2, 3):
        for rank in range(2):
            if (step, rank) != (3, 1):
                save(tmp_path / "ckpt", rank, step, shards=2)
    one.look()
    assert steps(there) == {(2, 0), (2, 1), (3, 0)}, "step 3 is not whole yet"
    save(tmp_path / "ckpt", 1, 3, shards=2)
    one.look()
    assert steps(there) == {(3, 0), (3, 1)}


def test_later_steps_go_where_the_job_goes_on_from_an_older_one(there: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 0, 3)
    save(tmp_path / "ckpt", 0, 5)
    one, _ = copier(there, tmp_path / "ckpt")
    one.look()
    folders.set_aside_after(tmp_path / "ckpt", 3, 0)
    one.look()
    assert steps(there) == {(3, 0)}


def test_nothing_is_copied_twice(door: Door, there: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 0, 5)
    copier(there, tmp_path / "ckpt")[0].look()
    door.seen.clear()
    copier(there, tmp_path / "ckpt")[0].look()
    assert [one for one in door.seen if one.method == "PUT"] == []


def test_a_save_that_took_anothers_place_does_so_there(there: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 0, 5)
    one, _ = copier(there, tmp_path / "ckpt")
    one.look()
    save(tmp_path / "ckpt", 0, 5, b"other")
    one.look()
    assert ObjectSaves(there).fetch(tmp_path / "lost", [0]) is not None
    assert [(record.path / "content").read_bytes() for record in folders.find(tmp_path / "lost")] == [
        b"other"
    ]


def test_the_place_of_another_job_is_refused(there: Bucket, tmp_path: Path) -> None:
    save(tmp_path / "one", 0, 5)
    save(tmp_path / "other", 0, 7)
    copier(there, tmp_path / "one")[0].look()
    with pytest.raises(CheckpointError, match="holds saves of another job"):
        copier(there, tmp_path / "other")[0].look()


# A host that was cut off from the others, and not from the store.


def go_on(there: Bucket, root: Path, start: Start, step: int) -> ObjectCopier:
    """Begin a start in a directory, go on from a step there, and tell the store."""
    starts.note_begun(root, start)
    starts.note_going_on(root, start.number, step)
    one, _ = copier(there, root, start=start)
    one.look()
    return one


def content_of(there: Bucket, root: Path) -> dict[int, bytes]:
    """Return what a job that has lost everything finds in the store, by step."""
    ObjectSaves(there).fetch(root, [0])
    return {record.step: (record.path / "content").read_bytes() for record in folders.find(root)}


def test_who_was_cut_off_copies_and_removes_nothing(there: Bucket, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for root in (old, new):
        save(root, 0, 3, b"common", start=1)
    behind = go_on(there, old, FIRST, 0)
    go_on(there, new, SECOND, 3)
    before = there.sizes()
    save(old, 0, 5, b"cut off", start=1)
    with pytest.raises(Superseded, match=r"start 2 has begun in s3://saves/.*, and this is start 1"):
        behind.look()
    with pytest.raises(Superseded):
        ObjectSaves(there, FIRST).remove((3, "rank", 0))
    with pytest.raises(Superseded):
        ObjectSaves(there, FIRST).note_begun()
    assert there.sizes() == before
    assert content_of(there, tmp_path / "lost") == {3: b"common"}


def test_a_copy_that_lands_late_all_the_same_is_refused(
    door: Door, there: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on when a process that is cut off has looked for the last time."""
    old, new = tmp_path / "old", tmp_path / "new"
    for root in (old, new):
        save(root, 0, 3, b"common", start=1)
    behind = go_on(there, old, FIRST, 0)
    save(old, 0, 5, b"cut off", start=1)

    def fault(request: Request) -> str:
        if request.method == "PUT" and "step-0000000005/rank-00000/metadata.json" in request.path:
            door.fault = lambda request: ""
            go_on(there, new, SECOND, 3)
        return ""

    door.fault = fault
    behind.look()
    assert steps(there) == {(3, 0), (5, 0)}, "it has landed"
    assert content_of(there, tmp_path / "lost") == {3: b"common"}
    assert starts.read(tmp_path / "lost").went_on_from == {1: 0, 2: 3}, "nor does it count there"
    main(["inspect", there.url])
    assert "would go on from step 3." in capsys.readouterr().out


def test_a_late_copy_takes_no_later_ones_place(door: Door, there: Bucket, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for root in (old, new):
        save(root, 0, 3, b"common", start=1)
    behind = go_on(there, old, FIRST, 0)
    save(old, 0, 5, start=1)

    def fault(request: Request) -> str:
        if request.method == "PUT" and "step-0000000005/rank-00000/content" in request.path:
            door.fault = lambda request: ""
            save(new, 0, 5, start=2)
            go_on(there, new, SECOND, 3)
        return ""

    door.fault = fault
    with pytest.raises(Superseded):
        behind.look()
    assert ObjectSaves(there).metadata((5, "rank", 0)).identity.start == 2
    assert content_of(there, tmp_path / "lost") == {5: b"state"}


def test_a_process_goes_on_in_a_later_start(there: Bucket, tmp_path: Path) -> None:
    """What it had copied before may be gone, or another's by then."""
    save(tmp_path / "ckpt", 0, 3, start=1)
    one = go_on(there, tmp_path / "ckpt", FIRST, 0)
    ObjectSaves(there).remove((3, "rank", 0))
    starts.note_begun(tmp_path / "ckpt", SECOND)
    starts.note_going_on(tmp_path / "ckpt", 2, 3)
    one.begin(SECOND)
    one.look()
    assert steps(there) == {(3, 0)}
    known = ObjectSaves(there).starts()
    assert (known.newest, known.went_on_from) == (2, {1: 0, 2: 3})


def test_two_starts_of_one_number_are_told_apart(there: Bucket) -> None:
    ObjectSaves(there, FIRST).note_begun()
    ObjectSaves(there, FIRST).note_begun()
    with pytest.raises(Superseded, match="is of another start than this one"):
        ObjectSaves(there, Start(1, 51)).note_begun()


def test_an_object_is_put_where_none_is(door: Door, there: Bucket) -> None:
    assert there.put_new("a", b"one")
    assert there.put_new("a", b"one"), "as after an answer that was lost"
    assert not there.put_new("a", b"other")
    assert there.get("a") == b"one"
    door.seen.clear()
    assert there.put_new("b", b"")
    assert [request.method for request in door.seen] == ["PUT"], "looked and written in one moment"


def test_a_store_without_conditions_is_asked_first(door: Door, there: Bucket) -> None:
    door.once("501", lambda request: request.method == "PUT")
    assert there.put_new("a", b"one")
    assert door.done == ["501"]
    assert not there.put_new("a", b"other")
    assert there.get("a") == b"one"


def test_it_is_inspected_from_afar(
    door: Door, there: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        save(tmp_path / "ckpt", rank, 5, shards=2)
    copier(there, tmp_path / "ckpt")[0].look()
    assert main(["inspect", there.url]) == 0
    out = capsys.readouterr().out
    assert "A restart of this job of 2 ranks would go on from step 5." in out
    assert [one for one in door.seen if is_read_of("/content")(one)] == [], "no content is fetched"
    assert main(["inspect", "--verify", there.url]) == 0
    there.put("step-0000000005/rank-00001/content", b"stale")
    assert main(["inspect", there.url]) == 0
    assert main(["inspect", "--verify", there.url]) == 1
    damaged = f"{there.url}/step-0000000005/rank-00001/content is damaged"
    assert damaged in capsys.readouterr().out
    there.put("step-0000000005/rank-00000/content", b"cut")
    assert main(["inspect", there.url]) == 1
    out = capsys.readouterr().out
    assert f"{there.url}/step-0000000005/rank-00000/content has 3 bytes instead of 5" in out
    assert "/tmp/jitckpt-inspect" not in out
    assert main(["inspect", f"{there.url}/nothing"]) == 2
    assert "holds no saves of jitckpt" in capsys.readouterr().err


def test_requests_are_told_apart() -> None:
    assert is_part(Request("PUT", "/saves/a?partNumber=1&uploadId=x"))
    assert not is_part(Request("PUT", "/saves/a"))
