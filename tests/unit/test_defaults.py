"""What a script sets for all of torch (default device and type ...) does not matter to jitckpt."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import jitckpt
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tensor_file, tree_codec
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state.optimizer_state import OptimizerState, on_host

PACKAGE = Path(jitckpt.__file__).parent
RANK = Identity("job", "fingerprint", 1, 0, 0, 1)
# Those whose result lies where the script wants it, unless they are told where; and those whose type, too.
PLACED = frozenset(
    [
        "empty",
        "empty_strided",
        "ones",
        "zeros",
        "full",
        "arange",
        "eye",
        "linspace",
        "rand",
        "randn",
        "randint",
        "randperm",
        "range",
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "asarray",
        "tril_indices",
        "triu_indices",
    ]
)
UNTYPED = PLACED - {"randint", "randperm", "tril_indices", "triu_indices", "as_tensor", "asarray"}


def sources() -> list[Path]:
    return sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "hooks").resolve().rglob("*.py")})


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_every_tensor_that_is_made_says_where_it_lies_and_of_what_type(path: Path) -> None:
    lacking = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in PLACED:
                given = {keyword.arg for keyword in node.keywords}
                needed = {"device", "dtype"} if name in UNTYPED else {"device"}
                if not needed <= given:
                    lacking.append(f"{path}:{node.lineno}: torch.{name} lacks {needed - given}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr)) if attr.startswith(
                "set_default"
            ):
                lacking.append(f"{path}:{node.lineno}: torch.{attr} is the script's")
            case ast.ImportFrom(module="torch", names=names):
                lacking += [
                    f"{path}: {one.name} is imported by itself" for one in names if one.name in PLACED
                ]
    assert not lacking


@pytest.fixture(params=["device", "double", "deterministic", "no gradients"])
def default(request: pytest.FixtureRequest) -> Iterator[str]:
    """Something that a script has set. On the device "meta" tensors have no values."""
    match request.param:
        case "device":
            torch.set_default_device("meta")
        case "double":
            torch.set_default_dtype(torch.float64)
        case "deterministic":
            torch.use_deterministic_algorithms(True)
        case "no gradients":
            torch.set_grad_enabled(False)
    yield request.param
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "plain": torch.arange(6, dtype=torch.float32, device="cpu").view(2, 3),
        "turned": torch.arange(6, dtype=torch.float32, device="cpu").view(2, 3).t(),
        "empty": torch.empty(0, dtype=torch.float16, device="cpu"),
    }


def check(found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].device == value.device
        assert found[name].dtype == value.dtype
        assert found[name].equal(value)


def test_values_are_encoded_and_decoded(default: str, tensors: dict[str, torch.Tensor]) -> None:
    encoded = tree_codec.encode({**tensors, "bytes": b"x", "none": b""}, "t")
    decoded = tree_codec.decode(encoded.tree, encoded.tensors)
    assert (decoded.pop("bytes"), decoded.pop("none")) == (b"x", b"")
    check(decoded, tensors)


def test_tensors_are_saved_and_read(default: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with SaveFolder(tmp_path, RANK, 1, "rank", "builtin") as folder:
        folder.add_tensors("tensors.safetensors", tensors)
        folder.commit()
    (record,) = folders.find(tmp_path)
    check(tensor_file.read(record.path / "tensors.safetensors"), tensors)


def test_a_ring_keeps_what_a_rank_alone_knows(default: str, tensors: dict[str, torch.Tensor]) -> None:
    memory = local_state.create()
    recorder = Recorder(Ring(memory, RANK, 4, 2 << 20), lambda *_: None, print)
    part = tree_codec.encode(tensors, "extra")
    recorder.write(1, final=True, parts={"extra": part, "random": RandomState(None).capture()})
    (state,) = local_state.read(memory)
    assert not state.missing
    check(tree_codec.decode(state.trees["extra"], state.tensors), tensors)


def test_an_optimizers_numbers_come_back(default: str) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.full((), 7.0, dtype=torch.float32, device="cpu")}
    encoded = OptimizerState(optimizer, "optimizer.0").capture().on_host()
    step = on_host(encoded.tree, encoded.tensors, None)[0]["step"]
    assert (step.device.type, step.dtype, step.item()) == ("cpu", torch.float32, 7.0)
