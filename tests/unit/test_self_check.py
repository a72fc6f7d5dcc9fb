"""Two descriptions of a training's objects are compared; what a save does not bring back is named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, lr_scheduler

from jitckpt.worker.self_check import comparison
from jitckpt.worker.self_check.comparison import (
    Described,
    Difference,
    Snapshot,
    TensorLeaf,
    TooManyError,
    compare,
    torchs_own,
)

WEIGHT = TensorLeaf("float32", (4, 3, 2, 2), (12, 1, 6, 3), True, "parameter weight", "aaaa")
HELD: Snapshot = {
    "parameter weight": WEIGHT,
    "state of optimizer 0: weight.exp_avg": replace(WEIGHT, requires_grad=False, same_as="exp_avg"),
    "optimizer 0, group 0.lr": "0.1",
    "scheduler 0.last_epoch": "2",
}


def test_what_is_the_same_has_no_difference() -> None:
    assert compare(HELD, dict(HELD)) == []


def changed(name: str, leaf: TensorLeaf | str | None) -> Snapshot:
    rest = {key: value for key, value in HELD.items() if key != name}
    return rest if leaf is None else rest | {name: leaf}


@pytest.mark.parametrize(
    ("restored", "difference"),
    [
        (changed("scheduler 0.last_epoch", None), "scheduler 0.last_epoch (not restored)"),
        (changed("scheduler 0.last_epoch", "0"), "scheduler 0.last_epoch (2, but 0 after a restore)"),
        (changed("new", "1"), "new (there after a restore only)"),
        (
            changed("parameter weight", replace(WEIGHT, dtype="bfloat16", digest="bbbb")),
            "parameter weight (restored as bfloat16 instead of float32)",
        ),
        (
            changed("parameter weight", replace(WEIGHT, shape=(48,))),
            "parameter weight (restored with another shape)",
        ),
        (
            changed("parameter weight", replace(WEIGHT, stride=(12, 4, 2, 1))),
            "parameter weight (restored with other strides: another memory layout)",
        ),
        (
            changed("parameter weight", replace(WEIGHT, digest="bbbb")),
            "parameter weight (restored with other values)",
        ),
        (
            changed("parameter weight", replace(WEIGHT, requires_grad=False)),
            "parameter weight (requires_grad=True, but False after a restore)",
        ),
        (
            changed("parameter weight", replace(WEIGHT, same_as="parameter other")),
            "parameter weight (shares memory with others than after a restore)",
        ),
        (
            changed("optimizer 0, group 0.lr", replace(WEIGHT, shape=())),
            "optimizer 0, group 0.lr (0.1, but a tensor of float32 after a restore)",
        ),
    ],
)
def test_each_difference_is_named(restored: Snapshot, difference: str) -> None:
    assert comparison.sentences(compare(HELD, restored)) == [difference]


def test_values_that_were_not_looked_at_are_not_compared() -> None:
    assert compare(HELD, changed("parameter weight", replace(WEIGHT, digest=None))) == []


def test_differences_of_a_kind_are_one_clause() -> None:
    found = [Difference("not restored", f"a{number}") for number in range(9)] + [Difference("odd", "b")]
    assert comparison.sentences(found) == ["a0, a1, a2 and 6 more (not restored)", "b (odd)"]


def test_replicas_that_differ_are_named() -> None:
    assert comparison.differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "3"}) == [
        "b",
        "c",
        "d",
    ]


def described(value: object, **options: Any) -> Described:
    found = Described()
    found.add(value, "it", **options)
    return found


def test_tensors_are_described_as_they_lie() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    tensors = {
        "parameter a": weight,
        "buffer b": weight.detach(),
        "c": torch.zeros(2, 1)[:, :1],
        "parameter none": torch.empty(0),
        "rate": weight.detach(),
    }
    values = {"parameter a": weight.detach().contiguous(), "buffer b": weight.detach()}
    found = {name.split()[-1]: leaf for name, leaf in comparison.leaves(tensors, values).items()}
    assert found["a"].stride == weight.stride() != (48, 16, 4, 1)
    assert (found["a"].requires_grad, found["b"].requires_grad) == (True, False)
    assert found["b"].same_as == "parameter a"
    assert found["a"].digest == found["b"].digest, "the layout does not count in it"
    assert found["c"].stride == (1,), "that of a dimension of one element says nothing"
    assert found["none"].same_as == "parameter none"
    assert found["rate"].same_as == "rate", "it does not count there"


def test_what_a_function_closes_over_is_described_as_shared() -> None:
    calls = [3]

    def rate(step: int) -> float:
        return 0.9 ** (step + calls[0])

    optimizer = torch.optim.SGD([torch.zeros(1)])
    scheduler = lr_scheduler.LambdaLR(optimizer, rate)
    found = described(scheduler)
    assert found.texts["it.lr_lambdas.0.calls.0"] == "3"
    assert found.shared == {"it.lr_lambdas.0.calls.0"}


class Accelerator:
    """As Accelerate's, which has all that it has prepared."""

    def __init__(self) -> None:
        self.num_processes, self.schedulers = 2, [object()]


def test_what_an_adapter_keeps_is_not_described_where_a_function_closes_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's function that asks an Accelerator for the processes was said not to come back."""
    monkeypatch.setattr(comparison, "KEPT_OTHERWISE", [Accelerator])
    accelerator, calls = Accelerator(), [3]
    found = Described()
    found.add(lambda step: step / accelerator.num_processes / calls[0], "it")
    assert found.texts == {"it.calls.0": "3"}
    assert not any("optimizer" in name for name in found.texts)


def test_an_optimizer_inside_of_another_object_is_described_if_asked_for() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.inner = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.5)
            self.counter, self.itself, self.module = 7, self, nn.Linear(1, 1)

    assert described(Wrapper()).texts == {"it.counter": "7"}
    texts = described(Wrapper(), optimizers=True).texts
    assert texts["it.inner.param_groups.0.lr"] == "0.5"
    assert texts["it.inner.state"] == "defaultdict" or "it.inner.state" in texts


def test_an_object_with_too_many_values_is_given_up() -> None:
    with pytest.raises(TooManyError, match="it has more than 20000 values"):
        described(list(range(30_000)))


KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind is not Optimizer]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_torchs_own_optimizers_note_in_attributes_is_no_state(kind: type[Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        if kind is torch.optim.SparseAdam:
            parameter.grad = loss.detach() * torch.ones(2, 2).to_sparse()
        return loss

    before = described({name: value for name, value in vars(optimizer).items() if name not in torchs_own()})
    optimizer.step(closure)  # type: ignore[arg-type]
    own = {name: value for name, value in vars(optimizer).items() if name not in torchs_own()}
    assert described(own).texts == before.texts


def test_what_a_gradient_scaler_lends_to_a_fused_step_is_no_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu")
    seen: list[set[str]] = []

    def stepped(*_: Any) -> None:
        described = Described()
        described.add(optimizer, "optimizer 0", optimizers=True)
        seen.append({*described.texts, *described.tensors})

    optimizer.register_step_post_hook(stepped)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    stepped()
    inside, behind = seen
    assert inside == behind
