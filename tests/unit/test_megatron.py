"""What is said of a Megatron-core training and when, by a stand-in for it."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from jitckpt.frameworks import megatron, protection, script_loops
from jitckpt.state.schedules import SchedulerState
from jitckpt.worker import directory


class OptimizerParamScheduler:
    """As Megatron's: what it loads it adds to its own."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step(increment=state["num_steps"])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what is said of trainings; here is the first one."""
    found: list[str] = []
    monkeypatch.setattr(protection, "_taken", "")
    monkeypatch.setattr(protection, "_say_first", found.append)
    monkeypatch.setattr(megatron, "_made", None)
    monkeypatch.setattr(megatron, "version", lambda _: "0.0")
    monkeypatch.setattr(script_loops, "_begin_pass", [])
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # put back in the end
    yield found
    if megatron._made is not None:  # other tests' optimizers make steps, too
        megatron._made.first_step.remove()


def train(*, by_hand: bool = False, loader: bool = True) -> list[int]:
    """Make a training as a script does; return the batches that it got."""
    module = ModuleType(f"megatron.of.{by_hand}.{loader}")
    module.get_megatron_optimizer = lambda config, chunks: torch.optim.SGD(chunks[0].parameters())  # type: ignore[attr-defined]
    megatron.install(module)
    config: Any = SimpleNamespace()
    model = nn.Linear(1, 1)
    optimizer = module.get_megatron_optimizer(config, [model])
    batches: list[int] = []
    texts: Any = DataLoader(range(3), batch_size=None) if loader else range(3)  # type: ignore[arg-type]
    if by_hand:
        iterator = iter(texts)
        for _ in range(3):
            batches.append(int(next(iterator)))
            optimizer.step()
        return batches
    for batch in texts:
        batches.append(int(batch))
        optimizer.step()
    return batches


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ({"by_hand": True}, "the script draws its batches by next()"),
        ({"loader": False}, "the script takes its batches from no torch DataLoader"),
    ],
)
def test_what_can_not_be_protected_is_said_once_and_trains_on(
    script: dict[str, bool], why: str, said: list[str]
) -> None:
    assert train(**script) == [0, 1, 2]
    (sentence,) = said
    assert sentence.startswith(f"megatron-core 0.0: recognised, but not protected: {why}")


@pytest.mark.parametrize("is_found", [True, False])
def test_a_loop_over_epochs_is_found_in_which_a_restart_goes_on(
    is_found: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the batches of epochs that were done the script's code was run again."""
    left_out: list[str] = []

    def begin(name: str, **given: Any) -> None:
        monkeypatch.setattr(protection, "_taken", name)
        left_out.append(given["left_out"])

    monkeypatch.setattr(protection, "begin", begin)
    monkeypatch.setattr(directory, "root_of", lambda given: tmp_path)
    module = ModuleType(f"megatron.of.epochs.{is_found}")
    module.get_megatron_optimizer = lambda config, chunks: torch.optim.SGD(chunks[0].parameters())  # type: ignore[attr-defined]
    megatron.install(module)
    module.get_megatron_optimizer(SimpleNamespace(), [nn.Linear(1, 1)])
    batches: list[int] = []
    texts: Any = DataLoader(range(3), batch_size=None)  # type: ignore[arg-type]
    if is_found:
        for _ in range(2):
            batches += [int(batch) for batch in texts]
    else:
        while len(batches) < 6:
            for batch in texts:
                batches.append(int(batch))
    assert batches == [0, 1, 2, 0, 1, 2]
    assert left_out == ["" if is_found else script_loops.LEFT_OUT]
    assert "range" not in globals()


def test_its_scheduler_comes_back_however_often_it_is_put_back() -> None:
    scheduler = OptimizerParamScheduler()
    scheduler.step(increment=8)
    state = scheduler.state_dict()
    scheduler.step(increment=8)
    for _ in range(2):
        SchedulerState(scheduler).restore(state)
        assert scheduler.num_steps == 8
