"""Attributes of optimizers and of what is around them, which are in no state_dict: how they come back."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from test_optimizer_state import Saved, host_of, net, put, step, take
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.state import attributes
from jitckpt.state.attributes import ChangedAttributes
from jitckpt.state.optimizer_state import states_of
from jitckpt.state.plain_values import NEW


class Wrapper:
    """Around an optimizer; what it keeps is given."""

    def __init__(self, optimizer: Optimizer, **kept: Any) -> None:
        self.optimizer, self.skipped = optimizer, 0
        vars(self).update(kept)


class Start:
    """A start of the script: a model, its optimizer and a wrapper around it."""

    def __init__(self, **kept: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wrapper: Any = Wrapper(self.optimizer, **kept)
        self.host = host_of(self.model, self.optimizer, self.wrapper)

    def problems(self) -> list[str]:
        return self.host.optimizers[0].problems()

    def saved(self) -> Saved:
        step(self.model, self.optimizer)
        return take(self.host)


def carried(built: Callable[[], Any], change: Callable[[Any], None]) -> tuple[Start, Start]:
    """Return a start that `change` has changed the wrapper of, and one that its save is put into."""
    first, second = Start(kept=built()), Start(kept=built())
    change(first.wrapper)
    put(second.host, first.saved())
    return first, second


def test_what_others_share_is_not_written_to_where_the_training_has_set_another() -> None:
    first, second = Start(), Start()
    others = [torch.zeros(2), torch.ones(2)]
    for start in (first, second):
        # Attributes that the script builds as other names of what others have.
        start.wrapper = Wrapper(
            start.optimizer, anchor=start.model[0].bias.detach(), kept=others[0], many=others
        )
        start.host = host_of(start.model, start.optimizer, start.wrapper)
    first.wrapper.anchor = first.wrapper.anchor.clone() + 1
    first.wrapper.kept = first.wrapper.kept + 3
    first.wrapper.many = [one + 5 for one in others]
    saved = first.saved()
    document, tensors = saved
    second.host.restore_parameters(tensors, document["frozen"])
    bias = second.model[0].bias.detach().clone()
    second.host.restore_shared(document, tensors, whole=True)
    assert torch.equal(second.model[0].bias, bias)
    assert [one.tolist() for one in others] == [[0, 0], [1, 1]]
    assert torch.equal(second.wrapper.anchor, first.wrapper.anchor)
    assert second.wrapper.kept.tolist() == [3, 3]
    assert [one.tolist() for one in second.wrapper.many] == [[5, 5], [6, 6]]


def test_what_lies_where_the_script_has_built_it_is_put_there_at_any_depth() -> None:
    def built() -> Any:
        flat = torch.zeros(4)
        return {"flat": flat, "parts": [flat[:2], (flat[2:],)], "array": numpy.zeros(2), "names": ["a"]}

    def change(wrapper: Any) -> None:
        wrapper.kept["flat"] += torch.arange(4)
        wrapper.kept["array"] += 1
        wrapper.kept["names"].append("b")

    first, second = Start(kept=built()), Start(kept=built())
    kept = second.wrapper.kept
    parts, array, names = kept["parts"], kept["array"], kept["names"]
    change(first.wrapper)
    put(second.host, first.saved())
    assert second.wrapper.kept is kept
    assert [parts[0].tolist(), parts[1][0].tolist()] == [[0, 1], [2, 3]]
    assert array.tolist() == [1, 1]
    assert names == ["a", "b"]
    assert second.problems() == first.problems() == []


def test_a_column_of_a_matrix_is_written_where_it_lies() -> None:
    matrices: list[Tensor] = []

    def built() -> Tensor:
        matrices.append(torch.zeros(40, 40))
        return matrices[-1][:, 0]

    carried(built, lambda wrapper: wrapper.kept.add_(2))
    assert matrices[1].sum().item() == 80


def test_parameters_in_an_attribute_stay_parameters() -> None:
    """Those of the model, which others save, and masters that the wrapper steps by itself."""
    first, second = Start(), Start()
    for start in (first, second):
        groups = {"params": [*start.model.parameters()], "count": 0}
        masters = [nn.Parameter(torch.zeros(3))]
        start.wrapper = Wrapper(start.optimizer, groups=groups, masters=masters)
        start.host = host_of(start.model, start.optimizer, start.wrapper)
    first.wrapper.groups["count"] = 4
    with torch.no_grad():
        first.wrapper.masters[0].add_(7)
    master = second.wrapper.masters[0]
    put(second.host, first.saved())
    assert second.wrapper.groups["count"] == 4
    assert [*map(id, second.wrapper.groups["params"])] == [*map(id, second.model.parameters())]
    assert second.wrapper.masters[0] is master
    assert master.tolist() == [7, 7, 7]
    assert master.requires_grad
    assert second.problems() == first.problems() == []


def replace_master(wrapper: Any) -> None:
    wrapper.kept[0] = nn.Parameter(torch.ones(3))


def test_a_parameter_that_is_a_plain_tensor_is_saved_once() -> None:
    flat = torch.zeros(1000)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    kept = ChangedAttributes(Wrapper(optimizer, flat=[flat]), optimizer)
    flat.add_(1)
    assert kept.changed() == {}


def test_a_graph_is_not_kept() -> None:
    start = Start(loss=None)
    start.wrapper.loss = start.model(torch.ones(1, 3)).sum()
    attributes = ChangedAttributes(start.wrapper, start.optimizer)
    start.wrapper.loss = start.wrapper.loss + 0
    assert not attributes.changed()["loss"][NEW].requires_grad


@pytest.mark.parametrize(
    ("built", "change"),
    [
        (lambda: SimpleNamespace(rank=0, count=0), lambda wrapper: vars(wrapper.kept).update(count=1)),
        (lambda: {"draw": random.Random(1)}, lambda wrapper: wrapper.kept["draw"].random()),
        (lambda: [itertools.count()], lambda wrapper: next(wrapper.kept[0])),
        (lambda: [nn.Parameter(torch.zeros(3))], replace_master),
        (lambda: {torch.zeros(1): 1}, lambda wrapper: wrapper.kept.update({torch.ones(1): 2})),
        (lambda: torch.eye(2).to_sparse(), lambda wrapper: wrapper.kept.mul_(2)),
    ],
)
def test_what_cant_be_kept_is_named_once(built: Callable[[], Any], change: Callable[[Any], None]) -> None:
    start = Start(kept=built())
    start.host.shared()
    assert start.problems() == []
    change(start.wrapper)
    saved = start.saved()
    start.host.shared()
    (problem,) = start.problems()
    assert "the attribute 'kept' of Wrapper" in problem
    again = Start(kept=built())
    put(again.host, saved)
    assert again.problems() == []


def test_what_becomes_something_that_cant_be_kept_is_named_and_the_rest_is_saved() -> None:
    start = Start(kept=1)
    start.wrapper.kept, start.wrapper.skipped = 2, 5
    start.saved()
    start.wrapper.kept = print
    saved = start.saved()
    (problem,) = start.problems()
    assert "'kept'" in problem
    again = Start(kept=1)
    put(again.host, saved)
    assert again.wrapper.skipped == 5


def test_one_that_the_training_sets_to_a_parameters_memory_is_named() -> None:
    """A save has its values alone, so after a restart it would no more follow the parameter."""
    start = Start(kept=[])
    bias = start.model[0].bias
    start.wrapper.kept = [bias.detach().clone()]
    start.saved()
    assert start.problems() == []
    start.wrapper.kept = [bias.data[1:]]
    start.saved()
    (problem,) = start.problems()
    assert "'kept'" in problem
    assert "a parameter's memory" in problem


def test_very_many_values_are_named_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes._Walk, "most_values", 100)
    start = Start(table=[object()] * 200, grows=[torch.zeros(1)])
    (problem,) = start.problems()
    assert "'table'" in problem
    start.wrapper.grows += [torch.zeros(1)] * 200
    start.saved()
    assert "'grows'" in start.problems()[1]
    start.saved()
    assert len(start.problems()) == 2


def test_a_save_of_before_is_put_where_it_was_then() -> None:
    """Then nobody noted what was new, and all was written in place."""
    start = Start(slow=[torch.zeros(2)], steps=0, order=OrderedDict(a=1))
    slow = start.wrapper.slow[0]
    kept = ChangedAttributes(start.wrapper, start.optimizer)
    kept.restore({"slow": [torch.ones(2)], "steps": 3, "order": OrderedDict(b=2)})
    assert (slow.tolist(), start.wrapper.steps, start.wrapper.order) == ([1, 1], 3, {"b": 2})
    assert kept.changed().keys() == {"slow", "steps", "order"}


def test_what_has_no_place_is_named() -> None:
    start = Start(kept=[nn.Linear(1, 1)])
    start.wrapper.kept.append(1)
    saved = start.saved()
    again = Start(kept=None)
    put(again.host, saved)
    (problem,) = again.problems()
    assert "for which there is no place here" in problem


def test_one_that_becomes_true_has_changed() -> None:
    first, second = carried(lambda: 1, lambda wrapper: setattr(wrapper, "kept", True))
    assert second.wrapper.kept is first.wrapper.kept is True


def test_what_the_script_gives_torchs_own_optimizer_comes_back() -> None:
    first, second = Start(), Start()
    for start in (first, second):
        start.optimizer.warmed = 0  # type: ignore[attr-defined]
        start.host = host_of(start.model, start.optimizer, start.wrapper)
    first.optimizer.warmed = 3  # type: ignore[attr-defined]
    put(second.host, first.saved())
    assert second.optimizer.warmed == 3  # type: ignore[attr-defined]
    assert second.problems() == []


def test_an_attribute_that_comes_late_is_seen() -> None:
    """As one that the script puts on torch's own optimizer, of which nothing but numbers is new for long."""
    (parameter,) = parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters)
    (state,) = states_of(optimizer, "optimizer.0")
    for _ in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step()
        assert state.capture().beside.tree == []
    optimizer.rounds = 1  # type: ignore[attr-defined]
    assert state.capture().beside.tree != []
    before = state.capture().beside
    assert state.capture().beside.tree == before.tree
    optimizer.rounds = 2  # type: ignore[attr-defined]
    assert state.capture().beside.tree != before.tree
    vars(optimizer)["turns"] = vars(optimizer).pop("rounds")
    assert state.capture().beside.tree != before.tree
    optimizer.__dict__ = {**vars(optimizer), "turns": 3}
    assert "3" in str(state.capture().beside.tree)
