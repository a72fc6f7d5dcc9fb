"""Minibatches that are validated may be made by deterministic algorithms, and no others."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD

from jitckpt.worker.in_place import keeper as keeper_module
from jitckpt.worker.in_place.deterministic import DeterministicMinibatch
from jitckpt.worker.in_place.keeper import MinibatchKeeper


def settings() -> tuple[int, bool, bool]:
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.get_deterministic_debug_mode(), torch.backends.cudnn.deterministic, filled


def some_process() -> SimpleNamespace:
    return SimpleNamespace(
        cudaGetErrorString=lambda error: b"",
        jitckpt_proxy_keep=lambda: 0,
        jitckpt_proxy_validate=lambda *_: 0,
        jitckpt_proxy_given_up=lambda: b"It is over.",
    )


PLAIN, WITHIN = (0, False, True), (1, True, False)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    with warnings.catch_warnings():
        assert settings() == PLAIN
        yield
    torch.set_deterministic_debug_mode(0)
    torch.backends.cudnn.deterministic = False
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("heard", [keeper_module._VALID, keeper_module._LEFT_OUT, keeper_module._OVER])
def test_they_are_on_in_the_minibatch_that_is_validated_and_in_no_other(
    heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was left out is tried in the next two."""
    found: dict[int, Any] = {}
    monkeypatch.setattr(keeper_module._Validation, "run", lambda self: heard)
    process = some_process()
    keeper = MinibatchKeeper(process, validate_every=3, deterministic=True)
    optimizer = SGD([torch.ones(1)], lr=1.0)
    for step in range(1, 10):
        found[step] = settings()
        keeper.step_begins(step, optimizer, dict)
        assert settings() == PLAIN
        keeper.step_ended(step, optimizer, dict)
    within = {step for step, now in found.items() if now == WITHIN}
    assert all(now == PLAIN for step, now in found.items() if step not in within)
    valid, left_out = keeper_module._VALID, keeper_module._LEFT_OUT
    assert within == {valid: {5, 8}, left_out: {5, 6, 7, 8, 9}}.get(heard, {5})


def test_hooks_that_fail_leave_all_as_it_was() -> None:
    process = some_process()
    keeper = MinibatchKeeper(process, validate_every=0, deterministic=True)
    keeper.step_ended(4, SGD([torch.ones(1)], lr=1.0), dict)
    assert settings() == WITHIN
    keeper.failed(4, TypeError("as a test"))
    assert settings() == PLAIN


def test_a_program_that_has_them_keeps_its_own_way() -> None:
    """Torch raises an error there, and fills memory."""
    torch.set_deterministic_debug_mode(2)
    minibatch = DeterministicMinibatch()
    minibatch.begin()
    assert settings() == (2, False, True)
    minibatch.end()
    assert settings() == (2, False, True)


def test_what_the_program_changes_meanwhile_stays() -> None:
    minibatch = DeterministicMinibatch()
    minibatch.begin()
    minibatch.begin()
    torch.set_deterministic_debug_mode(2)
    minibatch.end()
    assert settings() == (2, False, True)


def test_what_torch_says_of_an_operator_without_such_an_algorithm_ends_no_training() -> None:
    warnings.simplefilter("error")
    minibatch = DeterministicMinibatch()
    minibatch.begin()
    said = "put_ does not have a deterministic implementation, but you set so."
    with pytest.warns(UserWarning, match="put_"):
        warnings.warn(said, stacklevel=1)
    with pytest.raises(UserWarning, match="else"):
        warnings.warn("something else", stacklevel=1)
    minibatch.end()
