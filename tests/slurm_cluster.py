"""A real Slurm for tests: munge, slurmctld, a slurmd in each network namespace; skipped where it can't be."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from namespaces import Namespaces, kill

LIMIT = 60.0
CONTROLLER = ("munge", "slurmctld")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(10.79.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=10
MinJobAge=300
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillOnBadExit={kill_on_bad_exit}
PartitionName=p Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """Its nodes are n0, n1 ..., each on a host of its own; what talks to it has to be on host 0.

    Each two are under one switch: s0, s1 ...
    """

    folder: Path
    hosts: Namespaces
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """By which its commands know it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run one of its commands."""
        environment = {**os.environ, **self.environment}
        command = (*self.hosts.on(0), *command)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what it says of a job."""
        fields = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields)

    def start(self, name: str, host: int, *command: str) -> None:
        """Start one of its daemons."""
        # `ip netns exec` would hide /sys/fs/cgroup, without which slurmd does not start.
        command = ("nsenter", f"--net=/run/netns/{self.hosts.names[host]}", *command)
        with open(self.folder / f"{name}.out", "wb") as out:
            environment = {**os.environ, **self.environment}
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def lose_node(self, node: int) -> None:
        """Kill all that runs on a node at once: slurmd, its steps. The controller on host 0 goes on."""
        controller = {self.processes[name].pid for name in CONTROLLER if name in self.processes}
        while lost := set(self.hosts.processes(node)) - controller:
            for pid in lost:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all that runs in it."""
        for name in CONTROLLER:
            if name in self.processes:
                self.processes[name].kill()
                self.processes[name].wait()
        kill(self.hosts, *range(len(self.hosts.names)))
        for process in self.processes.values():
            process.wait()


@contextmanager
def slurm(folder: Path, hosts: Namespaces, kill_on_bad_exit: int = 0) -> Iterator[Slurm]:
    """Run a cluster with a node on each host."""
    missing = [program for program in PROGRAMS if _program(program) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd can't start steps without root")
    host = socket.gethostname().partition(".")[0]
    nodes = len(hosts.names)
    text = CONFIGURATION.format(host=host, user="root", folder=folder, kill_on_bad_exit=kill_on_bad_exit)
    for node in range(nodes):
        place = f"NodeAddr=10.79.0.{node + 1} Port={17000 + node}"
        text += f"NodeName=n{node} NodeHostname={host} {place} CPUs=2\n"
    (folder / "slurm.conf").write_text(text)
    switches = [f"SwitchName=s{node // 2} Nodes=n[{node}-{node + 1}]\n" for node in range(0, nodes, 2)]
    top = f"SwitchName=top Switches=s[0-{len(switches) - 1}]\n"
    (folder / "topology.conf").write_text("".join([*switches, top]))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    found = Slurm(folder, hosts)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    try:
        found.start(
            "munge",
            0,
            str(_program("munged")),
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *files,
        )
        _wait((folder / "munge.socket").exists)
        found.start("slurmctld", 0, str(_program("slurmctld")), "-D", "-c")
        _wait(lambda: _idle(found) is not None)  # a slurmd that calls before takes its time to call again
        for node in range(nodes):
            found.start(f"n{node}", node, str(_program("slurmd")), "-D", "-N", f"n{node}")
        _wait(lambda: _idle(found) == nodes)
        yield found
    finally:
        found.close()


def _idle(cluster: Slurm) -> int | None:
    """Return how many nodes are ready, None if nobody can say."""
    with suppress(subprocess.CalledProcessError):
        return cluster.ask("sinfo", "-h", "-N", "-p", "p", "-o", "%t").split().count("idle")
    return None


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            pytest.fail("Slurm does not come up here: see its logs")
        time.sleep(0.1)
