"""Training on softgpu equals training on torch's CPU backend, bit for bit."""

import json
from collections.abc import Callable

import pytest

GPT_OPTIMIZERS = (
    *("sgd", "sgd foreach", "sgd fused"),
    *("adam", "adam foreach", "adam fused", "adam capturable"),
    *("adamw", "adamw foreach", "adamw fused", "adamw capturable"),
)
RECIPES: list[dict[str, str | bool]] = [
    *[dict[str, str | bool](model="gpt", optimizer=optimizer) for optimizer in GPT_OPTIMIZERS],
    {"model": "gpt", "optimizer": "adamw fused", "autocast": "float16"},
    {"model": "gpt", "optimizer": "adamw foreach", "autocast": "bfloat16"},
    {"model": "convnet"},
    {"model": "convnet", "channels_last": True},
    {"model": "resnet", "optimizer": "adam fused"},
    {"model": "embedding bag", "optimizer": "adam"},
    {"model": "lstm"},
    {"model": "bidirectional lstm"},
    {"model": "gru", "optimizer": "adamw"},
    {"model": "rnn"},
    {"model": "rmsnorm"},
]


def test_tools_of_training_scripts(run_whole: Callable[..., str]) -> None:
    run_whole("tools")


def test_a_copy_of_the_state_to_the_host_takes_no_memory_of_the_device(run_whole: Callable[..., str]) -> None:
    found = json.loads(run_whole("snapshot"))
    assert found["before"] == found["peak"] == found["after"] > 0
    assert found["missing"] == 0


@pytest.fixture(scope="module")
def differences(run_whole: Callable[..., str]) -> list[list[str]]:
    """Per recipe, the names of the tensors that differ; one process trains all, to spare imports."""
    found: list[list[str]] = json.loads(run_whole("train_on_both", json.dumps(RECIPES)))
    return found


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=[",".join(map(str, r.values())) for r in RECIPES])
def test_equals_cpu(differences: list[list[str]], number: int) -> None:
    assert differences[number] == []
