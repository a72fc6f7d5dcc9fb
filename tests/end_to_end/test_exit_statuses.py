"""The exit statuses of `jitckpt run` are a contract with schedulers: each as docs/reference/run.md has it."""

import re
import signal
from pathlib import Path

import pytest
from etcd_cluster import free_ports
from gpt import TRAINING, run_of
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.wire.exit_statuses import HOSTS_MISSING, NO_PROGRESS, SAVED

# Runs the training of one rank, which dies in every start once its device has ended the same step.
DYING = text_of("exit_statuses_dying")
ROOT = Path(__file__).parents[2]


def test_0_all_ranks_have_succeeded(launcher: Launcher) -> None:
    assert launcher.run(*JITCKPT_RUN, launcher.script("pass")).status == 0


def test_1_the_script_has_failed(launcher: Launcher) -> None:
    script = launcher.script("import sys; sys.exit(7)")
    assert launcher.run(*JITCKPT_RUN, "--max-restarts", "0", script).status == 1


def test_1_a_signal_came_before_there_was_anything_to_save(launcher: Launcher) -> None:
    script = launcher.script("import time; print('there', flush=True); time.sleep(600)")
    process = launcher.start(*JITCKPT_RUN, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).status == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_75_a_signal_has_ended_it_and_the_state_is_saved(launcher: Launcher, number: signal.Signals) -> None:
    script = launcher.script("from fake_worker import *; register(); print('there', flush=True); save(5)")
    process = launcher.start(*JITCKPT_RUN, "--checkpoint-dir", "ckpt", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(number)
    assert launcher.finish(process).status == SAVED == 75


def test_76_too_few_hosts_have_come(launcher: Launcher) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    script = launcher.script("pass")
    ended = launcher.run(*JITCKPT, "run", *meet, "--rdzv-conf", "join_timeout=2", script)
    assert ended.status == HOSTS_MISSING == 76
    assert "2 hosts did not come together in 2 s." in ended.err


def test_93_another_start_would_fail_alike(launcher: Launcher) -> None:
    script = launcher.script(DYING)
    ended = launcher.run(*run_of(1), "--max-restarts", "9", script, *TRAINING)
    assert ended.status == NO_PROGRESS == 93, ended.err


def test_the_contract_is_written_down() -> None:
    text = (ROOT / "docs" / "reference" / "run.md").read_text()
    section = text.partition("## Exit status\n")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^\| (\d+) ", section, re.MULTILINE)] == [
        0, 1, 2, SAVED, HOSTS_MISSING, NO_PROGRESS,
    ]  # fmt: skip
