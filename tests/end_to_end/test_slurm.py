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

BATCH = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
SRUN = ["srun", "--nodes", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=0"]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with namespaces(3) as hosts, slurm(tmp_path_factory.mktemp("slurm"), hosts) as found:
        yield found


def under(cluster: Slurm) -> list[str]:
    """Return what comes before a command that talks to the cluster."""
    return [
        *cluster.hosts.on(0),
        "env",
        *(f"{name}={value}" for name, value in cluster.environment.items()),
        *THREADS,
    ]


def submit(cluster: Slurm, launcher: Launcher, script: str) -> str:
    """Submit the example's batch script with this training; return the job's number."""
    if shutil.which("jitckpt") is None:
        pytest.skip("the command jitckpt is not installed")
    options = f"OPTIONS={' '.join(OPTIONS)}"
    command = ["sbatch", "--parsable", "--nodes", "3", "--output", "out.txt", str(BATCH), script, *TRAINING]
    submitted = launcher.run(*under(cluster), options, *command)
    assert submitted.status == 0, submitted.err
    return submitted.out.strip()


def said(launcher: Launcher) -> str:
    path = launcher.directory / "out.txt"
    return path.read_text() if path.exists() else ""


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
    cluster.ask("scancel", "--signal", "TERM", number)
    launcher.wait_until(lambda: cluster.job(number)["JobState"] == "COMPLETED")
    out = said(launcher)
    assert cluster.job(number)["Restarts"] == "1"
    assert digests(out) == undisturbed
    saved = re.search(r"the state after step (\d+) is saved", out)
    assert saved is not None, out
    assert int(saved[1]) >= 3
    assert "The job succeeded." in out or "The job succeeded after 0" in out, out


def test_a_lost_node_is_replaced_by_one_that_stands_by(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher) and "stands by" in said(launcher))
    cluster.lose_node(1)
    launcher.wait_until(lambda: said(launcher).count("pauses") == 2)
    launcher.wait_until(lambda: "down" in cluster.ask("sinfo", "-h", "-n", "n1", "-o", "%t"))
    assert cluster.job(number)["JobState"] == "RUNNING"
    (launcher.directory / "go").touch()
    launcher.wait_until(lambda: cluster.job(number)["JobState"] not in ("RUNNING", "COMPLETING"))
    assert digests(said(launcher)) == undisturbed
    assert cluster.job(number)["Restarts"] == "0"


def test_a_cluster_that_would_end_the_healthy_ranks_is_told_of(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = launcher.script("pass")
    run = [*JITCKPT, "run", "--slurm", *OPTIONS, script]
    folder = tmp_path_factory.mktemp("slurm")
    with namespaces(2) as hosts, slurm(folder, hosts, kill_on_bad_exit=1) as cluster:
        ended = launcher.run(*under(cluster), *SRUN, *run)
        assert ended.status == 0, ended.err
        assert ended.err.count("this cluster ends all tasks of a step as soon as one fails") == 1
        ended = launcher.run(*under(cluster), "SLURM_KILL_BAD_EXIT=0", *SRUN, *run)
        assert "as soon as one fails" not in ended.err
        ended = launcher.run(*under(cluster), *SRUN, "--ntasks-per-node", "2", *run)
        assert "has 4 tasks on 2 nodes; start one agent on each node" in ended.err


def test_without_slurm_it_says_so(launcher: Launcher) -> None:
    environment = [name for name in os.environ if name.startswith("SLURM_")]
    assert environment == []
    ended = launcher.run(*JITCKPT, "run", "--slurm", launcher.script("pass"))
    assert ended.status == 2
    assert "--slurm: this is no step of a Slurm job; start one agent on each node" in ended.err
