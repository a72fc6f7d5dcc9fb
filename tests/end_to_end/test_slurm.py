"""`jitckpt run --slurm` in steps of a real Slurm, whose nodes are network namespaces."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_cluster import etcd
from gpt import TRAINING, digests
from launcher import JITCKPT, Launcher
from namespaces import namespaces
from slurm_cluster import Slurm, slurm
from test_health import FAULT
from test_hosts import OPTIONS, PAUSING, THREADS

from jitckpt.events import read_events

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
DRAIN = 'scontrol update NodeName="$1" State=DRAIN Reason="$2"'
SRUN = ["srun", "--nodes", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=0"]
# Tells which node has rank 1, never the first one: of three nodes those train that come first.
SECOND = """
import os, pathlib
if (os.environ["RANK"], os.environ["JITCKPT_RESTART"]) == ("1", "0"):
    pathlib.Path("second").write_text(os.environ["SLURMD_NODENAME"])
"""
# In its first start that node falls ill.
FALLS_ILL = f"""{SECOND}
    os.symlink("second", "ill")
import runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

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


def submit(
    cluster: Slurm,
    launcher: Launcher,
    script: str,
    *more: str,
    nodes: int = 3,
    standby: int = 1,
) -> str:
    """Submit the example's batch script with this training; return the job's number."""
    command = ["--nodes", str(nodes), "--output", "out.txt", str(EXAMPLES / "train.sbatch")]
    return batch(cluster, launcher, [*command, script, *TRAINING], *more, STANDBY=str(standby))


