"""Schedulers, a scaler and an average that init was not given are kept where they can be told apart."""

import gc
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from jitckpt.encoding.tree_codec import Json, to_json
from jitckpt.errors import CheckpointError
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.kept import AVERAGE, NOTHING, SCALER, Kept, find
from jitckpt.state.model_state import ModelState
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.saver import document_of

STEP_LR = "the scheduler of optimizer 0, StepLR"


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    others = parallel.all_of(LRScheduler, GradScaler, AveragedModel)  # that other tests' modules hold

    def all_of(*kinds: type) -> list[Any]:
        return [one for one in every_of(*kinds) if all(one is not other for other in others)]

    every_of = parallel.all_of
    monkeypatch.setattr(parallel, "all_of", all_of)


def optimizer_of() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


def host_of(optimizer: torch.optim.Optimizer, kept: Kept, **given: Any) -> HostState:
    objects: dict[str, Any] = {"schedulers": [], "scaler": None} | given
    return HostState(model=None, optimizers=[optimizer], extra=None, device=None, kept=kept, **objects)


def saved(host: HostState) -> dict[str, Json]:
    """Return what a save of now says."""
    history = History(host)
    history.expect_scheduler_steps([1] * len(host.schedulers))
    history.add(1, host.shared())
    snapshot = history.snapshot(1)
    assert snapshot is not None
    document, _ = document_of(host, history, snapshot, step=1, reason="test", local={})
    read: dict[str, Json] = json.loads(to_json(document))
    return read


class Anything:
    """An `extra` that says of a scheduler or a scaler what there is to say."""

    def __init__(self, *kept: Any) -> None:
        self._kept = kept

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self._kept]

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_what_belongs_to_the_optimizers_is_found_and_what_is_given_or_part_of_another_is_not() -> None:
    one, other, foreign = optimizer_of(), optimizer_of(), optimizer_of()
    warm, long = lr_scheduler.LinearLR(one), lr_scheduler.CosineAnnealingLR(one, 9)
    both = lr_scheduler.SequentialLR(one, [warm, long], [3])
    given = lr_scheduler.ExponentialLR(other, 0.5)
    stepped, others = lr_scheduler.StepLR(other, 3), lr_scheduler.StepLR(foreign, 3)
    scaler, unused = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    found = find(None, [one, other], [given], None, None)
    names = ["the scheduler of optimizer 0, SequentialLR", "the scheduler of optimizer 1, StepLR"]
    assert [*found.schedulers] == names
    assert [*map(id, found.objects())] == [id(both), id(stepped), id(scaler)]
    assert found.names() == [*names, SCALER]
    assert find(None, [one, other], [given, both, stepped], scaler, None) == NOTHING
    assert others.optimizer is foreign
    assert not unused.is_enabled()


def test_two_of_a_kind_are_not_kept_as_nothing_tells_which_is_which() -> None:
    optimizer = optimizer_of()
    schedulers = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.StepLR(optimizer, 5)]
    scalers = [GradScaler("cpu"), GradScaler("cpu")]
    assert find(None, [optimizer], [], None, None) == NOTHING
    del schedulers[0], scalers[0]
    assert find(None, [optimizer], [], None, None).names() == [STEP_LR, SCALER]


def test_what_extra_keeps_is_left_to_it() -> None:
    optimizer, scaler = optimizer_of(), GradScaler("cpu")
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    assert find(None, [optimizer], [], None, Anything(scheduler)).names() == [SCALER]
    assert find(None, [optimizer], [], None, Anything(scaler)).names() == [STEP_LR]


def test_what_a_save_could_not_hold_is_not_kept() -> None:
    class Odd(lr_scheduler.StepLR):
        """With something inside that takes pickle."""

    class Around(LRScheduler):
        """Says in its state_dict what is inside."""

        def get_lr(self) -> Any:
            return [1.0]

    optimizer = optimizer_of()
    odd, inner = Odd(optimizer, 3), lr_scheduler.StepLR(optimizer, 3)
    odd.something = object()  # type: ignore[attr-defined]
    around = Around(optimizer)
    around.after = inner  # type: ignore[attr-defined]
    assert find(None, [optimizer], [], None, None) == NOTHING


def test_they_come_back_by_their_names_and_a_step_that_was_due_is_made() -> None:
    optimizer = optimizer_of()
    exponential, scaler = lr_scheduler.ExponentialLR(optimizer, 0.5), GradScaler("cpu", init_scale=8.0)
    stepped = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    exponential.step()
    given = host_of(optimizer, find(None, [optimizer], [exponential], None, None), schedulers=[exponential])
    document = saved(given)
    assert document["kept"] == {"schedulers": [STEP_LR], "scaler": True, "average": False}
    again = optimizer_of()
    here = [lr_scheduler.ExponentialLR(again, 0.5), lr_scheduler.StepLR(again, 1, gamma=0.1)]
    again.step()
    new_scaler = GradScaler("cpu", init_scale=2.0)
    found = find(None, [optimizer, again], [exponential, stepped, here[0]], scaler, None)
    assert found.names() == ["the scheduler of optimizer 1, StepLR"]
    host = host_of(again, Kept({STEP_LR: here[1]}, new_scaler), schedulers=here[:1])
    assert host.unlike_saved(document) == []
    host.restore_shared(document, {}, whole=True)
    # Each was due once more: it was stepped as often as was usual since the optimizer's step.
    assert [one.last_epoch for one in here] == [2, 1]
    assert new_scaler.get_scale() == 8.0
    assert host.usual_scheduler_steps(document) == [1, 1]


