"""The names in a checkpoint directory and the metadata document."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.errors import SaveError
from jitckpt.saves import layout
from jitckpt.saves.layout import FileEntry, Identity, Metadata

counts = st.integers(0, 2**63 - 1)
names = st.lists(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=3,
).map("/".join)
metadata = st.builds(
    Metadata,
    identity=st.tuples(st.text(), st.text(), counts, counts, counts, counts)
    .map(lambda t: Identity(t[0], t[1], max(t[2], t[3] + 1), t[3], t[4], max(t[5], t[4] + 1)))
    .filter(lambda i: i.world_size < 2**63 and i.shards < 2**63),
    kind=st.sampled_from(["rank", "local"]),
    saver=st.sampled_from(["builtin", "callback", "ring"]),
    step=counts,
    time=st.floats(0, 2e11),
    files=st.lists(
        st.builds(FileEntry, names, counts, st.integers(0, 2**128 - 1).map(lambda n: f"{n:032x}")),
        max_size=3,
        unique_by=lambda file: file.name,
    ).map(tuple),
)


def unsigned(value: Metadata) -> dict[str, Any]:
    content = json.loads(value.to_json())
    del content["checksum"]
    return dict(content)


@given(metadata)
def test_metadata_comes_back(value: Metadata) -> None:
    assert layout.parse_metadata(value.to_json()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_metadata_or_a_save_error(data: bytes) -> None:
    with pytest.raises(SaveError, match=r"metadata\.json"):
        layout.parse_metadata(data)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=5,
)


@given(metadata, st.data())
def test_one_changed_field_is_metadata_or_a_save_error(value: Metadata, data: st.DataObject) -> None:
    content = unsigned(value)
    holder = data.draw(st.sampled_from([content, content["identity"], *content["files"]]))
    key = data.draw(st.sampled_from(sorted(holder)))
    if data.draw(st.booleans()):
        holder[key] = data.draw(json_values)
    else:
        del holder[key]
    with suppress(SaveError):
        assert isinstance(layout.parse_metadata(layout.with_checksum(content)), Metadata)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"format":' + b"9" * 5000 + b"}",
        b'{"format":2}',
        b'{"format":true}',
        b"\xff",
        b"NaN",
    ],
)
def test_hostile_documents_are_refused(data: bytes) -> None:
    with pytest.raises(SaveError, match=r"^metadata\.json"):
        layout.parse_metadata(data)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a\0b", "a\ud800", "metadata.json"]
)
def test_a_file_outside_the_save_is_refused(name: str) -> None:
    good = Metadata(Identity("j", "f", 2, 1, 0, 1), "rank", "builtin", 3, 1.0, (FileEntry("x", 1, "0" * 32),))
    content = unsigned(good)
    content["files"][0]["name"] = name
    with pytest.raises(SaveError, match="no path inside the save"):
        layout.parse_metadata(layout.with_checksum(content))


@given(counts.filter(lambda step: step < 10**17), st.integers(0, 10**8), st.sampled_from(["rank", "local"]))
def test_folder_names_come_back(step: int, rank: int, kind: layout.Kind) -> None:
    assert layout.parse_step_folder(layout.step_folder(step)) == step
    assert layout.parse_rank_folder(layout.rank_folder(kind, rank)) == (kind, rank)


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-00000000010x",
        "rank-1",
        "rank-000001",
        "unfinished-rank-00001",
        "set-aside-rank-00001",
        "rank-0000\u0661",
        "",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert layout.parse_step_folder(name) is None
    assert layout.parse_rank_folder(name) is None


GOOD = Metadata(Identity("j", "f", 2, 1, 0, 1), "rank", "builtin", 3, 1.0, (FileEntry("x", 1, "0" * 32),))


def test_every_damaged_byte_of_metadata_is_noticed() -> None:
    whole = GOOD.to_json()
    for place in range(len(whole)):
        for byte in (whole[place] ^ 1, ord(" "), ord("0")):
            damaged = whole[:place] + bytes([byte]) + whole[place + 1 :]
            if damaged != whole:
                with pytest.raises(SaveError, match=r"^metadata\.json"):
                    layout.parse_metadata(damaged)
    for length in range(len(whole)):
        with pytest.raises(SaveError, match=r"^metadata\.json"):
            layout.parse_metadata(whole[:length])


@pytest.mark.parametrize("time", [-1.0, 1e300])
def test_a_time_that_is_no_date_is_refused(time: float) -> None:
    with pytest.raises(SaveError, match="time"):
        layout.parse_metadata(layout.with_checksum(unsigned(GOOD) | {"time": time}))


def test_an_older_format_is_refused_with_what_reads_it() -> None:
    older = json.dumps(unsigned(GOOD) | {"format": 2}).encode()
    with pytest.raises(SaveError, match="has format 2; this jitckpt reads format 3"):
        layout.parse_metadata(older)
