"""Digests of a final state: equal if and only if every bit is."""

from collections import deque
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.optim import ZeroRedundancyOptimizer

from jitckpt.saves import final_state
from jitckpt.saves.final_state import Digest, FinalState
from jitckpt.state.host_state import HostState


def digest(value: object) -> str:
    result = Digest()
    result.add(value, "it")
    return result.text()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(1.0), 1.0),
        (1, 1.0),
        (1, True),
        ("1", 1),
        (["ab", "c"], ["a", "bc"]),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"a": 2}),
        ({1: "a"}, {"1": "a"}),
        (None, 0),
        (numpy.float64(0.1), numpy.float64(0.1) + 2**-55),
        ({1, 2}, {1, 3}),
    ],
)
def test_what_differs_has_another_digest(one: object, other: object) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(2, 3).t().contiguous()),
        (deque([1, 2]), [1, 2]),
        (torch.tensor(float("nan")), torch.tensor(float("nan"))),
    ],
)
def test_what_is_equal_has_the_same_digest(one: object, other: object) -> None:
    assert digest(one) == digest(other)


def test_large_tensors_count_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_state, "CHUNK_BYTES", 16)
    value = torch.arange(11)
    before = digest(value)
    value[-1] += 1
    assert digest(value) != before


def test_values_of_unknown_kinds_are_named() -> None:
    result = Digest()
    result.add({"a": [object()]}, "extra")
    assert result.left_out == ["extra.a.0 (object)"]


class Loader:
    def __init__(self) -> None:
        self.position = 3

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_every_part_of_a_job_has_its_digest(tmp_path: Path) -> None:
    torch.manual_seed(1)
    linear, normalisation = nn.Linear(3, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, normalisation)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = Loader()
    host = HostState(
        model=model,
        optimizers=[optimizer],
        schedulers=[scheduler],
        scaler=None,
        extra=loader,
        device=None,
    )

    def changed(before: FinalState) -> set[str]:
        now = final_state.of(1, host)
        return {name for name in now.digests if now.digests[name] != before.digests[name]}

    first = final_state.of(1, host)
    assert changed(first) == set()
    loader.position += 1
    assert changed(first) == {"extra"}
    torch.rand(1)
    assert changed(first) == {"extra", "random numbers, torch's"}
    second = final_state.of(1, host)
    with torch.no_grad():
        linear.weight[0, 0] += 1
        normalisation.num_batches_tracked.add_(1)  # type: ignore[union-attr]
    assert changed(second) == {"parameters", "buffers"}
    third = final_state.of(1, host)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert changed(third) == {"parameters", "buffers", "optimizers", "schedulers"}
    final_state.write(tmp_path / "final", 1, third)
    assert final_state.read(tmp_path / "final") == {1: third}


def test_an_optimizer_that_is_spread_over_ranks_is_told_by_this_ranks_part() -> None:
    """Its own state_dict wants the parts of all ranks, and raises where these were not gathered."""
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2, device="cpu")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        host = HostState(
            model=model, optimizers=[optimizer], schedulers=[], scaler=None, extra=None, device=None
        )
        before = final_state.of(1, host).digests["optimizers"]
        optimizer.step()
        assert final_state.of(2, host).digests["optimizers"] != before
    finally:
        torch.distributed.destroy_process_group()
