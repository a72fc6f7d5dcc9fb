"""What frameworks add up gradients in, and have emptied when a minibatch begins."""

import struct
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.optim import SGD

from jitckpt.worker.in_place import naming
from jitckpt.worker.in_place.keeper import MinibatchKeeper
from jitckpt.worker.in_place.scratch import Scratch

MODULE = "deepspeed.runtime.zero.stage3"


@dataclass
class Bucket:
    """As that version of DeepSpeed has them."""

    buffer: torch.Tensor | None
    elements: int = 0


class DeepSpeedZeroOptimizer_Stage3:
    def __init__(self, *buckets: object) -> None:
        self.ipg_buckets = dict(enumerate(buckets))


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where a script uses it; the tensors of these tests are on the host."""
    module = ModuleType(MODULE)
    vars(module)[DeepSpeedZeroOptimizer_Stage3.__name__] = DeepSpeedZeroOptimizer_Stage3
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(naming, "extent", lambda tensor: (tensor.data_ptr(), tensor.nbytes))


def places(*tensors: torch.Tensor) -> bytes:
    return b"".join(struct.pack("=QQ", one.data_ptr(), one.nbytes) for one in tensors)


def test_only_buckets_that_are_empty_now_are_told() -> None:
    buffer = torch.zeros(1000)
    bucket = Bucket(buffer)
    optimizer = DeepSpeedZeroOptimizer_Stage3(bucket, Bucket(None), Bucket(torch.zeros(0)))
    scratch = Scratch()
    assert scratch.extents() == places(buffer)
    bucket.elements = 3  # gradients wait there
    assert scratch.extents() == b""
    bucket.elements, bucket.buffer = 0, torch.zeros(2000)
    assert scratch.extents() == places(bucket.buffer)
    del optimizer
    assert scratch.extents() == b""


def test_a_version_that_we_do_not_know_has_none() -> None:
    unknown = DeepSpeedZeroOptimizer_Stage3(SimpleNamespace(buffer=torch.zeros(3)), torch.zeros(3))
    other = DeepSpeedZeroOptimizer_Stage3()
    del other.ipg_buckets
    assert Scratch().extents() == b""
    assert unknown is not other


def test_without_deepspeed_nobody_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = DeepSpeedZeroOptimizer_Stage3(Bucket(torch.zeros(3)))
    monkeypatch.delitem(sys.modules, MODULE)
    assert Scratch().extents() == b""
    assert optimizer.ipg_buckets


def test_the_proxy_is_told_when_that_changes() -> None:
    told: list[tuple[bytes, int]] = []

    def text(error: int) -> bytes:
        raise AssertionError(error)

    process = SimpleNamespace(
        jitckpt_proxy_keep=lambda: 0,
        jitckpt_proxy_leave_out=lambda given, count: told.append((given, count)),
        cudaGetErrorString=text,
    )
    buffer = torch.zeros(1000)
    optimizer = DeepSpeedZeroOptimizer_Stage3(bucket := Bucket(buffer))
    keeper = MinibatchKeeper(process, validate_every=0)
    keeper._valid = True
    for step in (6, 7, 8, 9):
        bucket.elements = int(step == 8)
        keeper.step_begins(step, SGD([torch.ones(1)], lr=1.0), dict)
        keeper.step_ended(step, SGD([torch.ones(1)], lr=1.0), dict)
    assert told == [(places(buffer), 1), (b"", 0), (places(buffer), 1)]
    assert optimizer.ipg_buckets
