"""Transparent mode in a worker, where the device proxy can't keep a minibatch."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD

from jitckpt.worker.in_place.keeper import MinibatchKeeper


def test_what_the_proxy_cant_keep_switches_it_off_once(capsys: pytest.CaptureFixture[str]) -> None:
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
    )
    keeper = MinibatchKeeper(process, validate_every=0)
    optimizer = SGD([torch.ones(1)], lr=1.0)
    for step in (1, 2, 3):
        keeper.step_begins(step, optimizer, dict)
        keeper.step_ended(step, optimizer, dict)
    assert answers == []
    assert cleared == [True]
    assert capsys.readouterr().err == (
        "jitckpt: transparent mode is switched off after step 2: error 801, as a test. The training goes on, "
        "but it ends if a device's server dies.\n"
    )


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
