"""What Slurm says of the step that an agent was started in, by `srun` with one task on each node."""

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jitckpt.errors import HostsError

FIRST_PORT, PORTS = 20000, 10000  # below those that Linux gives away by itself
SECONDS = 30.0  # for Slurm's answers
SHARED = ("switch", "block")  # what Slurm names of a network that may take all its nodes with it
HOW = "start one agent on each node: srun --ntasks-per-node=1 --kill-on-bad-exit=0 jitckpt run --slurm ..."


# What `srun` sets for each task of a step.
JOB, STEP, NODE = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"
NODES, TASKS, NODE_LIST = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"


@dataclass(frozen=True)
class SlurmStep:
    """An agent's place: node number `node` of so many. run: how often the job was queued again.

    gpus: of this node, if the job has asked for any.
    """

    job: str
    step: str
    run: str
    node: int
    nodes: int
    node_list: str
    gpus: int | None = None

    @property
    def name(self) -> str:
        """Of this run of the job: another when it is queued again."""
        return f"slurm-{self.job}-{self.run}-{self.step}"

    @property
    def port(self) -> int:
        """Of two jobs that share a node the ports differ; so do those of two steps."""
        return FIRST_PORT + (int(self.job) * 7 + int(self.step)) % PORTS


def step_of(environment: Mapping[str, str]) -> SlurmStep:
    """Return what the variables of a task say. Raises ValueError with a sentence if it can't be used."""
    if STEP not in environment or "SLURM_PROCID" not in environment:
        raise ValueError(f"--slurm: this is no step of a Slurm job; {HOW}")
    if missing := [name for name in (JOB, NODES, TASKS, NODE, NODE_LIST) if name not in environment]:
        raise ValueError(f"--slurm: of what Slurm tells a step {', '.join(missing)} is missing here; {HOW}")
    job, step = environment[JOB], environment[STEP]
    nodes, tasks = int(environment[NODES]), int(environment[TASKS])
    if tasks != nodes:
        raise ValueError(f"--slurm: step {job}.{step} has {tasks} tasks on {nodes} nodes; {HOW}")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return SlurmStep(
        job,
        step,
        run=environment.get("SLURM_RESTART_COUNT", "0"),
        node=int(environment[NODE]),
        nodes=nodes,
        node_list=environment[NODE_LIST],
        gpus=int(gpus) if gpus.isdigit() else None,
    )


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether this is a task of a step that has one on each of several nodes, and no user's shell."""
    try:
        return step_of(environment).nodes > 1 and "SLURM_PTY_PORT" not in environment
    except ValueError:
        return False


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
    name = asked("show", "hostnames", step.node_list).split()[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError:  # Slurm alone knows it
        fields = dict(field.partition("=")[::2] for field in asked("-o", "show", "node", name).split())
        return fields.get("NodeAddr", name)
    return name


def warnings(environment: Mapping[str, str]) -> list[str]:
    """Return, as sentences, when Slurm would end what could go on; none if it tells nothing.

    For the step's first node, which mostly has srun, too. It is no reason not to start.
    """
    found = []
    with suppress(HostsError):
        srun = _srun(environment)
        for look in (_ends_healthy_ranks, _ends_with_a_node, _cancels_what_it_preempts):
            with suppress(HostsError):
                found.append(look(environment, srun))
    return [sentence for sentence in found if sentence]


def _ends_healthy_ranks(environment: Mapping[str, str], srun: Sequence[str] | None) -> str:
    """Return why Slurm would end all agents when one fails; empty if nothing says so."""
    wanted = _value_of(srun or (), "--kill-on-bad-exit", "-K")
    if wanted is None:
        wanted = environment.get("SLURM_KILL_BAD_EXIT")
    if wanted is None:
        wanted = _fields(asked("show", "config")).get("KillOnBadExit", "0")
    if wanted == "0":
        return ""
    unless = "" if srun is not None else ", unless srun was told otherwise"
    return (
        f"Slurm will end all agents of this step as soon as one fails{unless}; then the others could not "
        "save. Give srun --kill-on-bad-exit=0, or set SLURM_KILL_BAD_EXIT=0 before it."
    )


def _ends_with_a_node(environment: Mapping[str, str], srun: Sequence[str] | None) -> str:
    """Return why Slurm would end all agents when a node is lost; empty if nothing says so."""
    missing = [] if "SBATCH_NO_KILL" in environment else _missing_of_the_job(environment["SLURM_JOB_ID"])
    if srun is not None and not _is_set(srun, before="SLURM_NO_KILL" in environment):
        missing.append("--no-kill to srun")
    if not missing:
        return ""
    return (
        "as far as can be seen Slurm will end all agents of this job with the first node that is lost, and "
        f"no other can take its place. Add {' and '.join(missing)}."
    )


def _cancels_what_it_preempts(environment: Mapping[str, str], srun: Sequence[str] | None) -> str:
    """Return why nobody queues this job again after a preemption; empty if nothing says so."""
    del srun
    config, name = _fields(asked("show", "config")), environment.get("SLURM_JOB_PARTITION", "")
    if config.get("PreemptType", "preempt/none") in ("preempt/none", "(null)"):
        return ""
    told = asked("-o", "show", "partition", name).split() if name else []
    mode = dict(field.partition("=")[::2] for field in told).get("PreemptMode", config.get("PreemptMode", ""))
    if "CANCEL" not in mode.upper().split(","):
        return ""
    return (
        "Slurm cancels this job where another one needs its nodes (PreemptMode=CANCEL), and does not queue "
        "it again. Its state is saved before: submit it again, and it goes on from there."
    )


def _fields(config: str) -> dict[str, str]:
    lines = (line.partition("=") for line in config.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _missing_of_the_job(job: str) -> list[str]:
    """Return what was not said as the job was submitted, as far as is known, and where to add it."""
    lines = (line.strip() for line in asked("show", "job", job).splitlines())
    # Since Slurm 25.11. Before, nothing tells what was on the command line.
    submitted = next((line.partition("=")[2].split() for line in lines if line.startswith("SubmitLine=")), [])
    script: list[str] = []
    with suppress(HostsError):  # a job of salloc or srun has none, and Slurm may say so by an error
        script = asked("write", "batch_script", job, "-").splitlines()
    words = [word for line in script if line.startswith("#SBATCH") for word in line.split()]
    if _is_set([*words, *submitted]):
        return []
    if script:
        unknown = "" if submitted else ", if sbatch was not given it, which this Slurm does not tell,"
        return [f"#SBATCH --no-kill to its script{unknown}"]
    return ["--no-kill to salloc"] if submitted and Path(submitted[0]).name == "salloc" else []


def _is_set(words: Sequence[str], before: bool = False) -> bool:
    """Return whether a command was given --no-kill; before: by a variable."""
    value = _value_of(words, "--no-kill", "-k")
    return before if value is None else value not in ("off", "no")


def _value_of(words: Sequence[str], long: str, short: str) -> str | None:
    """Return with what value an option was given last, "" without any; None if it was not."""
    for word in reversed(words):
        name, _, value = word.partition("=")
        if name == long:
            return value
        if word.startswith(short):
            return word.removeprefix(short)
    return None


def _srun(environment: Mapping[str, str]) -> list[str] | None:
    """Return what the step's srun was given before its program; None if it does not run on this node."""
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    fields = dict(field.partition("=")[::2] for field in asked("-o", "show", "step", step).split())
    host, _, pid = fields.get("SrunHost:Pid", "").rpartition(":")
    if host.partition(".")[0] != socket.gethostname().partition(".")[0]:
        return None
    try:
        name, *words = Path("/proc", pid, "cmdline").read_text(errors="replace").split("\0")[:-1]
    except (OSError, ValueError):
        return None
    if Path(name).name != "srun":  # in another PID namespace
        return None
    is_program = (not word.startswith("-") and shutil.which(word) is not None for word in words)
    return words[: next((place for place, found in enumerate(is_program) if found), len(words))]


def asked(*arguments: str) -> str:
    """Return what scontrol answers. Raises HostsError."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except FileNotFoundError as error:
        raise HostsError("--slurm: Slurm's command scontrol is not on this node.") from error
    except subprocess.TimeoutExpired as error:
        raise HostsError(f"--slurm: scontrol gives no answer within {SECONDS:g} s.") from error
    except subprocess.CalledProcessError as error:
        why = "; ".join(error.stderr.split("\n")).strip("; ")
        raise HostsError(f"--slurm: scontrol {' '.join(arguments)}: {why}") from error
    return done.stdout
