"""What Slurm says of the step that an agent was started in, by `srun` with one task on each node."""

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from jitckpt.errors import HostsError

FIRST_PORT, PORTS = 20000, 10000  # below those that Linux gives away by itself
SECONDS = 30.0  # for Slurm's answers
SHARED = ("switch", "block")  # what Slurm names of a network that may take all its nodes with it
HOW = "start one agent on each node: srun --ntasks-per-node=1 --kill-on-bad-exit=0 jitckpt run --slurm ..."


@dataclass(frozen=True)
class SlurmStep:
    """An agent's place: node number `node` of so many. name: of this run of the job, other when requeued.

    gpus: of this node, if the job has asked for any.
    """

    name: str
    node: int
    nodes: int
    node_list: str
    port: int
    gpus: int | None


def step_of(environment: Mapping[str, str]) -> SlurmStep:
    """Return what the variables of a task say. Raises ValueError with a sentence if it can't be used."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        raise ValueError(f"--slurm: this is no step of a Slurm job; {HOW}")
    job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    nodes, tasks = int(environment["SLURM_STEP_NUM_NODES"]), int(environment["SLURM_STEP_NUM_TASKS"])
    if tasks != nodes:
        raise ValueError(f"--slurm: step {job}.{step} has {tasks} tasks on {nodes} nodes; {HOW}")
    again = environment.get("SLURM_RESTART_COUNT", "0")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return SlurmStep(
        name=f"slurm-{job}-{again}-{step}",
        node=int(environment["SLURM_NODEID"]),
        nodes=nodes,
        node_list=environment["SLURM_STEP_NODELIST"],
        # Of two jobs that share a node the ports differ; so do those of two steps.
        port=FIRST_PORT + (int(job) * 7 + int(step)) % PORTS,
        gpus=int(gpus) if gpus.isdigit() else None,
    )


def domain_of(environment: Mapping[str, str]) -> str:
    """Return what this node fails with: its leaf switch, or its block; "" if Slurm tells of no network.

    SLURM_TOPOLOGY_ADDR has a name, and the pattern what that is, for each level down to the node: s0.s4.n17
    and switch.switch.node. A level is empty where a node has no switch there, and a host list, such as
    s[4-5], where it has several. A node without either stands by itself.
    """
    if "SLURM_STEP_ID" not in environment:  # who has the variables from another node by ssh or mpirun
        return ""
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(names) < len(kinds) or kinds[-1] != "node" or not names[-1]:
        return ""
    if names[-1] != environment.get("SLURMD_NODENAME", names[-1]):
        return ""  # of another node; or a name has dots, and it can't be told where it ends
    if len(kinds) > 1 and kinds[-2] in SHARED and names[-2]:
        return f"{kinds[-2]} {names[-2]}"
    return f"node {names[-1]}"


def first_host(step: SlurmStep) -> str:
    """Return where the step's first node can be reached. Raises HostsError if Slurm does not say it."""
    name = _asked("show", "hostnames", step.node_list).split()[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError:  # Slurm alone knows it
        fields = dict(field.partition("=")[::2] for field in _asked("-o", "show", "node", name).split())
        return fields.get("NodeAddr", name)
    return name


def ends_healthy_ranks(environment: Mapping[str, str]) -> str:
    """Return why Slurm would end all agents when one fails, as a sentence; empty if nothing says so."""
    wanted = environment.get("SLURM_KILL_BAD_EXIT")
    if wanted is None:
        lines = (line.partition("=") for line in _asked("show", "config").splitlines())
        wanted = {name.strip(): value.strip() for name, _, value in lines}.get("KillOnBadExit", "0")
    if wanted == "0":
        return ""
    return (
        "this cluster ends all tasks of a step as soon as one fails, unless srun is told otherwise; then the "
        "others could not save. Give srun --kill-on-bad-exit=0, or set SLURM_KILL_BAD_EXIT=0 before it."
    )


def _asked(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except FileNotFoundError as error:
        raise HostsError("--slurm: Slurm's command scontrol is not on this node.") from error
    except subprocess.TimeoutExpired as error:
        raise HostsError(f"--slurm: scontrol gives no answer within {SECONDS:g} s.") from error
    except subprocess.CalledProcessError as error:
        raise HostsError(f"--slurm: scontrol {' '.join(arguments)}: {error.stderr.strip()}") from error
    return done.stdout
