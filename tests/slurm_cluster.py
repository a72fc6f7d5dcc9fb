"""A real Slurm on one machine for tests: munge, slurmctld, a slurmd a node; skipped where it can't be."""

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
from etcd_cluster import free_ports

LIMIT = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=10
MinJobAge=300
SlurmdTimeout=10
KillOnBadExit={kill_on_bad_exit}
PartitionName=p Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


@dataclass
class Slurm:
    """Its nodes are n0, n1 ...; all of them are this machine."""

    folder: Path
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """By which its commands know it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run one of its commands."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what it says of a job."""
        fields = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields)

    def start(self, name: str, *command: str) -> None:
        """Start one of its daemons."""
        with open(self.folder / f"{name}.out", "wb") as out:
            environment = {**os.environ, **self.environment}
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def lose_node(self, node: int) -> None:
        """Kill a node's daemon and all that runs there, at once."""
        steps = [
            int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_step_of(path, f"n{node}")
        ]
        self.processes[f"n{node}"].kill()
        for pid in steps:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_step_of(self, path: Path, node: str) -> bool:
        with suppress(OSError):
            environment = (path / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in environment
            return ours and f"SLURMD_NODENAME={node}".encode() in environment
        return False

    def close(self) -> None:
        """End all that runs in it."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"SLURM_CONF={self.folder}/slurm.conf".encode() in (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextmanager
def slurm(folder: Path, nodes: int, kill_on_bad_exit: int = 0) -> Iterator[Slurm]:
    """Run a cluster of so many nodes."""
    missing = [program for program in PROGRAMS if _program(program) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd can't start steps without root")
    host = socket.gethostname().partition(".")[0]
    port, *ports = free_ports("127.0.0.1", nodes + 1)
    text = CONFIGURATION.format(
        host=host, user="root", folder=folder, port=port, kill_on_bad_exit=kill_on_bad_exit
    )
    for node in range(nodes):
        text += f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node]} CPUs=1\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    found = Slurm(folder)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    try:
        found.start(
            "munge",
            str(_program("munged")),
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *files,
        )
        _wait((folder / "munge.socket").exists)
        found.start("slurmctld", str(_program("slurmctld")), "-D", "-c")
        for node in range(nodes):
            found.start(f"n{node}", str(_program("slurmd")), "-D", "-N", f"n{node}")
        _wait(lambda: _idle(found) == nodes)
        yield found
    finally:
        found.close()


def _idle(cluster: Slurm) -> int:
    with suppress(subprocess.CalledProcessError):
        return cluster.ask("sinfo", "-h", "-N", "-o", "%t").split().count("idle")
    return 0


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            pytest.skip("Slurm does not come up here: see its logs")
        time.sleep(0.1)
