"""A whole tensor from the parts that shards hold, and what is refused in the place of a guess."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitckpt.cli import main
from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError, SaveError
from jitckpt.formats import parts, training_state, whole_step
from jitckpt.formats.parts import Piece
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_a_grid_of_pieces_makes_the_tensor(
    rows: int, columns: int, down: int, across: int, random: Any
) -> None:
    whole = torch.arange(rows * columns).reshape(rows, columns)
    pieces = [
        Piece(whole[top : top + down, left : left + across], (top, left))
        for top in range(0, rows, down)
        for left in range(0, columns, across)
    ]
    pieces += [Piece(pieces[0].tensor.clone(), pieces[0].offsets), Piece(torch.empty(0, columns), (rows, 0))]
    random.shuffle(pieces)
    assert torch.equal(parts.joined("w", whole.shape, pieces).whole(), whole)


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(torch.zeros(2, 2), (0, 0))],  # a hole
        [Piece(torch.zeros(3, 2), (0, 0)), Piece(torch.zeros(1, 2), (2, 0))],  # an overlap beside a hole
        [Piece(torch.zeros(2, 2), (0, 0)), Piece(torch.zeros(2, 2), (3, 0))],  # beyond the end
        [Piece(torch.zeros(2, 2), (0, 0)), Piece(torch.zeros(2, 2), (2, 0)), Piece(torch.ones(2, 2), (0, 0))],
        [Piece(torch.zeros(2, 2), (0, 0)), Piece(torch.zeros(2, 2).half(), (2, 0))],
    ],
)
def test_what_makes_no_tensor_is_refused(pieces: list[Piece]) -> None:
    with pytest.raises(SaveError, match=r"parts? of w"):
        parts.joined("w", [4, 2], pieces)


def document(**more: Any) -> dict[str, Any]:
    progress: dict[str, Any] = {"groups": [], "schedulers": []}
    return {
        "optimizers": [],
        "progress": tree_codec.encode(progress, "progress").tree,
        "scheduler_steps_due": [],
        "scaler": None,
        "local": {"trees": {}},
        "cuts": {},
        "frozen": [],
        "aliases": {},
        **more,
    }


def save(
    root: Path, shard: int, tensors: dict[str, Tensor], shards: int = 2, step: int = 1, **more: Any
) -> Path:
    identity = Identity(folders.open_directory(root), "", shards, shard, shard, shards)
    with SaveFolder(root, identity, step, "rank", "builtin") as folder:
        folder.add_tensors(layout.TENSORS_FILE, tensors)
        folder.add_json(layout.STATE_FILE, document(**more))
        return folder.commit()[0]


def test_parts_of_which_nobody_says_where_they_begin_are_refused(tmp_path: Path) -> None:
    for shard in range(2):
        cut = {"0._flat_param": {"shape": [2], "offsets": None}}
        save(tmp_path, shard, {"model.0._flat_param": torch.full((2,), shard)}, cuts=cut)
    with pytest.raises(
        SaveError, match=r"No save says where each shard's part of the parameter 0\._flat_param"
    ):
        training_state.gather(whole_step.find(tmp_path))


def test_stages_that_call_their_layers_alike_are_refused(tmp_path: Path) -> None:
    for shard in range(2):
        save(tmp_path, shard, {"model.0.weight": torch.full((2,), shard)})
    with pytest.raises(SaveError, match=r"different values of the parameter 0\.weight"):
        training_state.gather(whole_step.find(tmp_path))


def test_a_save_without_notes_on_its_cuts_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 0, {}, shards=1)
    old = document()
    del old["cuts"]
    identity = Identity(folders.open_directory(tmp_path), "", 1, 0, 0, 1)
    with SaveFolder(tmp_path, identity, 1, "rank", "builtin") as again:
        again.add_tensors(layout.TENSORS_FILE, {})
        again.add_json(layout.STATE_FILE, old)
        assert again.commit()[0] == folder
    with pytest.raises(SaveError, match="did not note how tensors are cut"):
        training_state.gather(whole_step.find(tmp_path))


def test_a_damaged_step_is_passed_over_and_said(tmp_path: Path) -> None:
    for step in (1, 2):
        for shard in range(2):
            folder = save(tmp_path, shard, {"model.w": torch.ones(2)}, step=step)
    assert [record.step for record in whole_step.find(tmp_path)] == [2, 2]
    data = bytearray((folder / layout.TENSORS_FILE).read_bytes())
    data[-1] ^= 1
    (folder / layout.TENSORS_FILE).write_bytes(data)
    assert [record.step for record in whole_step.find(tmp_path)] == [1, 1]
    with pytest.raises(CheckpointError, match=r"no whole step 2: .* is damaged.*no whole save of shard 1"):
        whole_step.find(tmp_path, 2)


def test_what_another_layout_has_left_of_a_step_is_passed_over(tmp_path: Path) -> None:
    """Three ranks came to a step, and two of them saved it; then two ranks did, which had gone on before."""
    for shard in (1, 2):
        save(tmp_path, shard, {"model.w": torch.zeros(2)}, shards=3)
    for shard in range(2):
        save(tmp_path, shard, {"model.w": torch.ones(2)})
    found = whole_step.find(tmp_path)
    assert [whole_step.laid_out(one.metadata.identity)[0] for one in found if one.metadata] == [2, 2]


def test_tensors_are_cut_into_files_as_hugging_face_reads_them(tmp_path: Path) -> None:
    from jitckpt.formats import safetensors_files

    tensors = {f"model.{name}": torch.full((4,), number) for number, name in enumerate("abc")}
    save(tmp_path / "ckpt", 0, tensors, shards=1)
    state = training_state.gather(whole_step.find(tmp_path / "ckpt"))
    safetensors_files.write(state, tmp_path / "out", file_bytes=64)
    index = layout.parse_object((tmp_path / "out" / "model.safetensors.index.json").read_bytes(), "the index")
    assert index["metadata"]["total_size"] == 96
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_nothing_is_written_over_or_left_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "ckpt", 0, {"model.w": torch.ones(2)}, shards=1)
    target = tmp_path / "dcp"
    assert main(["export", str(tmp_path / "ckpt"), "--dcp", str(target)]) == 0
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "ckpt"), "--dcp", str(target)])
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "ckpt"), "--dcp", str(tmp_path / "no" / "dir"), "--step", "9"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "dcp"]


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_part_can_be_cut_out_of_any_pieces(
    rows: int, columns: int, down: int, across: int, data: st.DataObject
) -> None:
    whole = torch.arange(rows * columns).reshape(rows, columns)
    pieces = [
        Piece(whole[top : top + down, left : left + across], (top, left))
        for top in range(0, rows, down)
        for left in range(0, columns, across)
    ]
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    height, width = data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left))
    part = parts.joined("w", whole.shape, pieces).part((top, left), (height, width))
    assert torch.equal(part, whole[top : top + height, left : left + width])


def test_a_number_is_a_part_of_itself() -> None:
    assert parts.joined("n", (), [Piece(torch.tensor(7), ())]).part((), ()) == 7
