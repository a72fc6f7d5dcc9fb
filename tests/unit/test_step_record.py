"""What `jitckpt steps` writes down and says."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.optim import SGD, Optimizer

from jitckpt.cli.steps import lines, problems
from jitckpt.worker.in_place.step_record import Record, StepRecorder, read


@pytest.fixture
def recorder() -> Iterator[StepRecorder]:
    found = StepRecorder()
    yield found
    found.steps.detach()


class Careless(SGD):
    """Changes a module's buffer in its step, as if that were a part of its state."""

    buffer: torch.Tensor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.buffer.add_(1)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            next(model.parameters()).clamp_(-0.01, 0.01)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 11), nn.BatchNorm1d(11), nn.Linear(11, 1))


def test_a_record_says_what_changes_where(recorder: StepRecorder) -> None:
    model = net()
    train(model, SGD(model.parameters(), lr=0.1), steps=3)
    found = recorder.record()
    assert (found.steps, found.compared) == (3, 3)
    assert found.optimizers == [["SGD", 6]]
    assert found.state["optimizer.0.parameter.0"] == ["torch.float32", [11, 2]]
    assert found.outside == ["optimizer.0.parameter.0"]  # the clamp
    assert "module.0.1.running_mean" in found.changing
    assert {*found.changing} <= {*found.buffers}
    assert found.in_step == []
    assert problems([found]) == []
    assert lines([found])[-1] == "Nothing was seen that transparent mode does not support."


def test_what_changes_in_the_step_beside_the_state_is_named(recorder: StepRecorder) -> None:
    model = net()
    model.register_buffer("counter", torch.zeros(3))
    optimizer = Careless(model.parameters(), lr=0.1)
    optimizer.buffer = model.counter  # type: ignore[assignment]
    train(model, optimizer, steps=2)
    found = recorder.record()
    assert found.in_step == ["module.0.counter"]
    assert problems([found]) == [
        "Rank 0: module.0.counter changes in the optimizer step, but is none of its parameters nor state."
    ]


class Sending(SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            distributed.broadcast(parameter.data, 0)


def test_collectives_in_a_step_are_named(recorder: StepRecorder) -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        train(model, SGD(model.parameters(), lr=0.1), steps=2)
        assert recorder.record().unsupported == []
        train(model, Sending(model.parameters(), lr=0.1), steps=2)
    finally:
        distributed.destroy_process_group()
    assert recorder.record().unsupported == [
        "step 3 calls 6 collectives, so a rank can neither finish it alone nor skip it"
    ]


def test_records_of_ranks_are_compared_and_read_back(tmp_path: Path) -> None:
    one = Record(
        0, 3, 3, [["SGD", 1]], {"optimizer.0.parameter.0": ["torch.float32", [2, 3]]}, [], [], [], [], []
    )
    other = replace(one, rank=1, steps=4, optimizers=[["Adam", 1]], unsupported=["it sleeps"])
    for record in (other, one):
        (tmp_path / f"{record.rank}.json").write_text(json.dumps(asdict(record)))
    assert read(tmp_path) == [one, other]
    assert lines([one, other]) == [
        "steps: 3, of SGD (1 parameters)",
        "state: 1 tensors of 6 elements, alike on 2 of 2 ranks",
        "changes outside the step too: none",
        "buffers: 0, of which change: none",
        "(values compared in the first 3 steps)",
        "Rank 1: it sleeps.",
        "Rank 1 has made 4 steps, rank 0 3.",
        "Rank 1 has other optimizers than rank 0.",
    ]
    many = replace(one, changing=[f"b{n}" for n in range(7)], buffers=[f"b{n}" for n in range(7)])
    assert lines([many])[3] == "buffers: 7, of which change: b0, b1, b2, b3, b4 and 2 more"
