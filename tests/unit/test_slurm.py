"""What an agent reads of Slurm's variables and answers."""

import fcntl
import os
import socket
import subprocess
from pathlib import Path

import pytest

from jitckpt.cli import run, run_hosts
from jitckpt.cli.run_options import run_parser
from jitckpt.clusters import slurm
from jitckpt.errors import HostsError


def environment(address: str, pattern: str, **more: str) -> dict[str, str]:
    """Return what Slurm gives to a task."""
    topology = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    return {"SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n17"} | topology | more


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("s0.s4.n17", "switch.switch.node", "switch s4"),
        ("s0.s[4-5,7].n17", "switch.switch.node", "switch s[4-5,7]"),  # two cards, or three
        ("s[0-1]..s4.n17", "switch.switch.switch.node", "switch s4"),  # a tree that is less deep here
        ("..n17", "switch.switch.node", "node n17"),
        ("b8.n17", "block.node", "block b8"),
        ("n17", "node", "node n17"),
        ("r8:2.n17", "ring:position.node", "node n17"),
        ("s.0.s4.n17", "switch.switch.node", ""),
        ("s4.n17", "switch.switch.node", ""),
        ("", "", ""),
    ],
)
def test_the_failure_domain_is_the_leaf_switch_or_the_block(address: str, pattern: str, domain: str) -> None:
    assert slurm.domain_of(environment(address, pattern)) == domain


def test_what_another_node_or_no_step_was_told_counts_nothing() -> None:
    """Variables go from node to node by ssh, and by mpirun."""
    told = environment("s0.s4.n18", "switch.switch.node")
    assert slurm.domain_of(told) == ""
    del told["SLURM_STEP_ID"]
    assert slurm.domain_of(told | {"SLURMD_NODENAME": "n18"}) == ""


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"])
def test_a_step_of_which_slurm_tells_a_part_is_none(missing: str) -> None:
    """As in a container that is given some of the variables."""
    told = dict.fromkeys(("SLURM_PROCID", slurm.JOB, slurm.STEP, slurm.NODE, slurm.NODES, slurm.TASKS), "1")
    told[slurm.NODE_LIST] = "n1"
    assert slurm.step_of(told).name == "slurm-1-0-1"
    del told[missing]
    with pytest.raises(ValueError, match=r"--slurm: .*; start one agent on each node"):
        slurm.step_of(told)


@pytest.mark.parametrize(
    ("options", "domains", "by"),
    [([], ("switch s4",), "Slurm"), (["--failure-domains", "hostname"], (socket.gethostname(),), "")],
)
def test_it_is_the_memory_tiers_where_no_option_says_another(
    monkeypatch: pytest.MonkeyPatch, options: list[str], domains: tuple[str, ...], by: str
) -> None:
    for name, value in environment("s0.s4.n17", "switch.switch.node").items():
        monkeypatch.setenv(name, value)
    args = run_parser().parse_args(["--memory-tier", "peer", *options, "train.py"])
    args.own_domains, args.domains_by = run_hosts.own_domains(args)
    wanted = run._memory(args)
    assert wanted is not None
    assert (wanted.domains, wanted.domains_by) == (domains, by)


# As Slurm 22.05 answers; SubmitLine is what 25.11 has beside. NO_SCRIPT: the status where a job has none.
SCONTROL = """#!/bin/bash
case "$*" in
    "show config")
        echo "KillOnBadExit           = $KILL_ON_BAD_EXIT"
        [[ ! $PREEMPTS ]] || printf "PreemptMode   = $PREEMPTS\nPreemptType   = preempt/partition_prio\n" ;;
    "-o show partition low") echo "PartitionName=low State=UP PreemptMode=$OF_PARTITION" ;;
    "-o show step 7.0") echo "StepId=7.0 UserId=0 State=RUNNING Name=bash SrunHost:Pid=$SRUN " ;;
    "write batch_script 7 -") printf %s "$SCRIPT"; [[ $SCRIPT ]] || exit "${NO_SCRIPT:-0}" ;;
    "show job 7")
        printf "JobId=7 JobName=b.sh\n   Command=b.sh\n"
        [[ ! $SUBMITTED ]] || echo "   SubmitLine=$SUBMITTED" ;;
    *)
        printf "scontrol: error: no host\nscontrol: fatal: no source\n" >&2
        exit 1 ;;
esac
"""
HEALTHY = "end all agents of this step as soon as one fails"
LOST = "end all agents of this job with the first node that is lost"


