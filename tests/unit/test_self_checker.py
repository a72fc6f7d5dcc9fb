"""Which check is made, and what is tried of a save's file."""

import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from jitckpt.cli import run
from jitckpt.doctor import checks
from jitckpt.encoding import tensor_file
from jitckpt.state.host_state import HostState
from jitckpt.wire import protocol
from jitckpt.wire.environment import SELF_CHECK
from jitckpt.worker import arguments
from jitckpt.worker.around_steps import AroundSteps
from jitckpt.worker.saving.history import History
from jitckpt.worker.self_check import checker
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)
from jitckpt.worker.self_check.first_steps import FirstSteps
from jitckpt.worker.self_check.not_given import NotGiven
from jitckpt.worker.switch import Switch

TENSORS = {
    "weight": torch.randn(8, 4).t(),
    "half": torch.randn(5).to(torch.bfloat16),
    "none": torch.empty(0),
    "unknown": torch.empty(1 << 20, device="meta"),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_a_file_gives_back_what_was_written(piece: int) -> None:
    assert checker.changed_by_a_file(TENSORS, piece) == []


def test_a_file_that_loses_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    read = tensor_file.read

    def damaged(data: bytes) -> dict[str, Tensor]:
        found = read(data)
        return {name: tensor.float() if name == "half" else tensor for name, tensor in found.items()}

    monkeypatch.setattr(tensor_file, "read", damaged)
    (difference,) = checker.changed_by_a_file(TENSORS, 1)
    assert (difference.name, difference.what) == ("half", "not read from a file as it was written")


@pytest.mark.parametrize(
    ("given", "variable", "wanted"),
    [
        (None, None, SAMPLED_SELF_CHECK),
        (None, NO_SELF_CHECK, NO_SELF_CHECK),
        (None, FULL_SELF_CHECK, FULL_SELF_CHECK),
        (True, NO_SELF_CHECK, SAMPLED_SELF_CHECK),
        (True, FULL_SELF_CHECK, FULL_SELF_CHECK),
        (False, FULL_SELF_CHECK, NO_SELF_CHECK),
    ],
)
def test_the_script_decides_before_the_environment(
    given: bool | None, variable: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SELF_CHECK.name, raising=False)
    if variable is not None:
        monkeypatch.setenv(SELF_CHECK.name, variable)
    assert arguments.self_check(given) == wanted


def test_the_launchers_option_decides_before_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SELF_CHECK.name, raising=False)
    assert run._self_check(None) == {}
    assert run._self_check(True) == {SELF_CHECK.name: SAMPLED_SELF_CHECK}
    assert run._self_check(False) == {SELF_CHECK.name: NO_SELF_CHECK}
    monkeypatch.setenv(SELF_CHECK.name, FULL_SELF_CHECK)
    assert run._self_check(True) == {}, "a rehearsal has asked for all of it"


def test_small_tensors_are_looked_at_as_far_as_memory_is_for_them() -> None:
    sizes = {"c": torch.empty(3), "a": torch.empty(1), "b": torch.empty(2)}
    assert checker._sample(sizes, 16 + 32) == {"a", "b"}
    assert checker._sample(sizes, 16 + 31) == {"a"}
    assert checker._sample(sizes, None) == {"a", "b", "c"}


def check(rank: int, **fields: Any) -> dict[str, Any]:
    values = {"tensors": 7, "bytes": 2048, "seconds": 0.1, "held_up": 0.001, "differences": [], "skipped": []}
    return {"event": "self_check", "rank": rank, "step": 2} | values | fields


def test_doctor_says_what_the_check_has_found() -> None:
    assert checks.check_self_checks([{"event": "first_step", "rank": 0}]) == []
    (row,) = checks.check_self_checks([check(0), check(1, tensors=9, bytes=4096)])
    assert (row.check, row.state) == ("self-check", "ok")
    assert row.found.startswith("a save brings 9 tensors (4.1 kB)")
    lost = check(1, differences=["counter (not restored)"])
    (row,) = checks.check_self_checks([check(0), lost, lost])
    assert (row.state, row.found) == ("problem", "counter (not restored)")
    rows = checks.check_self_checks([lost | {"kept": ["a GradScaler"]}, lost])
    assert [(row.check, row.state) for row in rows] == [("kept by itself", "ok"), ("self-check", "problem")]
    assert rows[0].found == "a GradScaler"
    skipped = check(0, skipped=["nothing was restored"])
    assert [row.state for row in checks.check_self_checks([skipped])] == ["warning"]


