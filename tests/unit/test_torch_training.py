"""The hooks into a PyTorch training loop."""

from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict

from jitckpt.hooks import captured_graphs
from jitckpt.hooks.torch_training import TrainingHooks


class Told:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []

    def minibatch_begun(self, step: int) -> None:
        self.all.append(("begun", step))

    def forward_ended(self, step: int) -> None:
        self.all.append(("forward", step))

    def step_begun(self, step: int) -> None:
        self.all.append(("step", step))

    def step_ended(self, step: int) -> None:
        self.all.append(("ended", step))

    def passed_again(self, step: int) -> None:
        pass

    def closure_again(self, step: int) -> None:
        self.all.append(("closure again", step))

    def unequal_turns(self, step: int) -> None:
        self.all.append(("unequal", step))

    def captured_step(self, step: int) -> None:
        self.all.append(("captured step", step))

    def minibatch_ended(self, step: int) -> None:
        self.all.append(("boundary", step))

    def drawn_ahead(self) -> None:
        self.all.append(("drawn ahead", 0))

    def steps_again(self) -> None:
        self.all.append(("again", 0))

    def several_steps(self) -> None:
        self.all.append(("several", 0))

    def phase(self, step: int, name: str) -> None:
        self.all.append((name, step))

    def take(self) -> list[tuple[str, int]]:
        told, self.all = self.all, []
        return told


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def attached() -> Iterator[list[TrainingHooks]]:
    hooks: list[TrainingHooks] = []
    yield hooks
    for one in hooks:
        one.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def forward_backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


STEP = ["begun", "forward", "step", "ended"]


def test_each_minibatch_is_told_once(told: Told, attached: list[TrainingHooks]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer]))
    for step in (1, 2):
        forward_backward(model)
        optimizer.step()
        assert told.take() == [(name, step) for name in STEP]
        assert attached[0].step == step


