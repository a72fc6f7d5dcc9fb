"""A host that stands by for the training of another Slurm job: which run of it, and until when."""

import os
import threading
from pathlib import Path

import pytest

from jitckpt.cli import run_hosts
from jitckpt.cli.run_options import run_parser
from jitckpt.clusters import slurm_spares
from jitckpt.clusters.slurm import SlurmStep
from jitckpt.errors import HostsError, HostsMissing, NotNeeded

SCONTROL = r"""#!/bin/bash
case "$*" in
    "-o show job 7")
        [[ $STATE != unknown ]] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
        [[ $STATE != silent ]] || { echo "Unable to contact slurm controller" >&2; exit 1; }
        echo "JobId=7 JobName=a b JobState=$STATE Reason=None Restarts=$RESTARTS NodeList=n[0-3]" ;;
    "-o show step 7") printf %s "$STEPS" ;;
    "show hostnames n[0-2]") printf '%s\n' n0 n1 n2 ;;
    "-o show node n0") echo "NodeName=n0 NodeAddr=10.79.0.1" ;;
    *) exit 1 ;;
esac
"""
STEPS = """\
StepId=7.batch UserId=0 State=RUNNING NodeList=n0 Nodes=1 Name=batch
StepId=7.0 UserId=0 State=RUNNING NodeList=n0 Nodes=1 Name=copy
StepId=7.1 UserId=0 State=RUNNING NodeList=n[0-2] Nodes=3 Name=bash
"""
OWN = {
    "SLURM_JOB_ID": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "n3",
    "SLURM_GPUS_ON_NODE": "4",
}
STEP = SlurmStep("7", "1", "2", 3, 3, "n[0-2]")


class Training:
    """Job 7, as Slurm tells of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "scontrol").write_text(SCONTROL)
        (folder / "scontrol").chmod(0o700)
        self.set = monkeypatch.setenv
        self.set("PATH", f"{folder}:{os.environ['PATH']}")
        self.set("STEPS", STEPS)
        self.says("RUNNING")

    def says(self, state: str, restarts: int = 2) -> None:
        self.set("STATE", state)
        self.set("RESTARTS", str(restarts))


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(slurm_spares, "STEP_SECONDS", 0)
    monkeypatch.setattr(slurm_spares, "LOOK_SECONDS", 0)
    return Training(tmp_path, monkeypatch)


def test_it_is_the_step_that_has_as_many_nodes_as_train(training: Training) -> None:
    del training
    step = slurm_spares.step_of_training("7", 3)
    assert step == STEP
    assert step.name == "slurm-7-2-1"
    assert step.node not in range(step.nodes), "it has no place of theirs"
    with pytest.raises(HostsMissing, match="has no step on 4 nodes or more"):
        slurm_spares.step_of_training("7", 4)


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "unknown"])
def test_nobody_stands_by_for_a_job_that_has_ended(training: Training, state: str) -> None:
    training.says(state)
    for look in (lambda: slurm_spares.step_of_training("7", 3), lambda: slurm_spares.check_wanted(STEP)):
        with pytest.raises(NotNeeded, match="Job 7 has ended"):
            look()


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_does_not_run_now_may_need_the_node_itself(training: Training, state: str) -> None:
    training.says(state)
    for look in (lambda: slurm_spares.step_of_training("7", 3), lambda: slurm_spares.check_wanted(STEP)):
        with pytest.raises(HostsMissing, match=f"does not run now .{state}."):
            look()


def test_a_controller_that_is_silent_ends_nobody(training: Training) -> None:
    training.says("silent")
    slurm_spares.check_wanted(STEP)
    with pytest.raises(HostsError, match="Unable to contact slurm controller"):
        slurm_spares.step_of_training("7", 3)


def test_who_stands_by_ends_with_the_run_of_the_job(training: Training) -> None:
    told: list[str] = []
    over = threading.Event()

    def end(why: str) -> None:
        told.append(why)
        over.set()

    slurm_spares.check_wanted(STEP)
    with slurm_spares.until_over(STEP, end):
        training.says("RUNNING", restarts=3)
        assert over.wait(60)
    assert told == ["Job 7 has been started anew by Slurm."]


def test_it_meets_where_the_training_does_without_a_place(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    del training
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    where = ["--coordination", "etcd://e:2379", "--checkpoint-dir", "d"]
    args = run_parser().parse_args(["--slurm", "--spare-for", "7", "--nnodes", "3", *where, "train.py"])
    args.spared = None
    run_hosts.make_slurm(args)
    assert (args.rdzv_id, args.fixed_place, args.nproc_per_node) == ("slurm-7-2-1", None, "4")


def test_without_a_coordination_service_it_meets_at_the_trainings_first_node(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    del training
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    args = run_parser().parse_args(["--slurm", "--spare-for", "7", "--nnodes", "3", "train.py"])
    args.spared = None
    run_hosts.make_slurm(args)
    assert (args.rdzv_id, args.fixed_place) == ("slurm-7-2-1", None)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", f"10.79.0.1:{STEP.port}")
    assert args.rdzv_conf == "is_host=false"


def test_where_the_agents_have_ended_slurm_says_whether_it_stands_by_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_spares, "END_SECONDS", 0.1)
    with pytest.raises(HostsMissing, match="The agents of job 7 have ended, and it runs on"):
        slurm_spares.wait_for_end(STEP)
    monkeypatch.setattr(slurm_spares, "END_SECONDS", 60.0)
    threading.Timer(1, training.says, ["PENDING"]).start()
    with pytest.raises(HostsMissing, match="Job 7 does not run now"):
        slurm_spares.wait_for_end(STEP)
    training.says("COMPLETED")
    with pytest.raises(NotNeeded):
        slurm_spares.wait_for_end(STEP)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--spare-for", "7"], "--spare-for goes with --slurm"),
        (["--slurm", "--spare-for", "7"], "--spare-for needs --nnodes N"),
        (["--slurm", "--spare-for", "7", "--nnodes", "3", "--coordination", "etcd://e"], "--checkpoint-dir"),
    ],
)
def test_what_is_missing_is_said(
    training: Training, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    del training
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=why):
        run_hosts.settle_hosts(run_parser().parse_args([*options, "train.py"]))


@pytest.mark.parametrize(
    ("options", "variables", "found"),
    [
        ([], {}, True),
        (["--nnodes", "2"], {}, True),
        (["--standalone"], {}, False),
        (["--nnodes", "1"], {}, False),
        (["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:1"], {}, False),
        (["--nnodes", "3", "--master-addr", "n0", "--node-rank", "1"], {}, False),
        (["--nnodes", "3", "--coordination", "etcd://e", "--rdzv-id", "own"], {}, False),
        ([], {"SLURM_PTY_PORT": "1"}, False),  # a user's shell: nobody starts the others
        ([], {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ([], {"SLURM_STEP_NUM_TASKS": "6"}, False),  # perhaps one for each device
    ],
)
def test_slurm_is_found_where_nothing_else_says_where_to_meet(
    monkeypatch: pytest.MonkeyPatch, options: list[str], variables: dict[str, str], found: bool
) -> None:
    step = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"}
    for name, value in (OWN | step | variables).items():
        monkeypatch.setenv(name, value)
    assert run_hosts.is_found_in_slurm(run_parser().parse_args([*options, "train.py"])) == found
