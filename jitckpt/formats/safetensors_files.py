"""A job's state as safetensors files, cut and indexed as Hugging Face's libraries read them.

model*.safetensors     the model's state dict
optimizer*.safetensors the optimizers' tensors, called PARAMETER.KEY
training.json          step, parameter groups and all that is no tensor
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from jitckpt.encoding import tree_codec
from jitckpt.errors import SaveError, TreeError
from jitckpt.formats.parts import Parted
from jitckpt.formats.training_state import TrainingState

FILE_BYTES = 5 << 30  # of tensors in one file at most, which are in memory together; a larger tensor is alone


def write(state: TrainingState, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write the files into a folder, which is made. Raises SaveError for a type that safetensors lacks."""
    folder.mkdir(parents=True)
    flat = {
        f"{name}.{key}": value
        for name, values in state.optimizer_state.items()
        for key, value in values.items()
    }
    rest: dict[str, Any] = {}
    for what, named in (("model", state.model), ("optimizer", flat)):
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor | Parted)}
        rest[what] = {name: value for name, value in named.items() if name not in tensors}
        if tensors:
            _write_tensors(folder, what, tensors, file_bytes)
    document = {
        "step": state.step,
        "param_groups": state.groups,
        "schedulers": state.schedulers,
        "scaler": state.scaler,
        **{key: value for key, value in rest.items() if value},
    }
    try:
        encoded = tree_codec.encode(document, "training")
    except TreeError as error:
        raise SaveError(str(error)) from error
    if encoded.tensors:
        _save(folder / "training.safetensors", encoded.tensors)
    (folder / "training.json").write_text(json.dumps(encoded.tree, indent=1, allow_nan=False))


def _write_tensors(folder: Path, what: str, tensors: Mapping[str, Tensor | Parted], file_bytes: int) -> None:
    files = list(_cut(tensors, file_bytes))
    if len(files) == 1:
        _save(folder / f"{what}.safetensors", _whole(tensors, files[0]))
        return
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"{what}-{number:05d}-of-{len(files):05d}.safetensors"
        _save(folder / file, _whole(tensors, names))
        where |= dict.fromkeys(names, file)
    total = sum(map(_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{what}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _cut(tensors: Mapping[str, Tensor | Parted], file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + _bytes(tensor) > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(tensor)
    yield names


def _bytes(tensor: Tensor | Parted) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size


def _whole(tensors: Mapping[str, Tensor | Parted], names: list[str]) -> dict[str, Tensor]:
    """Return these tensors, each in memory of its own: safetensors refuses those that share it."""
    return {
        name: one.whole() if isinstance(one := tensors[name], Parted) else one.clone().contiguous()
        for name in names
    }


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (KeyError, ValueError) as error:
        raise SaveError(f"safetensors can't hold what belongs into {path}: {error!r}.") from error
