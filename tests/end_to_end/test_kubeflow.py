"""`jitckpt run` tells Kubeflow Trainer how far the training is, which goes on whatever becomes of that."""

from collections.abc import Iterator

import pytest
from gpt import RUN, STEPS, TRAINING, digests
from kubeflow_server import Server
from launcher import Launcher

FAULT = ["--fault", "rank=1 step=5 phase=backward kind=kill"]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("kubeflow"))
    yield made
    made.close()


def test_it_is_told_how_far_the_training_is(
    launcher: Launcher, server: Server, undisturbed: list[str]
) -> None:
    variables = [f"{name}={value}" for name, value in server.environment.items()]
    ended = launcher.run("env", *variables, *RUN, "--total-steps", str(STEPS), *FAULT, *TRAINING)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    last = server.reports[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {"name": "restarts", "value": "1"} in last["metrics"]
    assert "Kubeflow" not in ended.err


def test_the_training_does_not_wait_for_a_server_that_never_answers(
    launcher: Launcher, server: Server, undisturbed: list[str]
) -> None:
    server.answer = None
    variables = [f"{name}={value}" for name, value in server.environment.items()]
    ended = launcher.run("env", *variables, *RUN, "--total-steps", str(STEPS), *FAULT, *TRAINING)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    assert server.asked >= 1
    assert ended.err.count("Kubeflow can't be told") == 1