class Cluster:
    """Commands that answer as Slurm's do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "scontrol").write_text(SCONTROL)
        (folder / "scontrol").chmod(0o700)
        self.set = monkeypatch.setenv
        self.set("PATH", f"{folder}:{os.environ['PATH']}")
        self.says()

    def says(self, kill_on_bad_exit: str = "0", script: str = "#!/bin/bash", submitted: str = "") -> None:
        for name, value in (
            ("KILL_ON_BAD_EXIT", kill_on_bad_exit),
            ("SCRIPT", script),
            ("SUBMITTED", submitted),
            ("SRUN", "login:1"),
        ):
            self.set(name, value)

    def warnings(self, *options: str, **variables: str) -> str:
        """Return what a step that was started with these options of srun is warned of."""
        words = ["srun", *options, "bash", "-c", "train", "-K", "-k", "--no-kill"]
        out, full = os.pipe()
        os.write(full, bytes(fcntl.fcntl(full, fcntl.F_GETPIPE_SZ)))
        # By its name alone it is srun: it waits for room for what it has to say.
        with subprocess.Popen(words, executable="/bin/echo", stdout=full) as process:
            self.set("SRUN", f"{socket.gethostname()}:{process.pid}")
            try:
                return " ".join(slurm.warnings({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"} | variables))
            finally:
                os.close(full)
                os.close(out)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_what_slurm_complains_of_is_one_line(cluster: Cluster) -> None:
    del cluster
    with pytest.raises(HostsError) as refusal:
        slurm.asked("ping")
    assert (
        str(refusal.value) == "--slurm: scontrol ping: scontrol: error: no host; scontrol: fatal: no source"
    )


def test_it_is_told_where_a_step_ends_with_its_first_failure(cluster: Cluster) -> None:
    cluster.says(kill_on_bad_exit="1")
    assert HEALTHY in cluster.warnings("-N", "4")
    assert HEALTHY not in cluster.warnings("-N", "4", "--kill-on-bad-exit=0")
    assert HEALTHY not in cluster.warnings("-K0")
    assert HEALTHY not in cluster.warnings(SLURM_KILL_BAD_EXIT="0")
    cluster.says(kill_on_bad_exit="0")
    assert HEALTHY in cluster.warnings("--kill-on-bad-exit")
    assert HEALTHY not in cluster.warnings()


def test_it_is_told_where_a_job_or_a_step_ends_with_the_first_node_that_is_lost(cluster: Cluster) -> None:
    unknown = ", if sbatch was not given it, which this Slurm does not tell,"
    both = f"Add #SBATCH --no-kill to its script{unknown} and --no-kill to srun."
    assert f"{LOST}, and no other can take its place. {both}" in cluster.warnings()
    cluster.says(submitted="sbatch -N4 b.sh")
    assert "Add #SBATCH --no-kill to its script and --no-kill to srun." in cluster.warnings()
    cluster.says(script="#!/bin/bash\n#SBATCH --nodes=4 --no-kill\n")
    assert "Add --no-kill to srun." in cluster.warnings("--nodes=4")
    assert "Add --no-kill to srun." in cluster.warnings("--no-kill=off", SLURM_NO_KILL="1")
    for of_srun in (["--no-kill"], ["-k", "-N2"]):
        assert cluster.warnings(*of_srun) == ""
    assert cluster.warnings(SLURM_NO_KILL="") == ""
    cluster.says(submitted="sbatch -k -N4 b.sh")
    assert cluster.warnings("-k") == ""
    cluster.says(submitted="sbatch -N4 b.sh")
    assert "Add #SBATCH --no-kill to its script." in cluster.warnings("-k")
    assert cluster.warnings("-k", SBATCH_NO_KILL="") == ""


def test_it_is_told_where_who_is_preempted_is_not_queued_again(cluster: Cluster) -> None:
    """A partition has its own mode, or the cluster's."""
    told = "Slurm cancels this job where another one needs its nodes (PreemptMode=CANCEL)"
    silent = ["-k", "-K0"]
    cluster.says(script="")
    assert cluster.warnings(*silent, SLURM_JOB_PARTITION="low") == ""
    cluster.set("PREEMPTS", "GANG,CANCEL")
    assert told in cluster.warnings(*silent)
    for mode, is_told in (("CANCEL", True), ("REQUEUE", False), ("OFF", False)):
        cluster.set("OF_PARTITION", mode)
        assert (told in cluster.warnings(*silent, SLURM_JOB_PARTITION="low")) == is_told
    cluster.set("PREEMPTS", "REQUEUE")
    assert cluster.warnings(*silent) == ""


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_job_without_a_script_is_told_what_its_srun_lacks(cluster: Cluster, status: str) -> None:
    """Whether Slurm answers with nothing, or refuses to show a script that is not there."""
    cluster.set("NO_SCRIPT", status)
    cluster.says(script="", kill_on_bad_exit="1")
    told = cluster.warnings("-N", "4")
    assert HEALTHY in told
    assert f"{LOST}, and no other can take its place. Add --no-kill to srun." in told
    assert cluster.warnings("-k", "-K0") == ""
    cluster.says(script="", submitted="salloc -N4")
    assert "Add --no-kill to salloc." in cluster.warnings("-k")
    assert "Add --no-kill to salloc and --no-kill to srun." in cluster.warnings()
    cluster.says(script="", submitted="/usr/bin/salloc -N4 --no-kill")
    assert cluster.warnings("-k") == ""
    cluster.says(script="", submitted="srun -N4 bash -c train")
    assert "Add --no-kill to srun." in cluster.warnings("-N4")


def test_what_slurm_does_not_tell_is_no_reason_not_to_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.says(script="")  # salloc, with srun on the login node
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert slurm.warnings(step) == []
    cluster.says(script="", kill_on_bad_exit="1")
    assert f"{HEALTHY}, unless srun was told otherwise" in slurm.warnings(step)[0]
    assert slurm.warnings(step | {"SLURM_JOB_ID": "8"}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.warnings(step) == []
