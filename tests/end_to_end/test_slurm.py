"""`jitckpt run --slurm` in steps of a real Slurm, whose nodes are network namespaces."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpt import TRAINING, digests
from launcher import JITCKPT, Launcher
from namespaces import namespaces
from slurm_cluster import Slurm, slurm
from test_hosts import OPTIONS, PAUSING, THREADS

from jitckpt.events import read_events

BATCH = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
SRUN = ["srun", "--nodes", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=0"]


ENDED = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT", "PREEMPTED")


@pytest.fixture
def cluster(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    # The launcher comes first, as it waits in the end for all that the cluster still runs.
    with namespaces(4) as hosts, slurm(tmp_path_factory.mktemp("slurm"), hosts) as found:
        yield found


def under(cluster: Slurm) -> list[str]:
    """Return what comes before a command that talks to the cluster."""
    return [
        *cluster.hosts.on(0),
        "env",
        *(f"{name}={value}" for name, value in cluster.environment.items()),
        *THREADS,
    ]


def submit(cluster: Slurm, launcher: Launcher, script: str, *more: str) -> str:
    """Submit the example's batch script with this training; return the job's number."""
    if shutil.which("jitckpt") is None:
        pytest.skip("the command jitckpt is not installed")
    options = f"OPTIONS={' '.join([*OPTIONS, *more])}"
    command = ["sbatch", "--parsable", "--nodes", "3", "--output", "out.txt", str(BATCH), script, *TRAINING]
    submitted = launcher.run(*under(cluster), options, *command)
    assert submitted.status == 0, submitted.err
    return submitted.out.strip()


def finish(cluster: Slurm, launcher: Launcher, number: str) -> None:
    """Let the training's pauses end, and wait for the job's end."""
    (launcher.directory / "go").touch()
    launcher.wait_until(lambda: cluster.job(number)["JobState"] in ENDED)
    assert cluster.job(number)["JobState"] == "COMPLETED", said(launcher)


def said(launcher: Launcher) -> str:
    path = launcher.directory / "out.txt"
    return path.read_text() if path.exists() else ""


def went_on_from(told: str) -> int:
    """Return from which step a job that was queued again went on."""
    found = re.search(r"goes on from step (\d+), saved at", told)
    assert found is not None, told
    return int(found[1])


def test_a_killed_rank_changes_no_bit(cluster: Slurm, launcher: Launcher, undisturbed: list[str]) -> None:
    fault = ["--fault", "rank=1 step=5 phase=backward kind=kill"]
    ended = launcher.run(*under(cluster), *SRUN, *JITCKPT, "run", "--slurm", *OPTIONS, *fault, *TRAINING)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    assert "The job succeeded after 1 restart." in ended.err


def test_a_preempted_job_is_queued_again_and_goes_on(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher))
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true"]
    assert launcher.run(*under(cluster), "sbatch", *urgent).status == 0
    launcher.wait_until(lambda: cluster.job(number)["Restarts"] == "1")
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert went_on_from(said(launcher)) >= 3
    assert cluster.job(number)["Restarts"] == "1"


def test_a_lost_node_is_replaced_by_the_one_that_stands_by(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.lose_node(1)
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert "Slurm will end" not in said(launcher), "the example has all that is needed"
    assert "The job succeeded after 1 restart." in said(launcher)


def test_a_node_that_is_set_down_is_replaced_by_the_one_that_stands_by(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.ask("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert "The job succeeded after 1 restart." in said(launcher)


def test_a_job_that_loses_its_first_node_is_queued_again_and_goes_on(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(PAUSING), "--rdzv-conf", "join_timeout=60")
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.lose_node(0)
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert went_on_from(said(launcher)) >= 3
    assert cluster.job(number)["Restarts"] == "1"


def test_a_cluster_that_would_end_the_healthy_ranks_is_told_of(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = launcher.script("pass")
    run = [*JITCKPT, "run", "--slurm", *OPTIONS, script]
    folder = tmp_path_factory.mktemp("slurm")
    with namespaces(2) as hosts, slurm(folder, hosts, kill_on_bad_exit=1) as cluster:
        srun = [one for one in SRUN if not one.startswith("--kill-on-bad-exit")]
        ended = launcher.run(*under(cluster), *srun, *run)
        assert ended.status == 0, ended.err
        assert ended.err.count("Slurm will end all agents of this step as soon as one fails;") == 1
        assert ended.err.count("with the first node that is lost") == 1
        assert ended.err.count("Add --no-kill to srun.") == 1
        ended = launcher.run(*under(cluster), *SRUN, "--no-kill", *run)
        assert "Slurm will end" not in ended.err
        ended = launcher.run(*under(cluster), "SLURM_KILL_BAD_EXIT=0", "SLURM_NO_KILL=1", *srun, *run)
        assert "Slurm will end" not in ended.err
        ended = launcher.run(*under(cluster), *SRUN, "--ntasks-per-node", "2", *run)
        assert "has 4 tasks on 2 nodes; start one agent on each node" in ended.err


def test_copies_go_under_another_switch(cluster: Slurm, launcher: Launcher) -> None:
    """Of the nodes 0 and 1 the state goes to 2 and 3, and the other way round."""
    run = [*JITCKPT, "run", "--slurm", *OPTIONS, "--memory-tier", "peer", *TRAINING]
    ended = launcher.run(*under(cluster), *SRUN, "--nodes", "4", *run)
    assert ended.status == 0, ended.err
    assert "Failure domains, by Slurm: switch s0, switch s1." in ended.err
    (events,) = launcher.directory.glob("**/events.jsonl")
    placed = [event for event in read_events(events.parent)[0] if event["event"] == "memory_placement"]
    kept_by = [host["kept_by"] for host in placed[0]["hosts"]]
    assert [sorted(host // 2 for host in by) for by in kept_by] == [[0, 1]] * 4


def test_without_slurm_it_says_so(launcher: Launcher) -> None:
    environment = [name for name in os.environ if name.startswith("SLURM_")]
    assert environment == []
    ended = launcher.run(*JITCKPT, "run", "--slurm", launcher.script("pass"))
    assert ended.status == 2
    assert "--slurm: this is no step of a Slurm job; start one agent on each node" in ended.err
