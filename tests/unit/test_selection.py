"""Which step a job goes on from, and what each rank loads."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.errors import CheckpointError
from jitckpt.saves import layout, selection
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity, Metadata

JOB = Identity(job="j", fingerprint="f", world_size=4, rank=0, shard=0, shards=1)


def record(
    step: int,
    rank: int,
    *,
    shard: int = 0,
    kind: layout.Kind = "rank",
    identity: Identity = JOB,
    nothing_before: bool = False,
) -> SaveRecord:
    path = Path("/c") / layout.step_folder(step) / layout.rank_folder(kind, rank)
    own = replace(identity, rank=rank, shard=shard)
    metadata = Metadata(own, kind, "builtin", step, 0.0, (), nothing_before)
    return SaveRecord(path, step, kind, rank, metadata)


def unfinished(step: int, rank: int) -> SaveRecord:
    return SaveRecord(Path("/c/u"), step, "rank", rank, None, "/c/u was never finished.", finished=False)


def whole(_record: SaveRecord) -> None:
    return None


def test_an_empty_directory_is_a_fresh_start() -> None:
    assert selection.choose([], JOB, whole) is None


def test_unfinished_saves_are_a_fresh_start() -> None:
    assert selection.choose([unfinished(3, 0)], JOB, whole) is None


def test_the_newest_step_is_taken() -> None:
    choice = selection.choose([record(5, 1), record(6, 2), record(4, 0)], JOB, whole)
    assert choice is not None
    assert (choice.step, choice.save.rank, choice.local) == (6, 2, None)


def test_a_rank_prefers_its_own_save() -> None:
    saves = [record(5, rank) for rank in range(4)]
    for rank in range(4):
        choice = selection.choose(saves, replace(JOB, rank=rank), whole)
        assert choice is not None
        assert choice.save.rank == rank
        assert choice.local is choice.save


def test_ranks_without_a_save_share_the_reading() -> None:
    saves = [record(5, rank) for rank in (0, 1)]
    chosen = []
    for rank in (2, 3):
        choice = selection.choose(saves, replace(JOB, rank=rank), whole)
        assert choice is not None
        chosen.append(choice.save.rank)
    assert sorted(chosen) == [0, 1]


def test_a_rank_takes_its_own_local_state_beside_a_replicas_save() -> None:
    saves = [record(5, 1), record(5, 0, kind="local"), record(5, 2, kind="local"), record(4, 0, kind="local")]
    choice = selection.choose(saves, JOB, whole)
    assert choice is not None
    assert choice.local == saves[1]


def test_damaged_local_state_is_passed_over_with_a_reason() -> None:
    local = record(5, 0, kind="local")
    choice = selection.choose([record(5, 1), local], JOB, lambda r: "it is cut." if r is local else None)
    assert choice is not None
    assert choice.local is None
    assert choice.reasons == ("it is cut.",)


def test_damaged_saves_are_passed_over_with_a_reason() -> None:
    bad = {(6, 0), (6, 1), (5, 0)}
    saves = [record(step, rank) for step in (4, 5, 6) for rank in (0, 1)]
    choice = selection.choose(
        saves, JOB, lambda r: f"{r.step}/{r.rank} is bad." if (r.step, r.rank) in bad else None
    )
    assert choice is not None
    assert (choice.step, choice.save.rank) == (5, 1)
    assert choice.reasons == (
        "6/0 is bad.",
        "6/1 is bad.",
        "Step 6 has no whole save of shard 0.",
        "5/0 is bad.",
    )


def test_every_shard_must_be_there() -> None:
    job = replace(JOB, shards=2)
    saves = [record(6, 0, identity=job), record(5, 0, identity=job), record(5, 1, shard=1, identity=job)]
    choice = selection.choose(saves, replace(job, rank=3, shard=1), whole)
    assert choice is not None
    assert (choice.step, choice.save.rank) == (5, 1)
    with pytest.raises(CheckpointError, match=r"Step 6 has no whole save of shard 1\."):
        selection.choose(saves[:1], job, whole)


def test_a_job_whose_first_save_was_never_finished_begins_anew() -> None:
    job = replace(JOB, shards=2)
    first = record(6, 0, identity=job, nothing_before=True)
    told: list[str] = []
    assert selection.choose([first], job, whole, told.append) is None
    assert told == [selection.begun_anew(["Step 6 has no whole save of shard 1."])]
    other = record(6, 1, shard=1, identity=job, nothing_before=True)
    choice = selection.choose([first, other], job, whole)
    assert choice is not None
    assert choice.step == 6
    with pytest.raises(CheckpointError, match="is cut"):  # it was whole once
        selection.choose([first, other], job, lambda found: "It is cut." if found is other else None)
    with pytest.raises(CheckpointError, match="Step 7 has no whole save of shard 1"):
        selection.choose([first, record(7, 0, identity=job)], job, whole)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (replace(JOB, job="other"), r"is of another job \(other instead of j\)"),
        (replace(JOB, world_size=8), "is of a job with 8 ranks; this one has 4"),
        (replace(JOB, shards=2), "is of a job with 2 shards; this one has 1"),
        (replace(JOB, fingerprint="x"), "is of another model or optimizer"),
    ],
)
def test_saves_that_dont_fit_are_an_error_rather_than_a_fresh_start(found: Identity, sentence: str) -> None:
    saves = [record(5, 1, identity=found)]
    with pytest.raises(
        CheckpointError, match=f"{sentence}.* begin anew in another directory; with .*jitckpt run --reshard"
    ):
        selection.choose(saves, JOB, whole)
    choice = selection.choose([*saves, record(2, 1)], JOB, whole)
    assert choice is not None
    assert choice.step == 2
    assert len(choice.reasons) == 1


def test_only_damaged_saves_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="is cut"):
        selection.choose([record(5, 1)], JOB, lambda r: f"{r.path} is cut.")


def test_many_reasons_are_counted() -> None:
    saves = [record(step, 1) for step in range(1, 30)]
    with pytest.raises(CheckpointError, match=r"and 50 more"):
        selection.choose(saves, JOB, lambda r: "It is cut.")


def test_an_unknown_fingerprint_fits_all() -> None:
    assert selection.choose([record(5, 1)], replace(JOB, fingerprint=""), whole) is not None


@given(
    st.integers(1, 3),
    st.sets(st.tuples(st.integers(1, 4), st.integers(0, 5))),
    st.sets(st.tuples(st.integers(1, 4), st.integers(0, 5))),
)
def test_all_ranks_come_to_the_same_step(
    shards: int, present: set[tuple[int, int]], damaged: set[tuple[int, int]]
) -> None:
    job = replace(JOB, world_size=6, shards=shards)
    saves = [record(step, rank, shard=rank % shards, identity=job) for step, rank in sorted(present)]
    good = present - damaged
    steps = {
        step for step in range(1, 5) if {rank % shards for s, rank in good if s == step} == set(range(shards))
    }

    def verify(r: SaveRecord) -> str | None:
        return "It is cut." if (r.step, r.rank) in damaged else None

    for rank in range(6):
        expected = replace(job, rank=rank, shard=rank % shards)
        if steps:
            choice = selection.choose(saves, expected, verify)
            assert choice is not None
            near = {step for step in steps if step >= max(steps) - selection.EXACT_WITHIN}
            exact = {step for step in near if {(step, other) for other in range(6)} <= present}
            assert choice.step == max(exact or steps)
            assert choice.save.rank % shards == rank % shards
            assert verify(choice.save) is None
        elif present:
            with pytest.raises(CheckpointError):
                selection.choose(saves, expected, verify)
        else:
            assert selection.choose(saves, expected, verify) is None


def test_what_the_training_has_built_otherwise_its_names_tell() -> None:
    grown = record(5, 0, identity=JOB.restructured())
    now = replace(JOB, fingerprint="of the grown model")
    for expected in (JOB, now):  # as the script built it at first, and as it was then
        choice = selection.choose([grown], expected, whole)
        assert choice is not None
        assert choice.step == 5
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        selection.choose([record(5, 0)], now, whole)


def test_what_a_rank_knows_alone_belongs_to_the_save_that_is_taken() -> None:
    others, own = record(5, 1, identity=JOB.restructured()), record(5, 0, kind="local")
    choice = selection.choose([others, own], replace(JOB, fingerprint="of the grown model"), whole)
    assert choice is not None
    assert choice.local == own