def batch(cluster: Slurm, launcher: Launcher, command: list[str], *more: str, **variables: str) -> str:
    """Give `sbatch` this; return the job's number. more: options of `jitckpt run`."""
    if shutil.which("jitckpt") is None:
        pytest.skip("the command jitckpt is not installed")
    told = [
        f"OPTIONS={' '.join([*OPTIONS, *more])}",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    submitted = launcher.succeed(*under(cluster), *told, "sbatch", "--parsable", *command)
    return submitted.strip()


def finish(cluster: Slurm, launcher: Launcher, number: str) -> None:
    """Let the training's pauses end, and wait for the job's end."""
    (launcher.directory / "go").touch()
    launcher.wait_until(lambda: cluster.job(number)["JobState"] in ENDED)
    assert cluster.job(number)["JobState"] == "COMPLETED", said(launcher)


def said(launcher: Launcher) -> str:
    path = launcher.directory / "out.txt"
    return path.read_text() if path.exists() else ""


def second(launcher: Launcher) -> str:
    """Return which node has rank 1."""
    return (launcher.directory / "second").read_text()


def went_on_from(told: str) -> int:
    """Return from which step a job that was queued again went on."""
    found = re.search(r"goes on from step (\d+), saved at", told)
    assert found is not None, told
    return int(found[1])


def test_a_killed_rank_changes_no_bit(cluster: Slurm, launcher: Launcher, undisturbed: list[str]) -> None:
    """Slurm is found without --slurm."""
    fault = ["--fault", "rank=1 step=5 phase=backward kind=kill"]
    ended = launcher.run(*under(cluster), *SRUN, *JITCKPT, "run", *OPTIONS, *fault, *TRAINING)
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
    number = submit(cluster, launcher, launcher.script(SECOND + PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.lose_node(int(second(launcher).removeprefix("n")))
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert "Slurm will end" not in said(launcher), "the example has all that is needed"
    assert "The job succeeded after 1 restart." in said(launcher)


def test_a_node_that_is_set_down_is_replaced_by_the_one_that_stands_by(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    number = submit(cluster, launcher, launcher.script(SECOND + PAUSING))
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.ask("scontrol", "update", f"NodeName={second(launcher)}", "State=DOWN", "Reason=test")
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert "The job succeeded after 1 restart." in said(launcher)


def test_a_node_whose_check_fails_is_replaced_and_drained(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    check = [
        "--health-check",
        'test "$(cat ill 2> /dev/null)" != "$SLURMD_NODENAME" || { echo it smells; exit 7; }',
    ]
    run = [*JITCKPT, "run", "--slurm", "--nnodes", "2", *OPTIONS, *FAULT, *check, "--report-host", DRAIN]
    run += [launcher.script(FALLS_ILL), *TRAINING]
    step = launcher.start(*under(cluster), *SRUN, "--nodes", "3", *run)
    launcher.wait_until((launcher.directory / "ill").exists)
    ill = second(launcher)
    launcher.wait_until(lambda: "DRAIN" in cluster.ask("scontrol", "-o", "show", "node", ill))
    (launcher.directory / "ill").unlink()  # it comes again, to stand by, and ends with the others
    ended = launcher.finish(step)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    assert "ended with status 7: it smells" in cluster.ask("scontrol", "-o", "show", "node", ill)
    others = [node for node in ("n0", "n1", "n2", "n3") if node != ill]
    assert "DRAIN" not in cluster.ask("scontrol", "-o", "show", "node", ",".join(others))


def test_a_job_that_loses_its_first_node_is_queued_again_and_goes_on(
    cluster: Slurm, launcher: Launcher, undisturbed: list[str]
) -> None:
    # With a node that stands by, the first one could be that.
    conf = ["--rdzv-conf", "join_timeout=60"]
    number = submit(cluster, launcher, launcher.script(PAUSING), *conf, nodes=2, standby=0)
    launcher.wait_until(lambda: "pauses" in said(launcher))
    cluster.lose_node(0)
    finish(cluster, launcher, number)
    assert digests(said(launcher)) == undisturbed
    assert went_on_from(said(launcher)) >= 3
    assert cluster.job(number)["Restarts"] == "1"


@dataclass
class Spared:
    """A training of two nodes, and an array of two that stand by for it."""

    cluster: Slurm
    launcher: Launcher
    more: list[str]

    def start(self) -> None:
        """Return once it trains, and both stand by."""
        script = self.launcher.script(PAUSING)
        self.training = submit(self.cluster, self.launcher, script, *self.more, nodes=2, standby=0)
        command = ["--array=1-2", f"--dependency=after:{self.training}", "--output", "spare-%a.txt"]
        command += [str(EXAMPLES / "spares.sbatch"), script, *TRAINING]
        variables = {"TRAINING": self.training, "NODES": "2"}
        self.array = batch(self.cluster, self.launcher, command, *self.more, **variables)
        self.launcher.wait_until(lambda: all("this host stands by" in one for one in self.told()))
        self.launcher.wait_until(lambda: "pauses" in said(self.launcher))

    def told(self) -> list[str]:
        """Return what each of those that stand by has said."""
        return [
            path.read_text() if path.exists() else ""
            for path in (self.launcher.directory / f"spare-{task}.txt" for task in (1, 2))
        ]

    def states(self) -> list[str]:
        """Return the states of those that stand by."""
        jobs = self.cluster.ask("scontrol", "-o", "show", "job", self.array).splitlines()
        fields = [dict(field.partition("=")[::2] for field in job.split()) for job in jobs]
        return [one["JobState"] for one in fields if "ArrayTaskId" in one]


@pytest.fixture(params=["store", "etcd"])
def spared(
    request: pytest.FixtureRequest, cluster: Slurm, launcher: Launcher, tmp_path: Path
) -> Iterator[Spared]:
    """They meet at a store of their own, or at etcd."""
    if request.param == "store":
        yield Spared(cluster, launcher, ["--host-timeout", "10"])
        return
    with etcd(tmp_path, 1, addresses=["10.79.0.1"], on=[cluster.hosts.on(0)]) as found:
        more = ["--coordination", found.url, "--host-timeout", "10", "--checkpoint-dir", "ckpt"]
        yield Spared(cluster, launcher, more)


def test_a_lost_node_is_replaced_by_one_of_a_job_array(spared: Spared, undisturbed: list[str]) -> None:
    spared.start()
    spared.cluster.lose_node(1)
    finish(spared.cluster, spared.launcher, spared.training)
    told = said(spared.launcher)
    assert digests(told + "".join(spared.told())) == undisturbed
    assert "The job succeeded after 1 restart." in told
    # None hangs on: neither that which had to take the place, nor that which was not needed.
    spared.launcher.wait_until(lambda: set(spared.states()) <= set(ENDED))
    assert spared.states() == ["COMPLETED"] * 2
    assert sum("this host stood by and was not needed" in one for one in spared.told()) == 1


def test_who_stands_by_for_a_job_that_is_cancelled_ends_with_it(spared: Spared) -> None:
    """Its agents are ended, so nobody says where they meet that the job is done."""
    spared.start()
    spared.cluster.ask("scancel", spared.training)
    spared.launcher.wait_until(lambda: spared.states() == ["COMPLETED"] * 2)
    assert spared.cluster.job(spared.training)["JobState"] == "CANCELLED", "nobody has queued it again"
    assert spared.cluster.job(spared.training)["Restarts"] == "0"
    assert all("has ended (CANCELLED)" in one for one in spared.told()), spared.told()


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
