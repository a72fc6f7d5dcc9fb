"""A job's state as a checkpoint of torch.distributed.checkpoint, written by torch's own planner and writer.

Each shard's part is written as it lies in its save, with its place in the whole tensor: so no tensor is put
together in memory, and torch reads it into any layout.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from jitckpt.formats.parts import Parted, Piece
from jitckpt.formats.training_state import TrainingState


class _Pieces:
    """A tensor in pieces, as torch's planner takes whatever is none of its own tensors."""

    def __init__(self, parted: Parted) -> None:
        self._parted = parted

    def __create_write_items__(self, name: str, _this: object) -> list[WriteItem]:
        return [self._item(name, piece) for piece in self._parted.pieces]

    def _item(self, name: str, piece: Piece) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
        properties = TensorProperties.create_from_tensor(piece.tensor)
        size = torch.Size(self._parted.shape)
        index = MetadataIndex(name, chunk.offsets)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))

    def piece(self, offsets: torch.Size | None) -> torch.Tensor:
        return next(one.tensor for one in self._parted.pieces if one.offsets == tuple(offsets or ()))


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece(index.offset) if isinstance(found, _Pieces) else super().lookup_object(index)


def write(state: TrainingState, folder: Path) -> None:
    """Write a checkpoint into a folder, which is made."""
    content = {
        "model": _tree(state.model),
        "optim": {"state": _tree(state.optimizer_state), "param_groups": state.groups},
        "step": state.step,
        "schedulers": state.schedulers,
        "scaler": state.scaler,
    }
    writer = FileSystemWriter(folder, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        save(content, storage_writer=writer, planner=_Planner(), no_dist=True)


def _tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tree(one) for key, one in value.items()}
    return _Pieces(value) if isinstance(value, Parted) else value