def test_a_message_with_much_to_say_can_be_sent() -> None:
    texts = ["x" * 10_000] * 100
    message = protocol.SelfCheck(0, 2, 1, 1, 0.0, 0.0, texts, texts)
    assert len(protocol.encode(message)) < protocol.MAX_BYTES
    assert len(message.differences) == 8


class Copies:
    """On the host nothing has to be copied."""

    def __init__(self, *_: object) -> None:
        pass

    def begin(self, *_: object) -> tuple[int, dict[str, Tensor]]:
        return 1, {}

    def step_begins(self) -> None:
        pass

    def are_there(self, number: int) -> bool:
        return number == 1


class Around(torch.optim.Optimizer):
    """Has another one inside, and no state_dict of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.inner, self.done = inner, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.done += 1


@pytest.mark.parametrize("is_around_another", [False, True])
def test_the_scripts_objects_are_looked_at_by_its_own_thread(
    monkeypatch: pytest.MonkeyPatch, is_around_another: bool
) -> None:
    """The other thread would see them in the middle of a later step."""
    monkeypatch.setattr(checker, "HostCopies", Copies)
    looked: list[threading.Thread] = []
    look = NotGiven.look

    def watched(*given: Any) -> Any:
        looked.append(threading.current_thread())
        return look(*given)

    monkeypatch.setattr(NotGiven, "look", watched)
    model = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    optimizer = Around(optimizer) if is_around_another else optimizer
    host = HostState(model=model, optimizers=[optimizer], schedulers=[], scaler=None, extra=None, device=None)
    history = History(host)
    reported: list[protocol.WorkerMessage] = []
    warned: list[str] = []
    self_checker = checker.SelfChecker(
        model=model,
        host=host,
        history=history,
        rank=0,
        full=True,
        write_word=lambda *_: None,
        post=None,
        may_say=lambda: True,
        found_scaler=lambda: None,
        report=reported.append,
        warn=warned.append,
    )
    for step in range(1, 1 + max(checker.CHECKED_STEPS)):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        history.add(step, host.shared())
        self_checker.step_ended(step, host.local, history.shared(step))
        history.settle(step)
        self_checker.settled(step)
        self_checker.wait(60)
    assert self_checker.is_done
    assert looked == [threading.current_thread()] * len(checker.CHECKED_STEPS)
    assert len(reported) == len(checker.CHECKED_STEPS)
    assert warned == []


def around_steps(check: Mock) -> Any:
    """Return what is done around the steps, of which all but the check are mocks that have nothing to do."""
    one: Any = AroundSteps.__new__(AroundSteps)
    one.switch, one._check = (
        Switch(lambda: 0, lambda step: None, lambda text: None),
        FirstSteps(check, Mock()),
    )
    for name in ("host", "history", "loop", "goes_on", "outside", "own", "savers", "read", "lookouts"):
        setattr(one, f"_{name}", Mock())
    one._variables = None
    one._savers.pending.return_value = []
    return one


def test_what_is_being_checked_is_looked_at_once_more_as_the_minibatch_ends() -> None:
    """Else replicas would copy it before and behind a change that belongs to the minibatch, and differ."""
    for is_pending in (True, False):
        check = Mock(is_done=False)
        check.is_pending.return_value = is_pending
        steps = around_steps(check)
        steps._settle_at_boundary(2)
        assert steps._outside.minibatch_begun.call_args.kwargs["look"] == is_pending
        assert steps.switch.off is None


@pytest.mark.parametrize("is_pending", [True, False])
def test_it_is_looked_at_as_the_next_forward_pass_begins(is_pending: bool) -> None:
    """In a loop over range(), where what changes outside of the step is seen in the step, as a rule."""
    check = Mock(is_done=False)
    check.is_pending.return_value = is_pending
    steps = around_steps(check)
    steps._outside.minibatch_begun.return_value = False
    steps._outside.has_changed = True
    steps._outside.tells_apart = False
    steps._settle_at_forward(3)
    assert steps.switch.off is None
    assert check.settled.call_args.args[0] == 2
    assert (check.settled.call_args.args[1] is not None) == is_pending
    assert check.step_begins.called == is_pending