@pytest.mark.parametrize("is_given", [True, False])
def test_a_step_that_torch_makes_to_have_the_state_is_not_told(
    told: Told, attached: list[TrainingHooks], is_given: bool
) -> None:
    """It was counted: a restart left a minibatch out. This optimizer has no state, so each call makes one."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer] if is_given else []))
    made: list[object] = []
    optimizer.register_step_post_hook(lambda *_: made.append(None))
    for step in (1, 2):
        get_state_dict(model, optimizer)
        assert told.take() == []
        assert len(made) == 2 * step - 1
        forward_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert told.take() == [(name, step) for name in STEP]


def test_micro_batches_belong_to_one_minibatch(told: Told, attached: list[TrainingHooks]) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer]))
    for _ in range(3):
        forward_backward(model)
    optimizer.step()
    assert [name for name, _ in told.take()] == ["begun", "forward", "forward", "forward", "step", "ended"]


def test_an_evaluation_is_not_told(told: Told, attached: list[TrainingHooks]) -> None:
    model = nn.Linear(2, 2)
    attached.append(TrainingHooks(told, model=model, optimizers=[sgd(model)], on_phase=told.phase))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert told.take() == []


def test_with_several_optimizers_a_minibatch_is_a_step_of_each(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, other = sgd(model[0]), sgd(model[1])
    attached.append(TrainingHooks(told, model=model, optimizers=[one, other]))
    for step in (1, 2):
        forward_backward(model)
        other.step()
        assert told.take() == [("begun", step), ("forward", step), ("step", step)]
        one.step()
        assert told.take() == [("ended", step)]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_the_scaler_skips_counts(
    told: Told, attached: list[TrainingHooks], enabled: bool
) -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    scaler = GradScaler("cpu", enabled=enabled)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer], scaler=scaler))
    for step, value in enumerate((1.0, float("inf"), 1.0), start=1):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert told.take() == [(name, step) for name in STEP]
    attached[0].detach()
    assert "step" not in vars(scaler)


def test_phases_are_told_as_the_loop_comes_to_them(told: Told, attached: list[TrainingHooks]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"nothing": None, "parts": (x, [self.linear(x)])}

    model = Model()
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer], on_phase=told.phase))
    for step in (1, 2):
        output = model(torch.ones(1, 2))
        assert told.take() == [("begun", step), ("forward", step), ("forward", step)]
        output["parts"][1][0].sum().backward()
        assert told.take() == [("backward", step)]
        optimizer.step()
        assert told.take() == [("step", step), ("optimizer", step), ("ended", step), ("between", step)]


def test_an_exception_from_a_phase_ends_the_loop_there(told: Told, attached: list[TrainingHooks]) -> None:
    def fail(step: int, name: str) -> None:
        if name == "backward":
            raise RuntimeError(f"rehearsed in step {step}")

    model = nn.Linear(2, 2)
    attached.append(TrainingHooks(told, model=model, optimizers=[sgd(model)], on_phase=fail))
    with pytest.raises(RuntimeError, match="rehearsed in step 1"):
        forward_backward(model)


def test_without_objects_the_first_optimizer_that_steps_counts(
    told: Told, attached: list[TrainingHooks]
) -> None:
    attached.append(TrainingHooks(told, model=None, optimizers=[]))
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, second = sgd(model), sgd(other)
    for step in (1, 2):
        forward_backward(model)
        optimizer.step()
        assert told.take() == [(name, step) for name in STEP]
        second.step()
        assert told.take() == []
    assert attached[0].watched == [optimizer]


def test_every_optimizer_of_the_first_minibatch_makes_up_the_next(
    told: Told, attached: list[TrainingHooks]
) -> None:
    """That there is a second one is known when the first has ended its step."""
    attached.append(TrainingHooks(told, model=None, optimizers=[], every_optimizer=True))
    (hooks,) = attached
    hooks.step = 7  # after a restart
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, other = sgd(model[0]), sgd(model[1])
    forward_backward(model)
    one.step()
    assert told.take() == [(name, 8) for name in STEP]
    other.step()
    assert (told.take(), hooks.is_learned, hooks.watched) == ([], False, [one, other])
    for step in (9, 10):
        one.step()
        assert hooks.is_learned
        assert told.take() == [("begun", step), ("forward", step), ("step", step)]
        other.step()
        assert told.take() == [("ended", step)]
    assert vars(hooks)["unexpected"] is None
    third = sgd(nn.Linear(2, 2))
    third.step()
    assert told.take() == []
    assert hooks.unexpected is third


def test_an_optimizer_that_makes_several_steps_for_one_of_the_first_is_not_expected(
    told: Told, attached: list[TrainingHooks]
) -> None:
    attached.append(TrainingHooks(told, model=None, optimizers=[], every_optimizer=True))
    one, other = sgd(nn.Linear(2, 2)), sgd(nn.Linear(2, 2))
    one.step()
    other.step()
    other.step()
    assert attached[0].unexpected is other


def test_a_scaler_that_was_not_given_is_found_and_what_it_skips_counts(
    told: Told, attached: list[TrainingHooks]
) -> None:
    original = GradScaler.step
    attached.append(TrainingHooks(told, model=None, optimizers=[], every_optimizer=True, every_scaler=True))
    model = nn.Linear(2, 1)
    optimizer, scaler = sgd(model), GradScaler("cpu")
    for step, value in enumerate((float("inf"), 1.0, float("inf")), start=1):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert told.take() == [(name, step) for name in STEP]
    assert (attached[0].found_scaler, attached[0].unexpected) == (scaler, None)
    attached[0].detach()
    assert GradScaler.step is original


def test_with_boundaries_a_step_by_a_scaler_that_was_not_given_is_one_step(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model = nn.Linear(2, 1)
    optimizer, scaler = sgd(model), GradScaler("cpu")
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer], every_scaler=True)
    attached.append(hooks)
    hooks.boundary()
    for step, value in enumerate((1.0, float("inf"), 1.0), start=1):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        hooks.boundary()
        assert hooks.step == step
    assert ("several", 0) not in told.take()


def test_without_a_model_the_outermost_module_tells_the_phases(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    attached.append(TrainingHooks(told, model=None, optimizers=[], on_phase=told.phase))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    told.take()
    forward_backward(model)
    assert told.take() == [("forward", 1), ("forward", 1), ("backward", 1)]


def test_detached_hooks_say_nothing(told: Told) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    for hooks in (
        TrainingHooks(
            told, model=model, optimizers=[optimizer], scaler=GradScaler("cpu"), on_phase=told.phase
        ),
        TrainingHooks(told, model=None, optimizers=[], on_phase=told.phase),
    ):
        hooks.detach()
    forward_backward(model)
    optimizer.step()
    assert told.all == []


def test_ddp_and_its_module_are_alike(told: Told, attached: list[TrainingHooks]) -> None:
    inner = nn.Linear(2, 2)
    outer = nn.DataParallel(inner)
    optimizer = sgd(inner)
    attached.append(TrainingHooks(told, model=inner, optimizers=[optimizer]))
    forward_backward(outer)
    optimizer.step()
    assert told.take() == [(name, 1) for name in STEP]


class Agent(nn.Module):
    """Has no forward of its own, and parts in an attribute of another such module."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({"actor": nn.Sequential(nn.Linear(2, 2))})


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]), Agent()])
def test_the_forward_pass_of_a_model_without_one_is_that_of_its_parts(
    told: Told, attached: list[TrainingHooks], model: nn.Module
) -> None:
    """Other ranks may make a step that this one, whose backward pass was its last, does not come to."""
    part = next(one for one in model.modules() if isinstance(one, nn.Sequential))
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer]))
    for step in (1, 2):
        part(torch.ones(1, 2)).sum().backward()
        assert told.take() == [("begun", step), ("forward", step)]
        with torch.no_grad():
            part(torch.ones(1, 2))
        optimizer.step()
        assert told.take() == [("step", step), ("ended", step)]


