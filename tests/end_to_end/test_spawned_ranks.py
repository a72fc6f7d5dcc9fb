"""A process that jitckpt has started makes its ranks itself, as mp.spawn and notebook launchers do."""

import re

import pytest
from etcd_cluster import free_ports
from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

SCRIPT = text_of("spawned_ranks")


def test_they_train_and_are_told_how_they_are_protected(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    monkeypatch.setenv("SOFTGPU_DEVICES", "2")
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "1", "--warm-spares", "0"]
    fault = "rank=0 step=3 phase=backward kind=kill"  # it would come in each restart
    ended = launcher.run(*run, "--fault", fault, launcher.script(SCRIPT), str(port))
    assert ended.status == 0, ended.err
    assert f"the rehearsed failure {fault!r} never happened" in ended.err
    assert sorted(re.findall(r"rank \d has trained 6 steps", ended.out)) == [
        "rank 0 has trained 6 steps",
        "rank 1 has trained 6 steps",
    ]
    assert "['socket', '/memfd" in ended.out, "its own descriptors are as they were"
    assert (
        ended.err.count("was not started by jitckpt's agent, but by a training process of its (mp.spawn,")
        == 2
    )
