"""After a restart an optimizer finds zeros, and no gradient at all, where the undisturbed run has these."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from jitckpt.state import zero_gradients
from jitckpt.state.host_state import HostState
from jitckpt.state.tensors_seen import DENSE, NO_GRADIENT, SPARSE
from jitckpt.state.zero_gradients import Gradients
from jitckpt.worker.saving.history import History

STEPS, SAVED = 9, 4
USED = SAVED  # the branch, for the last time
EVALUATES = "behind an evaluation"  # which takes gradients, so that it looks like the next minibatch


def take_away(training: "Training") -> None:
    training.optimizer.zero_grad()


def make_zeros(training: "Training") -> None:
    training.net.zero_grad(set_to_none=False)


def make_zeros_by_hand(training: "Training") -> None:
    for parameter in training.net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def some_of_each(training: "Training") -> None:
    training.net["trunk"].zero_grad()
    training.net["branch"].zero_grad(set_to_none=False)
    training.net["never"].zero_grad()


CLEARS: list[Callable[["Training"], None]] = [take_away, make_zeros, make_zeros_by_hand, some_of_each]


class Training:
    """Clears its gradients where `where` says; hooks would call History as it does."""

    def __init__(self, where: str, clear: Callable[["Training"], None], passes: int) -> None:
        torch.manual_seed(0)
        self.where, self.clear, self.passes = where, clear, passes
        self.net = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("trunk", "branch", "never")})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, weight_decay=0.1)
        self.host = HostState(
            model=self.net,
            optimizers=[self.optimizer],
            schedulers=[],
            scaler=None,
            extra=None,
            device=None,
        )
        self.history = History(self.host)

    def run(self, first: int, *, until: str = "end") -> "Training":
        """Make the steps; until: where in minibatch SAVED + 1, or in the one before (step), it stops."""
        for step in range(first, STEPS + 1):
            self.clear_at("top")
            for number in range(self.passes):
                has_begun = number or (self.where == EVALUATES and step > first)
                (self.history.settle_again if has_begun else self.history.settle)(step - 1)
                if (step, until) == (SAVED + 1, f"pass {number}"):
                    return self
                loss = self.loss(step)
                if number == 0:
                    self.clear_at("behind the pass")
                loss.backward()
            self.optimizer.step()
            self.history.add(step, self.host.shared())
            if (step, until) == (SAVED, "step"):
                return self
            self.clear_at("behind the step")
            if self.where == EVALUATES:
                self.history.settle(step)
                self.clear_at(EVALUATES)
        return self

    def clear_at(self, place: str) -> None:
        if place == self.where:
            self.clear(self)

    def loss(self, step: int) -> Tensor:
        x = torch.full((1, 3), 0.1 * step)
        used = self.net["trunk"](x) + (self.net["branch"](x) if step <= USED else 0)
        return used.square().sum()  # type: ignore[no-any-return]

    def restarted(self) -> "Training":
        """Return what a start has that restores what this one saves now."""
        snapshot = self.history.snapshot(SAVED)
        assert snapshot is not None
        new = Training(self.where, self.clear, self.passes)
        new.net.load_state_dict(self.net.state_dict())
        new.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        new.loss(1).backward()  # of a script that warms up
        new.host.restore_gradients(snapshot.shared.gradients.there())
        return new


@pytest.mark.parametrize("until", ["step", "pass 0", "pass 1"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("where", ["top", "behind the pass", "behind the step", EVALUATES])
def test_a_restart_ends_as_the_undisturbed_run(
    where: str, clear: Callable[[Training], None], until: str
) -> None:
    passes = 2 if until == "pass 1" else 1
    undisturbed = Training(where, clear, passes).run(1)
    restarted = Training(where, clear, passes).run(1, until=until).restarted().run(SAVED + 1)
    for one, other in zip(undisturbed.net.parameters(), restarted.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_them_it_would_end_otherwise() -> None:
    undisturbed = Training("top", make_zeros, 1).run(1)
    restarted = Training("top", make_zeros, 1).run(1, until="pass 0").restarted()
    restarted.optimizer.zero_grad()
    one, other = undisturbed.net.state_dict(), restarted.run(SAVED + 1).net.state_dict()
    assert torch.equal(one["trunk.weight"], other["trunk.weight"])
    assert not torch.equal(one["branch.weight"], other["branch.weight"])


def test_a_parameter_that_comes_into_an_optimizer_is_followed() -> None:
    training = Training("top", make_zeros, 1)
    training.run(1)
    own = nn.Parameter(torch.ones(2))
    own.grad = torch.ones(2)
    training.optimizer.add_param_group({"params": [own]})
    training.host.shared()
    expected = {f"model.{layer}.{name}" for layer in ("trunk", "branch") for name in ("weight", "bias")}
    assert training.host.gradients().there().keys() == expected | {"optimizer.0.own.0"}


def test_zeros_lie_as_gradients_do() -> None:
    """Rows of an embedding are sparse, and a later pass adds to them."""
    embedding = nn.Embedding(5, 3, sparse=True)
    dense = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    unused = nn.Parameter(torch.ones(2))
    parameters = {"rows": embedding.weight, "dense": dense, "frozen": frozen, "unused": unused}
    zero_gradients.put(parameters, {"rows": SPARSE, "dense": DENSE, "frozen": DENSE})
    embedding(torch.tensor([1, 4])).sum().backward()
    rows = embedding.weight.grad
    assert rows is not None
    assert rows.is_sparse
    assert rows.coalesce().indices().tolist() == [[1, 4]]
    assert dense.grad is not None
    assert dense.grad.stride() == dense.stride()
    assert not dense.grad.any()
    assert frozen.grad is not None
    assert unused.grad is None


def test_what_a_graph_may_write_to_stays_the_same_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    zero_gradients.put({"one": parameter}, {"one": DENSE})
    assert parameter.grad is gradient
    assert gradient.tolist() == [0, 0]
    zero_gradients.put({"one": parameter}, {"one": SPARSE})
    assert parameter.grad is not None
    assert parameter.grad.is_sparse


def test_which_are_taken_away() -> None:
    before = Gradients(("one", "other"), bytes([DENSE, SPARSE]))
    now = Gradients(("one", "other"), bytes([NO_GRADIENT, SPARSE]))
    assert before.taken_away(now) == {"one"}
    assert before.taken_away(before) == now.taken_away(before) == frozenset()
    assert before.without(frozenset({"one"})) == now
    assert now.there() == {"other": SPARSE}
