"""Random numbers that Megatron-core keeps beside torch's, by a stand-in for its tracker."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jitckpt.errors import CheckpointError
from jitckpt.state import host_state, trackers
from jitckpt.state.host_state import HostState


class Tracker:
    """As Megatron's: a dict of states, each of which stands in torch's generator while it is used."""

    def __init__(self, **states: Any) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    def draw(self, name: str) -> float:
        generator = self.states[name]
        if isinstance(generator, torch.Generator):
            return float(torch.rand(1, generator=generator))
        used = torch.Generator()
        used.set_state(generator)
        drawn = float(torch.rand(1, generator=used))
        self.states[name] = used.get_state()
        return drawn


def state_of(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("megatron.core.tensor_parallel.random")
    module._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def host() -> HostState:
    model = nn.Linear(2, 2)
    return HostState(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters())],
        schedulers=[],
        scaler=None,
        extra=None,
        device=None,
    )


def put_back(into: HostState, taken: dict[str, Any]) -> None:
    document = {"trees": {name: part.tree for name, part in taken.items()}}
    tensors = {name: tensor for part in taken.values() for name, tensor in part.tensors.items()}
    into.restore_local(host_state.local_parts(document, tensors, None))


def test_they_come_back_whatever_they_are_kept_in(megatron: Any) -> None:
    megatron._CUDA_RNG_STATE_TRACKER = tracker = Tracker(
        model=state_of(1), expert=torch.Generator().manual_seed(2)
    )
    job = host()
    tracker.draw("model"), tracker.draw("expert")
    taken = job.local()
    assert job.unchanged() is None  # nothing would tell that they have gone on
    expected = [tracker.draw(name) for name in ("model", "expert", "model", "expert")]
    for _ in range(2):
        put_back(job, taken)
        assert [tracker.draw(name) for name in ("model", "expert", "model", "expert")] == expected


def test_where_there_are_none_nothing_is_kept(megatron: Any) -> None:
    job = host()
    assert trackers.PART not in job.local()
    megatron._CUDA_RNG_STATE_TRACKER = Tracker()
    taken = job.local()
    assert trackers.PART not in taken
    megatron._CUDA_RNG_STATE_TRACKER = tracker = Tracker(model=state_of(1))
    put_back(job, taken)  # a save of an older version
    assert torch.equal(tracker.states["model"], state_of(1))


def test_a_start_that_has_not_seeded_them_yet_is_refused(megatron: Any) -> None:
    megatron._CUDA_RNG_STATE_TRACKER = Tracker(model=state_of(1))
    job = host()
    taken = job.local()
    megatron._CUDA_RNG_STATE_TRACKER = None
    with pytest.raises(CheckpointError, match="Call model_parallel_cuda_manual_seed before"):
        put_back(job, taken)
