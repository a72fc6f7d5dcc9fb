"""jitckpt inspect: every save with its verdict, and the step that a restart takes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitckpt.cli import main
from jitckpt.errors import CheckpointError
from jitckpt.reports.inspection import Inspection, inspect
from jitckpt.saves import folders, layout, selection
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity


def identity(root: Path, rank: int, shard: int = 0, shards: int = 1, world_size: int = 2) -> Identity:
    return Identity(folders.open_directory(root), f"model {shard}", world_size, rank, shard, shards)


def save(root: Path, step: int, own: Identity, kind: layout.Kind = "rank") -> Path:
    with SaveFolder(root, own, step, kind, "builtin" if kind == "rank" else "ring") as folder:
        folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.arange(100.0) + step})
        folder.add_json(layout.STATE_FILE, {"step": step})
        return folder.commit()[0]


def damage(path: Path) -> None:
    file = path / layout.TENSORS_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def states(found: Inspection) -> dict[str, str]:
    return {save.path.removeprefix("step-00000000"): save.state for save in found.saves}


def test_an_empty_directory_is_a_fresh_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path).status == 3
    assert main(["inspect", str(tmp_path)]) == 3
    assert capsys.readouterr().out == "Nothing is saved whole: a restart would begin at step 0.\n"
    assert list(tmp_path.iterdir()) == [], "looking changes nothing"


def test_the_newest_whole_step_is_taken_and_each_rank_s_load_is_told(tmp_path: Path) -> None:
    save(tmp_path, 19, identity(tmp_path, 0))
    save(tmp_path, 20, identity(tmp_path, 0))
    save(tmp_path, 20, identity(tmp_path, 1), kind="local")
    found = inspect(tmp_path)
    assert (found.restart, found.status, found.world_size, found.shards) == (20, 0, 2, 1)
    folder = "step-0000000020"
    assert [(load.rank, load.save, load.local) for load in found.loads] == [
        (0, f"{folder}/rank-00000", f"{folder}/rank-00000"),
        (1, f"{folder}/rank-00000", f"{folder}/local-00001"),
    ]
    assert [step.step for step in found.steps if step.whole] == [20, 19]
    size = sum(file.stat().st_size for file in (tmp_path / folder / "rank-00000").iterdir())
    assert found.saves[1].bytes == size


def test_a_step_without_one_of_its_shards_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        save(tmp_path, 7, identity(tmp_path, rank, rank % 2, 2, 4))
    save(tmp_path, 8, identity(tmp_path, 1, 1, 2, 4))
    found = inspect(tmp_path)
    assert found.restart == 7
    assert [(step.step, step.whole, step.reason) for step in found.steps] == [
        (8, False, "no whole save of shard 0"),
        (7, True, ""),
    ]
    assert [load.shard for load in found.loads] == [0, 1, 0, 1]
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Step 8 is not whole: no whole save of shard 0." in capsys.readouterr().out


def test_ranks_of_unknown_shards_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        save(tmp_path, 7, identity(tmp_path, rank, rank, 2, 4))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Of 2 of its ranks no save says which shard they hold." in capsys.readouterr().out


def test_damage_that_only_a_checksum_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 19, identity(tmp_path, 0))
    damage(save(tmp_path, 20, identity(tmp_path, 0)))
    assert inspect(tmp_path).restart == 20
    found = inspect(tmp_path, checksums=True)
    assert (found.restart, found.status) == (19, 1)
    assert states(found) == {"20/rank-00000": "unusable", "19/rank-00000": "whole"}
    assert main(["inspect", "--verify", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "tensors.safetensors is damaged: its checksum is not the one in metadata.json." in shown.out
    assert "would go on from step 19" in shown.out


def test_foreign_damaged_unfinished_and_unknown_things_have_their_reasons(tmp_path: Path) -> None:
    own = identity(tmp_path, 0)
    save(tmp_path, 20, own)
    save(tmp_path, 21, replace(own, job="another"))
    save(tmp_path, 22, replace(own, world_size=3, rank=1))
    cut = save(tmp_path, 23, own)
    (cut / layout.STATE_FILE).write_bytes(b"")
    (save(tmp_path, 24, own) / layout.METADATA_FILE).write_bytes(b"{")
    folder = tmp_path / layout.step_folder(20)
    for name in (
        "unfinished-rank-00001",
        "unfinished-periodic-rank-00001",
        "replaced-rank-00001",
        "set-aside-rank-00001",
        "mine",
        "rank-00007",
    ):
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(b"12345")
    (folder / "error-rank-00001.txt").write_text("Traceback")
    found = inspect(tmp_path)
    reasons = {save.path.removeprefix("step-00000000"): save.reason for save in found.saves}
    assert states(found) == {
        "20/rank-00000": "whole",
        "20/rank-00007": "unfinished",
        "20/unfinished-rank-00001": "unfinished",
        "20/unfinished-periodic-rank-00001": "unfinished",
        "20/replaced-rank-00001": "unfinished",
        "20/set-aside-rank-00001": "set aside",
        "20/mine": "other",
        "20/error-rank-00001.txt": "other",
        "21/rank-00000": "unusable",
        "22/rank-00001": "unusable",
        "23/rank-00000": "unusable",
        "24/rank-00000": "unusable",
    }
    assert "is of another job" in reasons["21/rank-00000"]
    assert "with 3 ranks; this one has 2" in reasons["22/rank-00001"]
    assert "has 0 bytes instead of" in reasons["23/rank-00000"]
    assert "metadata.json is damaged" in reasons["24/rank-00000"]
    assert "never finished" in reasons["20/rank-00007"]
    assert "the traceback of a save that failed" in reasons["20/error-rank-00001.txt"]
    assert next(save for save in found.saves if save.path.endswith("mine")).bytes == 5
    assert (found.restart, found.status) == (20, 1)


def test_a_refusal_is_that_of_the_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = identity(tmp_path, 0)
    shutil.rmtree(save(tmp_path, 20, own) / layout.STATE_FILE, ignore_errors=True)
    (tmp_path / layout.step_folder(20) / "rank-00000" / layout.STATE_FILE).unlink()
    with pytest.raises(CheckpointError) as refused:
        selection.choose(folders.find(tmp_path), own, folders.verify)
    found = inspect(tmp_path, checksums=True)
    assert (found.restart, found.refusal, found.status) == (None, str(refused.value), 1)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "A restart would stop with this error: The checkpoint directory holds" in capsys.readouterr().out


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 20, identity(tmp_path, 0))
    assert main(["inspect", "--json", "--verify", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["restart"], document["status"], document["verified"]) == (20, 0, True)
    assert document["saves"][0]["path"] == "step-0000000020/rank-00000"
    assert document["loads"][1] == {
        "rank": 1, "shard": 0, "save": "step-0000000020/rank-00000", "local": None
    }  # fmt: skip


def test_a_directory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", "/no/such/folder"])
    assert caught.value.code == 2
    assert "there is no directory /no/such/folder" in capsys.readouterr().err
