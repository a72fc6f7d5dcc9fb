"""Transparent mode in a worker, where the device proxy can't keep a minibatch."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

from jitckpt.wire import proxy_messages
from jitckpt.worker.in_place.keeper import MinibatchKeeper


@pytest.mark.parametrize("given_up", [b"", b"The agent is gone."])
def test_what_the_proxy_cant_keep_switches_it_off_once(
    given_up: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [0, 801]
    cleared: list[bool] = []

    def keep() -> int:
        return answers.pop(0)

    def text(error: int) -> bytes:
        return f"error {error}, as a test".encode()

    process = SimpleNamespace(
        jitckpt_proxy_keep=keep,
        cudaGetErrorString=text,
        cudaGetLastError=lambda: cleared.append(True),
        jitckpt_proxy_given_up=lambda: given_up,
    )
    keeper = MinibatchKeeper(process, validate_every=0)
    optimizer = SGD([torch.ones(1)], lr=1.0)
    for step in (1, 2, 3):
        keeper.step_begins(step, optimizer, dict)
        keeper.step_ended(step, optimizer, dict)
    assert answers == []
    assert cleared == [True]
    said = (
        "jitckpt: transparent mode is switched off after step 2: error 801, as a test. The training goes on, "
        "but it ends if a device's server dies.\n"
    )
    assert capsys.readouterr().err == ("" if given_up else said)  # else the proxy has said it


@pytest.mark.parametrize("is_told", [False, True])
def test_hooks_that_fail_are_told_once_whether_or_not_there_is_an_agent(
    is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = [1, 3, 0]  # calls are made again meanwhile, and then it is over
    said: list[tuple[int, str]] = []

    def validate(place: object, what: int, text: bytes, *_: bytes) -> int:
        said.append((what, text.decode()))
        return heard.pop(0)

    process = SimpleNamespace(
        cudaGetErrorString=lambda error: b"",
        jitckpt_proxy_validate=validate,
        jitckpt_proxy_given_up=lambda: b"It is over." if is_told else b"",
    )
    keeper = MinibatchKeeper(process, validate_every=0)
    keeper.failed(4, TypeError("as a test"))
    why = "around optimizer step 4 jitckpt's own hooks have failed: TypeError: as a test"
    assert said == 3 * [(proxy_messages.FAILED, why)]
    printed = f"jitckpt: Transparent mode is switched off: {why}. The training goes on undisturbed"
    assert capsys.readouterr().err.startswith("" if is_told else printed)
    keeper.step_begins(5, SGD([torch.ones(1)], lr=1.0), dict)  # which the process could not do


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_job_says_once_what_a_step_copies(
    rank: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(error: int) -> bytes:
        raise AssertionError(error)

    monkeypatch.setenv("RANK", rank)
    process = SimpleNamespace(
        jitckpt_proxy_keep=lambda: 0,
        jitckpt_proxy_image_bytes=lambda: 2_500_000,
        cudaGetErrorString=text,
    )
    keeper = MinibatchKeeper(process, validate_every=0)
    optimizer = SGD([torch.ones(1)], lr=1.0)
    keeper._valid = True
    for step in (6, 7, 8, 9, 10, 11):
        keeper.step_begins(step, optimizer, dict)
        keeper.step_ended(step, optimizer, dict)
    assert capsys.readouterr().err.count("each step copies 2.5 MB of rank 0's device") == lines