def test_a_model_whose_forward_is_never_called_is_past_it_when_the_step_begins(told: Told) -> None:
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    hooks = TrainingHooks(told, model=parts, optimizers=[optimizer])
    parts[1](parts[0](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert [name for name, _ in told.take()] == STEP
    hooks.detach()


def test_a_model_whose_forward_is_never_called_is_watched_by_its_parts(
    told: Told, attached: list[TrainingHooks]
) -> None:
    """Else what a rank alone knows is lost with it behind its forward pass, and other ranks make the step."""
    parts: Any = nn.Sequential(nn.Linear(2, 2), Agent(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    attached.append(TrainingHooks(told, model=parts, optimizers=[optimizer]))
    for step in (1, 2):
        loss = parts[2](parts[1].nets.actor(parts[0](torch.ones(1, 2)))).sum()
        assert told.take() == [("begun", 2), *[("forward", 2)] * 3] * (step == 2)
        loss.backward()
        optimizer.step()
        told.take()


def test_a_model_that_is_wrapped_anew_is_watched_inside(told: Told, attached: list[TrainingHooks]) -> None:
    """As DistributedDataParallel is, once some layers are frozen no more."""
    inner = nn.Linear(2, 2)
    optimizer = sgd(inner)
    attached.append(TrainingHooks(told, model=nn.DataParallel(inner), optimizers=[optimizer]))
    for step in (1, 2):
        forward_backward(nn.DataParallel(inner))
        assert told.take() == [("begun", 2), ("forward", 2)] * (step == 2)
        optimizer.step()
        told.take()


@pytest.mark.parametrize("given", [True, False])
def test_a_step_that_calls_its_base_classs_step_counts_once(
    given: bool, told: Told, attached: list[TrainingHooks]
) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            told.all.append(("own", 0))

    model = nn.Linear(2, 1)
    sgd(model)  # from now on torch calls hooks in the base class's step, too
    optimizer = Own(model.parameters(), lr=0.1)
    attached.append(TrainingHooks(told, model=None, optimizers=[optimizer] if given else []))
    for step in (1, 2):
        forward_backward(model)
        optimizer.step()
        assert told.take() == [
            ("begun", step),
            ("forward", step),
            ("step", step),
            ("own", 0),
            ("ended", step),
        ]


def test_a_step_that_was_left_with_an_exception_is_made_again(
    told: Told, attached: list[TrainingHooks]
) -> None:
    def fails() -> float:
        raise ValueError("no loss")

    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=None, optimizers=[optimizer]))
    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(fails)
    forward_backward(model)
    optimizer.step()
    assert told.take() == [("begun", 1), ("forward", 1), ("step", 1), ("ended", 1)]


class Asked(Told):
    """Writes down what else it is told, too."""

    def passed_again(self, step: int) -> None:
        self.all.append(("again", step))


def small() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_closures_passes_come_before_the_step_and_further_ones_are_told() -> None:
    model, _ = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    told = Told()
    TrainingHooks(told, model=model, optimizers=[optimizer])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return cast(Tensor, loss)

    optimizer.step(closure)
    first = told.take()
    assert first[:3] == [("begun", 1), ("forward", 1), ("step", 1)]
    assert first[3] == ("closure again", 1)
    assert first[-1] == ("ended", 1)
    optimizer.step(closure=closure)
    assert told.take()[:3] == [("begun", 2), ("forward", 2), ("step", 2)]


def test_a_closure_that_is_never_called_is_no_obstacle() -> None:
    class Careless(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    model, _ = small()
    optimizer, told = Careless(model.parameters(), lr=0.1), Told()
    TrainingHooks(told, model=model, optimizers=[optimizer])
    optimizer.step(lambda: 1.0)
    assert told.take() == [("begun", 1), ("forward", 1), ("step", 1), ("ended", 1)]


def test_an_optimizer_that_steps_twice_before_another_is_told(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model, first = small()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    attached.append(TrainingHooks(told, model=model, optimizers=[first, second]))
    first.step()
    told.take()
    hooks = attached[0]
    for iterations in range(2, 6):
        first.step()
        assert ("unequal", iterations - 1) in told.take()
        assert hooks.step + 1 == iterations, "an iteration of the loop is counted all the same"


def test_a_step_of_the_optimizer_inside_of_another_is_its_own() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    model, inner = small()
    outer, told = Around(inner), Told()
    TrainingHooks(told, model=model, optimizers=[outer])
    whole = [("begun", 1), ("forward", 1), ("step", 1), ("ended", 1)]
    outer.step()
    assert told.take() == whole
    inner.step()
    assert [(name, step - 1) for name, step in told.take()] == whole


def test_a_pass_behind_an_evaluation_with_gradients_is_told() -> None:
    model, optimizer = small()
    told = Asked()
    TrainingHooks(told, model=model, optimizers=[optimizer])
    model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert told.take() == [
        ("begun", 1), ("forward", 1), ("again", 1), ("forward", 1), ("step", 1), ("ended", 1),
    ]  # fmt: skip


def two_models() -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    both = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return both, [sgd(both[0]), sgd(both[1])]


def test_with_boundaries_one_iteration_is_one_minibatch_whatever_optimizers_step(
    told: Told, attached: list[TrainingHooks]
) -> None:
    both, (one, other) = two_models()
    hooks = TrainingHooks(told, model=both, optimizers=[one, other])
    attached.append(hooks)
    hooks.boundary()
    for step, turns in enumerate(([one], [one, one], [other, one], [other]), start=1):
        for optimizer in turns:
            forward_backward(both[0])
            forward_backward(both[1])
            optimizer.step()
        names = [name for name, _ in told.take()]
        passes = ["forward", "forward"]
        again = [*passes, "forward"] * (len(turns) - 1)  # and as each optimizer has ended its step
        assert names == [*passes, "step", "forward", *again], "none is whole before the boundary"
        assert hooks.step == step - 1
        assert hooks.boundary()
        several = [("several", 0)] if len(turns) > 1 else []
        assert told.take() == [("ended", step), *several, ("boundary", step)]


def test_a_single_step_ends_the_minibatch_and_the_boundary_settles_it(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer])
    attached.append(hooks)
    assert not hooks.boundary()
    for step in (1, 2, 3):
        forward_backward(model)
        optimizer.step()
        forward_backward(model)  # a validation that takes gradients
        assert hooks.step == step - (step == 1), "only the first one waits to see what comes"
        hooks.boundary()
        rest = (
            ["step", "ended", "boundary"] if step > 1 else ["step", "forward", "forward", "ended", "boundary"]
        )
        assert [name for name, _ in told.take()] == ["forward", *rest]
        assert hooks.step == step


def test_an_iteration_without_a_step_belongs_to_the_next(told: Told, attached: list[TrainingHooks]) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer])
    attached.append(hooks)
    hooks.boundary()
    for _ in range(2):
        forward_backward(model)
        assert not hooks.boundary()
    forward_backward(model)
    optimizer.step()
    assert hooks.boundary()
    assert [*dict.fromkeys(told.take())] == [("forward", 1), ("step", 1), ("ended", 1), ("boundary", 1)]


def test_a_second_step_that_none_foresaw_is_told_and_the_next_ones_are_taken_together(
    told: Told, attached: list[TrainingHooks]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer])
    attached.append(hooks)
    hooks.boundary()
    for steps in (1, 2, 2):
        for _ in range(steps):
            forward_backward(model)
            optimizer.step()
        hooks.boundary()
    assert [step for name, step in told.all if name == "boundary"] == [1, 3, 4]
    assert [name for name, _ in told.all].count("again") == 1


