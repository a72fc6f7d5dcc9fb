"""The generators of a loader and its samplers, taken and put back."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from jitckpt.data.generators import Generators
from jitckpt.encoding import packed
from jitckpt.errors import CheckpointError


def test_those_of_another_loader_are_refused_in_a_sentence() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), shuffle=True)
    of_process_alone = packed.unpack(packed.pack(Generators().capture()))
    with pytest.raises(
        CheckpointError, match=r"of 0 loaders and samplers .* of \d \(DataLoader, .*RandomSampler"
    ):
        Generators(loader).restore(of_process_alone)
