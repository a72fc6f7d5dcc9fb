"""The options of `jitckpt run`: ours, by what they are about, and torchrun's; and how each is read."""

import argparse
import os
import stat
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun

from jitckpt.cli.exec import add_device_argument
from jitckpt.cli.parser import Parser, seconds
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import read_domains
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.encoding.staging import DEFAULT_BYTES
from jitckpt.errors import HostsError
from jitckpt.faults.injection import FaultError, FaultSpec, parse_fault
from jitckpt.hosts.etcd import endpoints_of
from jitckpt.hosts.interfaces import address_of
from jitckpt.objects.bucket import parse
from jitckpt.system import regular_file
from jitckpt.web.beside import parse_address
from jitckpt.wire import environment

DEFAULT_HANG_TIMEOUT = 60.0
HANG_FLOOR = 5.0
DEFAULT_MAX_RESTARTS = 3
DEFAULT_VALIDATE_EVERY = 1000
DEFAULT_WAIT = 60.0
LEAST_SECRET, MOST_SECRET = 16, 1 << 16  # bytes
MOST_MEBIBYTES = 1 << 24
# Where the environment says this, nobody says where several hosts meet: each would wait at itself.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RunParser(Parser):
    """Takes torchrun's options and ours, and shows ours first."""

    def __init__(self, ours: argparse.ArgumentParser, theirs: argparse.ArgumentParser) -> None:
        super().__init__(prog="jitckpt run", parents=[theirs, ours], add_help=False)
        self._shown = (ours, theirs)
        self._ours = set(map(id, ours._actions))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return which options an abbreviation may mean.

        The script's own arguments are looked at, too, and must not be refused for what ours are called.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) < 2 else [one for one in found if id(one[0]) not in self._ours]

    def format_help(self) -> str:
        """Return the help of both, one after the other."""
        return "\n".join(parser.format_help() for parser in self._shown)


