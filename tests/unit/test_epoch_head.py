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
    teacher, rate, unread = WithAList(), 0.1, 0.2
    assert {"teacher", "rate"} == head.digests().keys()  # of what is read behind
    head.end()
    assert isinstance(teacher, WithAList)
    assert rate == 0.1
    unread = rate
    del unread


def test_what_a_restart_puts_back_may_come_out_otherwise() -> None:
    said: list[str] = []
    head = EpochHead([], dict, said.append, is_put_back=lambda frame, name: name == "advantages")
    head.epoch_begins(sys._getframe())
    head.compare({"advantages": "1", "rate": "2"}, {"advantages": "3", "rate": "2"})
    assert said == []
    head.compare({"advantages": "1", "rate": "2"}, {"advantages": "3", "rate": "4"})
    assert "before the failure: rate." in said[0]