def test_a_script_that_steps_one_of_them_forward_itself_is_told_from_one_that_steps_it_in_its_loop() -> None:
    optimizer = optimizer_of()
    given, scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 1)
    host = host_of(optimizer, Kept({STEP_LR: scheduler}), schedulers=[given])
    counts, progress = host.counts(), host.progress()
    optimizer.step()
    scheduler.step()
    assert host.undo_steps(counts, progress) == ({}, False)
    assert scheduler.last_epoch == 1
    for _ in range(3):
        scheduler.step()
    assert host.undo_steps(counts, progress) == ({STEP_LR: 4}, True)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, given.base_lrs[0])
    for _ in range(2):
        given.step()
        scheduler.step()
    assert host.undo_steps(counts, progress) == ({STEP_LR: 2}, False)
    assert (scheduler.last_epoch, given.last_epoch) == (2, 2)


def test_another_one_gets_none_of_it_and_a_sentence_names_both() -> None:
    optimizer, scaler = optimizer_of(), GradScaler("cpu", init_scale=8.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    document = saved(host_of(optimizer, Kept({STEP_LR: scheduler}, scaler)))
    again = optimizer_of()
    other = lr_scheduler.ExponentialLR(again, 0.5)
    name = "the scheduler of optimizer 0, ExponentialLR"
    host = host_of(again, Kept({name: other}))
    before = other.state_dict()
    host.restore_shared(document, {}, whole=True)
    assert other.state_dict() == before
    assert host.usual_scheduler_steps(document) == [0]
    lacking, unknown = host.unlike_saved(document)
    assert f"The save has no state of {name}, which jitckpt.init was not given" in lacking
    assert f"The save has the state of {SCALER}, {STEP_LR}, which is not there" in unknown


def test_a_save_from_before_has_none_and_goes_on() -> None:
    optimizer = optimizer_of()
    document = saved(host_of(optimizer, NOTHING))
    del document["kept"]
    scheduler, scaler = lr_scheduler.StepLR(optimizer, 1), GradScaler("cpu")
    host = host_of(optimizer, Kept({STEP_LR: scheduler}, scaler))
    host.restore_shared(document, {}, whole=True)
    (sentence,) = host.unlike_saved(document)
    assert f"no state of {SCALER}, {STEP_LR}" in sentence
    given = host_of(optimizer, NOTHING, schedulers=[scheduler])
    with pytest.raises(CheckpointError, match=r"The save has 0 schedulers; jitckpt.init was given 1"):
        given.restore_shared(document, {}, whole=True)


def test_the_average_of_the_model_is_kept_beside_it() -> None:
    def averaged() -> tuple[nn.Module, AveragedModel]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return model, AveragedModel(model, use_buffers=True)

    model, average = averaged()
    other = AveragedModel(nn.Linear(3, 3))
    found = find(model, [], [], None, None)
    assert found.average is average
    assert found.names() == [AVERAGE]
    assert find(nn.ModuleList([model, average]), [], [], None, None).average is None
    assert find(other.module, [], [], None, Anything(average)).average is None
    second = AveragedModel(model)
    assert find(model, [], [], None, None).average is None, "nothing tells them apart"
    del second

    def state_of(model: nn.Module, kept: Kept) -> ModelState:
        return ModelState(model, kept.averages())

    with torch.no_grad():
        model[0].weight += 1  # type: ignore[index]
    average.update_parameters(model)
    kept = state_of(model, found)
    assert {name for name in kept.parameters() if "average" not in name} == {*dict(model.named_parameters())}
    saved = {name: one.clone() for name, one in kept.parameters().items()}
    buffers = {name: one.clone() for name, one in kept.buffers().items()}
    again, new = averaged()
    restored = state_of(again, Kept(average=new))
    restored.restore_parameters(saved, ())
    restored.restore_buffers(buffers)
    assert kept.counts_of_averages() == [1]
    restored.restore_counts_of_averages([1])
    for name, one in average.state_dict().items():
        assert torch.equal(new.state_dict()[name], one), name
    # A start without the average, and a save without it, go on all the same.
    alone = ModelState(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    alone.restore_parameters(saved, ())
    alone.restore_buffers(buffers)
    assert torch.equal(alone.parameters()["0.weight"], saved["0.weight"])
    before = new.state_dict()["module.0.weight"].clone()
    restored.restore_parameters(alone.parameters(), ())
    restored.restore_buffers(alone.buffers())
    assert torch.equal(new.state_dict()["module.0.weight"], before)