def run_parser() -> RunParser:
    """Return the parser of all options, torchrun's and ours."""
    theirs = torchrun.get_args_parser()
    theirs.usage = argparse.SUPPRESS
    theirs.description = "torchrun's options, which mean the same here:"
    ours = Parser(
        prog="jitckpt run",
        usage="jitckpt run [options] script.py [the script's arguments]",
        description="Run a training as torchrun does, and save its state just in time when a rank fails.",
        add_help=False,
    )
    options = ours.add_argument_group("jitckpt's own options")
    _add_saving(options)
    _add_transparent_mode(options)
    _add_other_hosts(options)
    _add_number_of_hosts(options)
    _add_clusters(options)
    _add_memory_tier(options)
    _add_object_store(options)
    _add_ranks(options)
    _add_views(options)
    _add_moves(options)
    _add_fault(options)
    add_device_argument(options)
    parser = RunParser(ours, theirs)
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    if os.environ.get("PET_MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:
        parser.set_defaults(master_addr=None)  # else nobody could tell whether the command gives it
    parser.set_defaults(node_rank=None)  # not given here, whatever the environment says
    return parser


def _add_saving(options: argparse._ActionsContainer) -> None:
    """Where saves go, and how long a job waits: for a save, and for a collective."""
    options.add_argument(
        "--checkpoint-dir",
        type=_directory,
        metavar="DIR",
        help="where states and events are written, if the script does not say it itself",
    )
    options.add_argument(
        "--save-deadline",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long healthy ranks may take to save after a failure (default 60)",
    )
    options.add_argument(
        "--hang-timeout",
        type=seconds,
        metavar="SECONDS",
        help="a collective that makes no progress for so long is looked into (default: learned from the "
        f"job's own collectives, {HANG_FLOOR:g} to {DEFAULT_HANG_TIMEOUT:g}; in transparent mode "
        f"{DEFAULT_HANG_TIMEOUT:g}, and of any answer of the device)",
    )


def _add_transparent_mode(options: argparse._ActionsContainer) -> None:
    """Recovery in the same processes."""
    options.add_argument(
        "--mode",
        choices=("user", "transparent"),
        default="user",
        help="transparent: the device is behind a proxy, and when it fails all ranks go back by a minibatch "
        "in the same processes (default user)",
    )
    options.add_argument(
        "--recovery-deadline",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="in transparent mode: an order of a recovery (to stop, to start a new server, to make the calls "
        "again) that takes a rank so long has failed (default 120)",
    )
    options.add_argument(
        "--validate-every",
        type=_amount,
        default=DEFAULT_VALIDATE_EVERY,
        metavar="STEPS",
        help="in transparent mode: before the fifth optimizer step, and every so many after it, all ranks "
        "make their minibatch's calls again and compare what comes out; 0: in the fifth alone (default "
        f"{DEFAULT_VALIDATE_EVERY})",
    )
    options.add_argument(
        "--validate",
        choices=("as-it-is", "deterministic"),
        default="as-it-is",
        help="in transparent mode: deterministic: minibatches that are validated are made by torch's "
        "deterministic algorithms, for a training that is not so by itself (atomic additions); their result "
        "may differ by rounding from that of a run without jitckpt (default as-it-is)",
    )
    options.add_argument(
        "--state-on-device",
        action=argparse.BooleanOptionalAction,
        help="in transparent mode: once that is seen to be safe, parameters and optimizer "
        "state are not copied to the host with each step; a device that is lost gets them from another rank "
        "that has the same (default: unless the script calls jitckpt.init; without, the loss of all devices "
        "that have them is survived, too)",
    )


def _add_other_hosts(options: argparse._ActionsContainer) -> None:
    """How long others are waited for, and who is believed."""
    options.add_argument(
        "--stall-timeout",
        type=seconds,
        default=540.0,
        metavar="SECONDS",
        help="how long a rank that is alive may keep the others waiting in a collective (default 540)",
    )
    options.add_argument(
        "--host-timeout",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="of several hosts one that is silent for so long is lost (default 10)",
    )
    options.add_argument(
        "--silent-hosts",
        choices=("cut-off", "dead"),
        default="cut-off",
        help="what a host is taken for that has become silent. cut-off: it may live, so only the greater "
        "part of the hosts goes on without the others; dead: you know that it does not (default cut-off)",
    )
    options.add_argument(
        "--secret-file",
        type=_secret,
        metavar="FILE",
        help="the same on all hosts, for you alone to read: by what it holds their agents know each other, "
        "and what they leave in the rendezvous' store (default: a secret that the first host makes and tells "
        "the others through that store)",
    )


def _add_number_of_hosts(options: argparse._ActionsContainer) -> None:
    """How many hosts the job needs, and which."""
    options.add_argument(
        "--min-hosts",
        type=_amount,
        metavar="N",
        help="in user mode: with hosts missing for longer than --wait the job goes on with N of them or "
        "more, and takes others in at the end of a step when they come; the first start needs all (default: "
        "every start does)",
    )
    options.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="with --min-hosts: how long missing hosts are waited for, and how long at least a start is left "
        f"alone before others are taken in (default {DEFAULT_WAIT:g})",
    )
    options.add_argument(
        "--max-standby",
        type=_amount,
        metavar="N",
        help="of the hosts beyond --nnodes so many stand by; a further one ends with status 0 (default: all)",
    )
    options.add_argument(
        "--health-check",
        metavar="COMMAND",
        help="run by this host's shell before each start of the ranks; where it does not end with 0 in 120 s "
        "the host is not taken, until it does",
    )
    options.add_argument(
        "--report-host",
        metavar="COMMAND",
        help="run by the shell for each bad host; $1 is its name, $2 why, $3 lost or unfit (the job goes on "
        "without it, as it is lost or its --health-check fails) or suspect (a device of it may be broken), "
        'as in \'scontrol update NodeName="$1" State=DRAIN Reason="$2"\'',
    )


def _add_clusters(options: argparse._ActionsContainer) -> None:
    """Who says where the hosts meet."""
    options.add_argument(
        "--slurm",
        action="store_true",
        help="in a step of a Slurm job, with one task on each node: hosts, their order and where they meet "
        "are Slurm's; beyond --nnodes they stand by (srun --ntasks-per-node=1 --kill-on-bad-exit=0 ...); "
        "found by itself, where nothing else says where they meet and the step has several nodes",
    )
    options.add_argument(
        "--spare-for",
        type=_job,
        metavar="JOB",
        help="with --slurm, in another job than the training, such as one of a job array: stand by for that "
        "job, --nnodes and --coordination as there; ends with 0 when it has ended, with 76 when it is not "
        "running now",
    )
    options.add_argument(
        "--coordination",
        type=_coordination,
        metavar="URL",
        help="etcd://HOST:2379[,HOST:PORT...] (etcds:// for TLS): the hosts meet at an etcd cluster, by "
        "--rdzv-id, and no host of theirs has to live; who it is and by which certificates the variables of "
        "etcdctl say (ETCDCTL_USER, ETCDCTL_CACERT ...; needs jitckpt[etcd]; default: at their own store)",
    )


