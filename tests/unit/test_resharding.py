"""What a save of another layout is cut into, and what is refused by name. One rank, which holds all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.errors import CheckpointError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity, state_files
from jitckpt.state.host_state import HostState
from jitckpt.worker import resharding
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.saver import document_of

STEP = 3
HERE = Identity("job", "", 3, 0, 0, 1, "laid out so")


class Kept(torch.optim.SGD):
    """Keeps something that no state_dict holds."""

    turns = 0

    def step(self, closure: Any = None) -> Any:
        self.turns += 1
        return super().step(closure)


def host_of(
    *sizes: int, kind: type[torch.optim.Optimizer] = torch.optim.SGD, groups: int = 1, **of_kind: Any
) -> HostState:
    model = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    parameters = [*model.parameters()]
    each = len(parameters) // groups
    cut = [{"params": parameters[at : at + each]} for at in range(0, len(parameters), each)]
    optimizer = kind(cut, lr=0.1, **of_kind)  # type: ignore[call-arg]
    host = HostState(
        model=model,
        optimizers=[optimizer],
        schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        scaler=None,
        extra=None,
        device=None,
    )
    host.progress()
    return host


def built(host: HostState) -> tuple[HostState, History]:
    return host, History(host)


def train(host: HostState) -> None:
    assert host.model is not None
    optimizer = host.optimizers[0].optimizer
    for parameter in host.optimizers[0].parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    host.schedulers[0].step(1)


ONE_RANK = Identity("job", "", 1, 0, 0, 1)


def saved(root: Path, host: HostState, identity: Identity = ONE_RANK) -> None:
    """Write what a rank of a job of one rank saves."""
    folders.open_directory(root, "job")
    history = History(host)
    history.add(STEP, host.shared())
    history.settle(STEP)
    history.expect_scheduler_steps([1])
    snapshot = history.snapshot(STEP)
    assert snapshot is not None
    parts = host.local()
    local = {"trees": {name: part.tree for name, part in parts.items()}, "missing": [], "left_out": []}
    document, tensors = document_of(host, history, snapshot, step=STEP, reason="test", local=local)
    tensors |= snapshot.shared.tensors()
    for part in parts.values():
        tensors |= part.tensors
    files = state_files("builtin")
    with SaveFolder(root, identity, STEP, "rank", "builtin") as folder:
        folder.add_tensors(files.tensors, tensors)
        folder.add_json(files.document, document)
        folder.commit()


def values(host: HostState) -> dict[str, Any]:
    optimizer = host.optimizers[0]
    found = {name: tensor.detach().clone() for name, tensor in host.parameters().items()}
    for number, parameter in enumerate(optimizer.parameters()):
        for key, value in optimizer.optimizer.state[parameter].items():
            found[f"{number}.{key}"] = value
    return found


@pytest.mark.parametrize(
    ("kind", "more"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True})],
)
def test_all_of_it_comes_back(
    tmp_path: Path, kind: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    before = host_of(3, 3, kind=kind, **more)
    for _ in range(STEP):
        train(before)
    saved(tmp_path, before)
    after, history = built(host_of(3, 3, kind=kind, **more))
    found = resharding.newer(tmp_path, HERE, 0, None)
    assert found is not None
    _, told = resharding.load(found, tmp_path, HERE, after, history)
    assert "Step 3 was saved by 1 rank; 3 ranks laid out as 'laid out so' go on" in told
    wanted, here = values(before), values(after)
    assert wanted.keys() == here.keys()
    assert all(torch.equal(wanted[name], here[name]) for name in wanted)
    assert after.optimizers[0].groups() == before.optimizers[0].groups()
    assert after.schedulers[0].scheduler.state_dict() == before.schedulers[0].scheduler.state_dict()
    assert history.usual_scheduler_steps == (1,), "a save of the first step has it, too"


def test_only_what_is_newer_and_of_another_layout_counts(tmp_path: Path) -> None:
    host = host_of(3)
    train(host)
    assert resharding.newer(tmp_path, HERE, 0, None) is None
    saved(tmp_path, host)
    assert resharding.newer(tmp_path, HERE, STEP, None) is None
    assert resharding.newer(tmp_path, ONE_RANK, 0, None) is None


def test_what_a_rank_alone_knew_is_of_the_layout_that_is_gone_on_from(tmp_path: Path) -> None:
    """Another layout has left a save of this rank in the same step: of what, nobody knows."""
    before = host_of(3)
    train(before)
    saved(tmp_path, before)
    found = resharding.newer(tmp_path, HERE, 0, None)
    assert found is not None
    assert found.record_of(tmp_path, "rank", 0) is not None
    saved(tmp_path, before, Identity("job", "", 3, 0, 0, 1))
    assert found.record_of(tmp_path, "rank", 0) is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: host_of(3), "The save holds 1.bias, 1.weight, which the model has not"),
        (lambda: host_of(3, 3, 3), "The save has not the parameter 2.weight"),
        (lambda: host_of(3, 4), r"the parameter 1.weight as \[3, 3\] of torch.float32; here it is \[4, 4\]"),
        (lambda: host_of(3, 3, groups=2), "in other groups than the save"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, other: Any, told: str) -> None:
    host = host_of(3, 3, groups=1)
    train(host)
    saved(tmp_path, host)
    found = resharding.newer(tmp_path, HERE, 0, None)
    assert found is not None
    if "other groups" in told:  # one group here, two there: a group's own are all in one of the save's
        host = other()
        train(host)
        saved(tmp_path, host)
        other = lambda: host_of(3, 3)  # noqa: E731
    with pytest.raises(CheckpointError, match=told):
        resharding.load(found, tmp_path, HERE, *built(other()))


def test_what_an_optimizer_keeps_in_attributes_is_refused(tmp_path: Path) -> None:
    host = host_of(3, kind=Kept)
    for _ in range(STEP):
        train(host)
        host.optimizers[0].beside()
    saved(tmp_path, host)
    found = resharding.newer(tmp_path, HERE, 0, None)
    assert found is not None
    with pytest.raises(CheckpointError, match="attributes that the training had changed"):
        resharding.load(found, tmp_path, HERE, *built(host_of(3, kind=Kept)))


class Saying(torch.optim.SGD):
    """Says by itself what its state is."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("kind", "has_save_function", "flat", "why"),
    [
        (Saying, False, False, "Saying says by itself what its state is"),
        (torch.optim.SGD, True, False, "only who wrote it knows what its save function has saved"),
        (torch.optim.SGD, False, True, "which part of 0.weight a rank holds is not known"),
    ],
)
def test_a_job_that_could_never_be_cut_anew_does_not_begin_with_min_hosts(
    kind: type[torch.optim.Optimizer],
    has_save_function: bool,
    flat: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resharding.refuse_if_never_cut(host_of(2), has_save_function=False)
    if flat:  # as of FullyShardedDataParallel
        unknown = {"0.weight": {"shape": [2, 2], "offsets": None}}
        monkeypatch.setattr("jitckpt.state.parallel.cuts", lambda model: unknown)
    with pytest.raises(CheckpointError, match=f"could not go on with another number of ranks: {why}"):
        resharding.refuse_if_never_cut(host_of(2, kind=kind), has_save_function=has_save_function)
