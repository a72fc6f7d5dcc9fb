"""What a script computes at an epoch's head is looked at without harm to it."""

import sys
from typing import Any

import pytest
from torch import nn

from jitckpt.worker.epoch_head import EpochHead


class WithAList(nn.Module):
    """As Megatron-core's DDP, which has a list in the place of a method of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.buffers: Any = []


def test_a_module_whose_buffers_are_a_list_is_looked_at() -> None:
    """The training ended at its first epoch, with an exception of ours."""
    given = WithAList()
    head = EpochHead([given], dict, pytest.fail)
    head.epoch_begins(sys._getframe())
    head.begins()
    teacher, rate = WithAList(), 0.1
    assert {"teacher", "rate"} <= head.digests().keys()
    head.end()
    del teacher, rate
