"""`jitckpt export`: what torch and safetensors read, without jitckpt, is what the training had."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from programs_of_tests import text_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

TRAINING = str(Path(__file__).parent / "sharded_training.py")
STEPS = 8


def train(launcher: Launcher, form: str, ranks: int, *more: str) -> None:
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(ranks), "--warm-spares", "0"]
    options = ["--checkpoint-dir", "ckpt", "--max-restarts", "0", TRAINING, form, "--save-every", str(STEPS)]
    launcher.succeed(*run, *options, *more)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {
            name: leaf for key, one in tree.items() for name, leaf in leaves(one, f"{path}/{key}").items()
        }
    if isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        return leaves(dict(enumerate(tree)), path)
    return {path: tree}


def assert_alike(some: Any, other: Any) -> None:
    some, other = leaves(some), leaves(other)
    assert some.keys() == other.keys()
    for name, value in some.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize(("form", "ranks"), [("replicated", 2), ("full", 3), ("fsdp2", 4), ("tensor", 4)])
def test_every_layout_comes_back_bit_for_bit(launcher: Launcher, form: str, ranks: int) -> None:
    train(launcher, form, ranks, "--state", "state.pt")
    here = launcher.directory
    out = launcher.succeed(*JITCKPT, "export", "--dcp", "dcp", "--safetensors", "files", "ckpt")
    assert f"Step {STEPS} is in dcp." in out
    expected = torch.load(here / "state.pt")

    found = empty_like(expected)
    load(found, storage_reader=FileSystemReader(here / "dcp"), no_dist=True)
    assert_alike(found, expected)

    assert_alike(load_file(here / "files" / "model.safetensors"), expected["model"])
    optimizer = {
        f"{name}.{key}": value
        for name, state in expected["optim"]["state"].items()
        for key, value in state.items()
    }
    assert_alike(load_file(here / "files" / "optimizer.safetensors"), optimizer)
    assert json.loads((here / "files" / "training.json").read_text())["step"] == STEPS


RESHARDED = text_of("export_resharded")


@pytest.mark.parametrize(
    ("form", "ranks", "other", "fewer"), [("full", 3, "full", 2), ("full", 2, "fsdp2", 4)]
)
def test_another_world_size_and_mesh_load_the_same(
    launcher: Launcher, form: str, ranks: int, other: str, fewer: int
) -> None:
    train(launcher, form, ranks, "--state", "state.pt")
    launcher.succeed(*JITCKPT, "export", "--dcp", "dcp", "ckpt")
    script = launcher.script(RESHARDED)
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(fewer), "--warm-spares", "0"]
    launcher.succeed(*run, script, other, "dcp", "resharded.pt")
    expected = torch.load(launcher.directory / "state.pt")
    assert_alike(torch.load(launcher.directory / "resharded.pt"), expected)


def empty_like(tree: Any) -> Any:
    """Return the tree as a fresh training has it: other numbers, the same names and shapes."""
    if isinstance(tree, dict):
        return {key: empty_like(one) for key, one in tree.items()}
    if isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        return [empty_like(one) for one in tree]
    return torch.full_like(tree, 77) if isinstance(tree, Tensor) else None