def test_a_batch_that_is_drawn_before_the_step_is_told(told: Told, attached: list[TrainingHooks]) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer])
    attached.append(hooks)
    hooks.boundary()
    loss = model(torch.ones(1, 2)).sum()
    hooks.boundary()
    loss.backward()
    optimizer.step()
    assert ("drawn ahead", 0) in told.take()


def test_with_boundaries_every_optimizer_counts_where_none_was_given(
    told: Told, attached: list[TrainingHooks]
) -> None:
    _, (one, other) = two_models()
    hooks = TrainingHooks(told, model=None, optimizers=[])
    attached.append(hooks)
    hooks.boundary()
    for optimizer in (one, other, other):
        optimizer.step()
        hooks.boundary()
    assert hooks.step == 3
    assert hooks.watched == [one, other]


def test_the_phases_of_a_model_whose_parts_alone_are_called_are_theirs(
    told: Told, attached: list[TrainingHooks]
) -> None:
    """A network and its average, or a GAN's two, given as one."""
    part, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1)
    model = nn.ModuleList([part, nn.Sequential(other)])
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer], on_phase=told.phase))
    around = nn.Sequential(part)  # such as DistributedDataParallel, which is no part of the model
    other(around(torch.ones(1, 2))).sum().backward()
    with torch.no_grad():
        part(torch.ones(1, 2))
    phases = [name for name, _ in told.take() if name in ("forward", "backward")]
    # The second one is no phase, but that the part's has ended.
    assert phases == ["forward", "forward", "forward", "backward", "backward"]
    optimizer.step()
    # What is kept of the ranks' own state is what it is without a rehearsal.
    names = [name for name, _ in told.take()]
    assert names.count("step") == 1