def _add_memory_tier(options: argparse._ActionsContainer) -> None:
    """Copies of the state in host memory."""
    options.add_argument(
        "--memory-tier",
        type=_memory_tier,
        default=None,
        metavar="auto|off|peer[=M][+optimizer|+parity=D]|parity[=D]|sharded[+...]",
        help="keep each rank's whole state in host memory, too, for jobs without replicas. peer: with M "
        "copies (default 2), its own host's and those on other hosts; peer+optimizer: other hosts get "
        "gradients, and make the optimizer's steps on their copies, as long as that gives the same bits; "
        "auto: only where some rank's state has no replica on another host, as peer, or as parity if there "
        "is no room for copies, or as peer+optimizer if that makes a snapshot of each step; parity: once, "
        "with XOR parity over groups of D hosts (default 4), of which one may be lost at a time; "
        "peer+parity: both, M hosts of a group may be lost; sharded, sharded+peer, sharded+parity: what D "
        "replicas hold alike is cut, each copies 1/D of it (default off)",
    )
    options.add_argument(
        "--memory-every",
        type=_memory_every,
        metavar="STEPS|auto",
        help="a snapshot for the memory tier after every so many steps; auto: as often as one is whole "
        "everywhere before the next begins, which is measured (default: auto with --memory-tier auto, else "
        "1)",
    )
    options.add_argument(
        "--memory-limit",
        type=_mebibytes,
        metavar="MIB",
        help="host memory that the memory tier may take on this host (default: four fifths of what is free)",
    )
    options.add_argument(
        "--memory-keep",
        type=seconds,
        metavar="SECONDS",
        help="how long the memory tier's memory stays when the agent was killed, for the same command to "
        "go on from (default 60)",
    )
    options.add_argument(
        "--memory-spill",
        type=_spill,
        metavar="DIR",
        help="where this host keeps parts of others' states that no host's memory has room for, in files "
        "without names: on its own disk, or a shared one (default: nowhere)",
    )
    options.add_argument(
        "--memory-interface",
        type=_interface,
        metavar="NAME|ADDRESS",
        help="the network interface of this host over which others send what its memory is to keep (default: "
        "the one that the agents talk over)",
    )
    options.add_argument(
        "--failure-domains",
        type=_domains,
        default={},
        metavar="FILE|hostname",
        help="no two copies of a state go where one failure could take both, if there is another way. FILE: "
        "a line for each host, its name and the racks, switches ... that it is in; hostname: hosts of one "
        "name are one machine",
    )


def _add_object_store(options: argparse._ActionsContainer) -> None:
    """Copies of the saves in an object store."""
    options.add_argument(
        "--objects",
        type=_objects,
        metavar="s3://BUCKET/PREFIX",
        help="copy what is saved in --checkpoint-dir to this place of an object store, and go on from there "
        "where the directory lacks it",
    )
    options.add_argument(
        "--objects-deadline",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long the job's end waits for what is not copied there yet (default 600)",
    )


def _add_ranks(options: argparse._ActionsContainer) -> None:
    """How ranks are started, what they check and save, and what they go on from."""
    options.add_argument(
        "--staging",
        type=_mebibytes,
        default=DEFAULT_BYTES >> 20,
        metavar="MIB",
        help="page-locked host memory through which a rank saves (default 64)",
    )
    options.add_argument(
        "--warm-spares",
        type=_spares,
        metavar="N",
        help="processes for each rank that have loaded torch before a failure needs them (default: 1 where "
        "memory allows)",
    )
    options.add_argument(
        "--warm-start",
        action="store_true",
        help="fork all workers, those of the first start too, from one process that has loaded torch",
    )
    options.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        help="after the first steps restore what a save would hold into copies of the training's objects and "
        "compare, and let replicas compare theirs; a warning names what differs (default: on, or as "
        f"{environment.SELF_CHECK.name} says)",
    )
    options.add_argument(
        "--frameworks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="in user mode: protect the trainings of transformers' Trainer, Accelerate, Lightning and "
        "DeepSpeed by themselves, without a line in the script (default: on)",
    )
    options.add_argument(
        "--save-every",
        type=_amount,
        metavar="STEPS",
        help="of trainings that --frameworks protects, save after each so many optimizer steps as well, for "
        "failures that no replica survives (default: never)",
    )
    options.add_argument(
        "--reshard",
        action="store_true",
        help="in user mode: if the newest save is of another number of ranks or another layout, cut it anew; "
        "else that is refused",
    )
    options.add_argument(
        "--exclude-suspect",
        action="store_true",
        help="restart without devices on which a rank has failed twice, if others are free; else end the job",
    )