def test_what_is_captured_is_told_when_it_is_replayed(
    told: Told, attached: list[TrainingHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    attached.append(TrainingHooks(told, model=model, optimizers=[optimizer]))
    graph = object()
    monkeypatch.setattr(captured_graphs, "capturing", [graph])
    monkeypatch.setattr(captured_graphs, "_steps_in", {graph: WeakSet()})
    monkeypatch.setattr(captured_graphs, "is_now", lambda: True)
    forward_backward(model)
    optimizer.step()
    assert told.take() == []
    monkeypatch.undo()
    for step in (1, 2):
        attached[0].replay_begins([])  # of a forward and a backward pass
        attached[0].replay_ended([])
        optimizer.step()
        assert told.take() == [(name, step) for name in STEP]
    attached[0].replay_begins([optimizer])
    assert told.take() == [("captured step", 3), ("begun", 3)]
    attached[0].replay_begins(None)
    assert told.take() == [("captured step", 3)], "a graph whose capture nobody has seen may make steps"


def test_a_graph_of_a_pass_in_a_module_is_none_of_the_scripts(
    told: Told, attached: list[TrainingHooks]
) -> None:
    attached.append(TrainingHooks(told, model=nn.Linear(2, 2), optimizers=[]))
    with torch.no_grad():  # as inside of an autograd function
        attached[0].replay_begins([])
        attached[0].replay_ended([])
    assert told.take() == []


def test_a_module_is_made_a_graph_of_without_jitckpts_hooks(
    told: Told, attached: list[TrainingHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    attached.append(TrainingHooks(told, model=model, optimizers=[sgd(model)]))
    own = model.register_forward_hook(lambda *_: None)
    there = [*model._forward_hooks], [*model._forward_pre_hooks]
    with captured_graphs.without_own_hooks((model,)):
        assert [*model._forward_hooks] == [own.id]
        assert not model._forward_pre_hooks
    assert sorted(model._forward_hooks) == sorted(there[0])
    assert [*model._forward_pre_hooks] == there[1]