def _add_views(options: argparse._ActionsContainer) -> None:
    """What shows the running job."""
    options.add_argument(
        "--metrics",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, from a process of their own (default host 127.0.0.1; needs "
        "jitckpt[metrics])",
    )
    options.add_argument(
        "--page",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve a live view of the job there, as `jitckpt watch --page` does (default host 127.0.0.1; "
        "elsewhere a token is needed; needs jitckpt[page])",
    )
    options.add_argument(
        "--total-steps",
        type=_amount,
        metavar="N",
        help="how many optimizer steps the training makes in all: in a TrainJob whose Kubeflow Trainer keeps "
        "its progress, it is told there what part of them is done (default: nothing is told)",
    )


def _add_moves(options: argparse._ActionsContainer) -> None:
    """What becomes of processes whose device is broken or wanted by others."""
    options.add_argument(
        "--broken-device",
        choices=("restart", "exchange", "move"),
        default="restart",
        help="in transparent mode, what is done about a device that fails with a new server, too. restart: "
        "the job starts again; exchange: the rank goes on with a device of its host that no rank has; move: "
        "the same, in a process that CRIU makes anew of its own (default restart)",
    )
    options.add_argument(
        "--move-wait",
        type=seconds,
        metavar="SECONDS",
        help="with --broken-device move, on several hosts: all ranks are held so long until a host stands "
        "by, if none does that has room (default: not at all)",
    )
    options.add_argument(
        "--suspendable",
        action="store_true",
        help="in transparent mode: `jitckpt suspend` can have the job give its devices and memory back, and "
        "`jitckpt resume` have it go on (needs CRIU)",
    )
    options.add_argument(
        "--snapshot-every",
        type=seconds,
        metavar="MINUTES",
        help="in transparent mode: write all ranks' processes to the checkpoint directory so often, and go "
        "back there if one dies, or a host (needs CRIU)",
    )
    options.add_argument(
        "--snapshot-copies",
        type=_amount,
        default=0,
        metavar="N",
        help="each host's part of a snapshot goes to N other hosts, too, into their checkpoint directories: "
        "a host may be lost for good with its disk (default 0)",
    )
    options.add_argument(
        "--from-snapshot",
        action="store_true",
        help="go on from a snapshot that this job has left in the checkpoint directory, or not at all "
        "(--snapshot-every, --suspendable)",
    )
    options.add_argument(
        "--standby",
        action="store_true",
        help="this host takes no part until another one is lost, whichever comes first; with --broken-device "
        "move, which all hosts need, until another one's devices are broken for good: its ranks go on here",
    )


def _add_fault(options: argparse._ActionsContainer) -> None:
    """A failure to be rehearsed."""
    options.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="SPEC",
        help="rehearse a failure, such as 'rank=1 step=20 phase=backward kind=kill'; repeatable",
    )


def _directory(text: str) -> Path:
    path = Path(text).absolute()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a directory")
    return path


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _job(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a Slurm job")
    return text


def _memory_tier(text: str) -> Wanted:
    try:
        return memory_wanted.tier(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _memory_every(text: str) -> int:
    try:
        return memory_wanted.steps(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _spill(text: str) -> str:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory; it must be there on each host")
    return str(Path(text).absolute())


def _interface(text: str) -> str:
    try:
        return address_of(text)
    except HostsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _domains(text: str) -> dict[str, tuple[str, ...]] | None:
    """Return the failure domains of all hosts, as a file tells them; None if each is one by its name."""
    if text == "hostname":
        return None
    try:
        return read_domains(regular_file.text_of(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can't be read: {error.strerror}") from error
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text} can't be read: {error}") from error
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _objects(text: str) -> str:
    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _secret(text: str) -> bytes:
    try:
        with regular_file.reading(text) as file:
            found = os.fstat(file.fileno())
            secret = file.read(MOST_SECRET).strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can't be read: {error.strerror}") from error
    if len(secret) < LEAST_SECRET:
        raise argparse.ArgumentTypeError(
            f"{text} has {len(secret)} bytes; a secret needs {LEAST_SECRET}: `openssl rand -hex 32`"
        )
    others = stat.S_IRWXG | stat.S_IRWXO
    if found.st_uid == 0 != os.geteuid() and found.st_gid in (os.getegid(), *os.getgroups()):
        others &= ~stat.S_IRGRP  # root has let this group read it: a pod gets its Secret so
    if found.st_mode & others:
        raise argparse.ArgumentTypeError(f"others can read or change {text}: `chmod 600 {text}`")
    if found.st_uid not in (0, os.geteuid()):
        raise argparse.ArgumentTypeError(f"{text} belongs to another user, who can read it; make your own")
    return secret


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _coordination(text: str) -> str:
    try:
        endpoints_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _mebibytes(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_MEBIBYTES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of MiB from 1 to {MOST_MEBIBYTES}")
    return int(text)


def _spares(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 8")
    return int(text)


def _fault(text: str) -> FaultSpec:
    try:
        return parse_fault(text)
    except FaultError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
