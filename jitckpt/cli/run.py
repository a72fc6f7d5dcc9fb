"""`jitckpt run`: torchrun's flags and ours, checked; then the job, and what it cost in plain words."""

import argparse
import atexit
import errno
import importlib.util
import math
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.agent.agent import launch
from jitckpt.agent.migration import lost_job
from jitckpt.agent.object_copies import WantedObjects
from jitckpt.agent.settings import Settings
from jitckpt.agent.standby import stand_by
from jitckpt.bindings import clock, criu, own_numbers, softgpu
from jitckpt.bindings.criu import Criu, CriuError
from jitckpt.cli.exec import DEFAULT_DEVICES, add_device_argument
from jitckpt.cli.parser import Parser
from jitckpt.clusters import kubernetes, slurm
from jitckpt.console import said_aside, say
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import domains_of, read_domains
from jitckpt.decisions.limits import Limits, conflicts
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.decisions.redundancy import groups
from jitckpt.decisions.suspects import visible_devices
from jitckpt.device import LIBRARY_DIR, check_libraries, choose_device, device_environment
from jitckpt.doctor import moved_process
from jitckpt.encoding.staging import DEFAULT_BYTES
from jitckpt.errors import HostsError, HostsMissing, HostUnfit, NoProgress, NotNeeded, SaveError
from jitckpt.events import Event, EventLog
from jitckpt.faults.injection import (
    CLOCK_KINDS,
    DEVICE_KINDS,
    DRIVER_SUSPECT,
    LASTING_KINDS,
    PROXY_KINDS,
    FaultError,
    FaultSpec,
    parse_fault,
)
from jitckpt.hosts.etcd import Etcd, endpoints_of
from jitckpt.hosts.interfaces import address_of
from jitckpt.hosts.rendezvous import own_address, wait_for_name
from jitckpt.hosts.stores import has_calls_out
from jitckpt.objects.bucket import parse
from jitckpt.reports.timeline import in_words
from jitckpt.saves import directory_lock
from jitckpt.saves.start_record import note_finished
from jitckpt.system import regular_file
from jitckpt.system.door import NO_ROOM
from jitckpt.system.launcher_folder import launcher_folder
from jitckpt.system.nameless_user import give_name
from jitckpt.system.signals import end_in_order
from jitckpt.web.beside import parse_address, served, traced
from jitckpt.wire import environment
from jitckpt.wire.exit_statuses import HOSTS_MISSING, NO_PROGRESS, SAVED
from jitckpt.worker.in_place.keeper import WITHOUT_INIT
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)

CLOCK_LIBRARY = LIBRARY_DIR / clock.LIBRARY
DEFAULT_MAX_RESTARTS = 3
DEFAULT_HANG_TIMEOUT = 60.0
DEFAULT_VALIDATE_EVERY = 1000
DEFAULT_WAIT = 60.0
HANG_FLOOR = 5.0
LEAST_SECRET, MOST_SECRET = 16, 1 << 16  # bytes
MOST_MEBIBYTES = 1 << 24
NO_MASTER = "127.0.0.1"  # where --master-addr is not given
NO_HOSTS, NO_RANKS = "1:1", "1"  # where --nnodes, --nproc-per-node are not given
NO_ID = "none"  # where --rdzv-id is not given
COORDINATED = "jitckpt"  # the name of its rendezvous in torch's registry
MASTER_PORT = 29500  # where --master-port is not given
# Of two jobs that begin at one time both would find the port free. So who takes it has this name, in the
# network namespace that the port is of, as long as the process lives.
PORT_CLAIM = f"\0jitckpt port {MASTER_PORT}"
SAVES = ("saved", "memory_written")  # events
_claims: list[socket.socket] = []

# For --run-path torch calls this function in a process that it forks or spawns; here a worker is a command.
RUN_PATH = """\
import sys
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import run_script_path
record(run_script_path)(*sys.argv[1:])
"""


def main(arguments: list[str]) -> int:
    """Run the job; return torchrun's exit status, or 2 where nothing was started. Raises DeviceError."""
    before = dict(os.environ)
    with said_aside():
        try:
            status = _run(arguments)
        except HostUnfit:  # as a new host, which is taken when its check passes
            status = None
        except _NeedsClock:
            status, before = None, clock.preloaded(str(CLOCK_LIBRARY), before)
        except _NeedsNumbers as needs:
            say(
                "numbers that the job's processes have to have again are others' by now: it goes on in a PID "
                "namespace."
            )
            sys.stdout.flush()
            status = own_numbers.run([sys.executable, *sys.orig_argv[1:]], before, needs.first)
    if status is None:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], before)
    return _ended(status)


class _NeedsClock(Exception):
    """A clock is to jump, for which this process must have a library that it can only begin with."""


class _NeedsNumbers(Exception):
    """A lost job can only go on where its processes get their numbers. first: from where to count there."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


def _need_numbers(args: argparse.Namespace) -> None:
    if args.snapshot_every is not None and os.getpid() != 1:
        first = lost_job.where_to_count_from(args.checkpoint_dir)
        if first is not None:
            raise _NeedsNumbers(first)


def _take_directory(args: argparse.Namespace) -> str:
    """Return a name for this run; where there may be snapshots, it has their directory.

    Raises CheckpointError if another has it.
    """
    run = uuid.uuid4().hex
    if args.snapshot_every is not None:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        if (unlocked := directory_lock.hold(args.checkpoint_dir, run)) is not None:
            say(unlocked)
    return run


def _need_clock(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if any(fault.kind in CLOCK_KINDS for fault in args.fault) and not clock.is_preloaded():
        if str(CLOCK_LIBRARY) in os.environ.get("LD_PRELOAD", "") or not CLOCK_LIBRARY.exists():
            parser.error(f"--fault: no clock can jump without {CLOCK_LIBRARY}; install jitckpt anew")
        raise _NeedsClock


def _ended(status: int) -> int:
    """Return the status; end the process with it at once where the interpreter's own end could abort it."""
    if has_calls_out():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(arguments: list[str]) -> int:
    parser = run_parser()
    args = parser.parse_args(arguments)
    _need_clock(parser, args)
    give_name()
    end_in_order()  # until the agent has the signals, and when it has them no more
    kind = choose_device(args.device, os.environ)
    transparent = args.mode == "transparent"
    check_libraries(kind, LIBRARY_DIR, proxy=transparent, relay=_moves(args))
    with _log_dir(args) as temporary, _fault_folder(transparent and bool(args.fault)) as fault_folder:
        try:
            _check(args, kind)
            config, command, command_arguments = torchrun.config_from_args(args)
            _check_config(args, config)
        except (AssertionError, ValueError, RuntimeError, OSError) as error:
            parser.error(str(error))
        _need_numbers(args)
        run = _take_directory(args)
        if callable(command):
            command, command_arguments = sys.executable, ["-u", "-c", RUN_PATH, *command_arguments]
        # One rank alone has nobody to get its state from.
        all_ranks = config.nproc_per_node * config.max_nodes
        several = all_ranks > 1
        state_on_device = transparent and several and args.state_on_device is not False
        limits = Limits(
            args.hang_timeout or (DEFAULT_HANG_TIMEOUT if transparent else None),
            args.stall_timeout,
            args.save_deadline,
            args.recovery_deadline if transparent else None,
        )
        for sentence in conflicts(limits):
            say(sentence)
        settings = Settings(
            checkpoint_dir=args.checkpoint_dir,
            save_deadline=args.save_deadline,
            hang_timeout=DEFAULT_HANG_TIMEOUT if args.hang_timeout is None else args.hang_timeout,
            hang_floor=0.0 if args.hang_timeout is not None else HANG_FLOOR,
            stall_timeout=args.stall_timeout,
            staging=args.staging << 20,
            warm_spares=args.warm_spares,
            warm_start=args.warm_start,
            device_environment={
                **device_environment(
                    kind,
                    config.nproc_per_node,
                    LIBRARY_DIR,
                    os.environ,
                    proxy=transparent,
                    relay=_moves(args),
                ),
                **fault_folder,
                **_self_check(args.self_check),
                **environment.MODE.to(args.mode),
                **environment.FRAMEWORKS.to(args.frameworks),
                **(environment.RESHARD.to(True) if args.reshard or args.min_hosts else {}),
                **({} if args.min_hosts is None else environment.FULL_WORLD.to(all_ranks)),
                **({} if args.save_every is None else environment.SAVE_EVERY.to(args.save_every)),
                **environment.VALIDATE_EVERY.to(args.validate_every),
                **environment.STATE_ON_DEVICE.to(
                    ("1" if args.state_on_device else WITHOUT_INIT) if state_on_device else "0"
                ),
            },
            faults=tuple(args.fault),
            host_timeout=args.host_timeout,
            recovery_deadline=args.recovery_deadline if transparent else None,
            state_on_device=state_on_device,
            fixed_place=args.fixed_place,
            silent_hosts_are_dead=args.silent_hosts == "dead",
            run=run,
            secret=args.secret_file,
            devices=_devices(kind, config.nproc_per_node),
            exclude_suspect=args.exclude_suspect,
            exchange_broken=args.broken_device != "restart",
            move_broken=args.broken_device == "move",
            suspendable=args.suspendable,
            snapshot_every=None if args.snapshot_every is None else 60 * args.snapshot_every,
            criu=_criu(args) if _moves(args) else None,
            health_check=args.health_check,
            max_standby=args.max_standby,
            stands_by=args.standby,
            temporary=temporary,
            memory=_memory(args),
            coordination=None
            if args.coordination is None
            else Etcd(args.coordination, os.environ, args.host_timeout),
            objects=None if args.objects is None else WantedObjects(args.objects, args.objects_deadline),
            wait=None if args.min_hosts is None else args.wait,
        )
        log = EventLog(args.checkpoint_dir, aside=True)
        with (
            served("metrics", args.metrics, lambda: log.directory),
            served("page", args.page, lambda: log.directory),
            traced(lambda: log.directory if log.leading else None),
        ):
            status = _launch(settings, log, config, command, command_arguments)
        if status == 0 and temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
    return status


def _moves(args: argparse.Namespace) -> bool:
    """Return whether workers may be dumped and made again."""
    return args.broken_device == "move" or args.suspendable or args.snapshot_every is not None


def _criu(args: argparse.Namespace) -> Criu:
    """Return the CRIU by which workers are moved. Raises CriuError if they can't be here."""
    trial = moved_process.try_it()
    if "error" in trial:
        option = "--suspendable" if args.suspendable else "--broken-device move"
        option = option if args.snapshot_every is None else "--snapshot-every"
        raise CriuError(f"{option}: {trial['error']}")
    return criu.find()


def _self_check(wanted: bool | None) -> dict[str, str]:
    """Return the variable that tells the workers, if it is not left to the environment."""
    if wanted is None or (wanted and environment.SELF_CHECK.get() == FULL_SELF_CHECK):
        return {}
    return environment.SELF_CHECK.to(SAMPLED_SELF_CHECK if wanted else NO_SELF_CHECK)


def _launch(
    settings: Settings, log: EventLog, config: LaunchConfig, command: str, arguments: list[str]
) -> int:
    outcome = "failed"
    try:
        record(stand_by if settings.stands_by else launch)(settings, log, config, command, arguments)
        outcome = "succeeded"
        return 0
    except ChildFailedError as error:
        print(f"{type(error).__module__}.{type(error).__qualname__}: {error}", file=sys.stderr)
        return NO_PROGRESS if any(event["event"] == "no_progress" for event in log.events) else 1
    except (HostsError, RendezvousConnectionError, OSError) as error:
        return _status_of(error)
    except HostUnfit as error:
        outcome = "goes on without this host"
        say(str(error))
        raise
    except NotNeeded as error:
        outcome = "ended without this host"
        say(str(error))
        return 0
    except SignalException as interruption:
        outcome = f"was ended by {interruption.sigval.name}"
        return SAVED if _has_saved(log.events, log.restart) else 1
    except SystemExit:
        outcome = "was ended by a signal before its ranks were started, or after they had ended"
        raise
    finally:
        registered = next((event for event in log.events if event["event"] == "registered"), None)
        log.write("job_ended", outcome=outcome)
        # Without either, what ran was no affair of jitckpt's.
        transparent = environment.MODE.get(settings.device_environment) == "transparent"
        if (registered is not None or transparent) and log.leading:
            if outcome == "succeeded" and registered is not None:
                directory = Path(registered["checkpoint_dir"])
                log.aside(partial(_note_finished, directory, log.start))
            for sentence in in_words(log.events, "" if registered is None else registered["checkpoint_dir"]):
                say(sentence)
        log.finish()


def _status_of(error: HostsError | RendezvousConnectionError | OSError) -> int:
    """Say why the job could not go on; return the exit status. Raises an OSError that is no want of room."""
    match error:
        case OSError():
            if error.errno not in (*NO_ROOM, errno.EAGAIN):
                raise error
            say(f"the job can't go on, as its host has no room for more: {error.strerror} (ulimit -a).")
        case RendezvousConnectionError():
            why = str(error.__cause__ or error).partition("\n")[0]
            say(f"the store where the hosts meet can't be reached: {why}")
        case _:
            say(str(error))
    if isinstance(error, NoProgress):
        return NO_PROGRESS
    return HOSTS_MISSING if isinstance(error, HostsMissing) else 1


def _has_saved(events: Sequence[Event], restart: int) -> bool:
    """Return whether a start that was ended by a signal has left its state in files."""
    return any(event["event"] in SAVES and event["restart"] == restart for event in events)


def _note_finished(directory: Path, start: int) -> None:
    try:
        note_finished(directory, start)
    except FileNotFoundError:
        return  # nothing tells of a job there that could be gone on with
    except (OSError, SaveError) as error:
        say(f"that the job has ended can't be noted in {directory}: {error}")


def _devices(kind: str, ranks: int) -> tuple[str, ...]:
    """Return the devices that this host's ranks see, as in CUDA_VISIBLE_DEVICES."""
    if kind == "softgpu":
        return visible_devices(os.environ, int(os.environ.get("SOFTGPU_DEVICES", ranks)))
    from torch.cuda import device_count  # asks the driver's management library, which takes no device

    return visible_devices(os.environ, device_count())


@contextmanager
def _log_dir(args: argparse.Namespace) -> Iterator[Path | None]:
    """Where nobody wants logs, give a temporary folder to torch, for its error files; else None.

    It goes in the end if nothing is in it.
    """
    if args.log_dir is not None or args.logs_specs is not None or (args.redirects, args.tee) != ("0", "0"):
        yield None
        return
    with launcher_folder() as folder:
        args.log_dir = str(folder)
        yield folder


@contextmanager
def _fault_folder(needed: bool) -> Iterator[dict[str, str]]:
    """Give the variable for a folder in which the servers of device proxies listen for their faults."""
    if not needed or softgpu.VARIABLE in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="jitckpt-faults-") as folder:
        yield {softgpu.VARIABLE: folder}


def _check(args: argparse.Namespace, kind: str) -> None:
    """Refuse, by ValueError, what torch would find out too late; fill in what depends on the device."""
    _check_hosts(args)
    args.own_domains = _own_domains(args)
    _check_modes(args)
    if args.state_on_device and args.mode != "transparent":
        raise ValueError("--state-on-device: only --mode transparent keeps copies of the device's memory")
    if args.nproc_per_node in ("gpu", "auto") and kind == "softgpu":
        args.nproc_per_node = os.environ.get("SOFTGPU_DEVICES", str(DEFAULT_DEVICES))
    if args.monitor_interval <= 0:
        raise ValueError("--monitor-interval must be more than 0 seconds")
    for name in args.signals_to_handle.split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ValueError(f"--signals-to-handle: there is no signal {name.strip()!r}")
    if args.standalone or _needs_another_port(args):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", f"{NO_MASTER}:0", str(uuid.uuid4())
    for fault in args.fault:
        if fault.kind in (*DEVICE_KINDS, *LASTING_KINDS, DRIVER_SUSPECT) and kind != "softgpu":
            raise ValueError(f"--fault '{fault}': only softgpu fails on order (--device softgpu)")
        if fault.kind in (*PROXY_KINDS, *LASTING_KINDS) and args.mode != "transparent":
            raise ValueError(f"--fault '{fault}': only --mode transparent has a server that it could befall")
    _check_script(args)


def _check_modes(args: argparse.Namespace) -> None:
    """Refuse what is for another mode of protection."""
    if args.memory_tier not in (None, Wanted(memory_wanted.OFF)) and args.mode == "transparent":
        raise ValueError(
            "--memory-tier: in transparent mode the device proxies' servers have the state in host memory "
            "already, and no other host has; without --mode transparent the memory tier protects it"
        )
    for name in ("every", "limit", "keep"):
        if getattr(args, f"memory_{name}") is not None and args.memory_tier is None:
            raise ValueError(
                f"--memory-{name} goes with --memory-tier; where the script asks for the tier, it says "
                f"this, too: jitckpt.init(memory={{'tier': 'auto', '{name}': ...}})"
            )
    if args.objects is not None and args.checkpoint_dir is None:
        raise ValueError("--objects needs --checkpoint-dir, which is what it copies")
    if args.memory_tier is not None and args.memory_tier.mode == memory_wanted.PARITY:
        most = 1 if args.standalone else torchrun.parse_min_max_nnodes(args.nnodes)[1]
        try:
            groups(most, args.memory_tier.copies)
        except InvalidInput as error:
            raise ValueError(f"--memory-tier parity: {error}") from error
    if args.memory_tier is not None and args.memory_tier.optimizer and args.memory_every not in (None, 1):
        raise ValueError(
            "--memory-every: with --memory-tier peer+optimizer it is 1, since other hosts need the gradients "
            "of each step; with --memory-tier peer it may be more"
        )
    if args.broken_device != "restart" and args.mode != "transparent":
        raise ValueError(
            f"--broken-device {args.broken_device}: only --mode transparent goes on without a restart"
        )
    _check_held(args)
    if args.standby and args.broken_device != "move":
        raise ValueError(
            "--standby needs --broken-device move, on all hosts; without --standby a host that is started "
            "beyond --nnodes stands by for one that is lost"
        )
    if args.standby and args.coordination is not None:
        raise ValueError("--standby: not with --coordination, where hosts that stand by are not known")
    if args.standby and (args.standalone or torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1):
        raise ValueError("--standby: a job on one host has no other (--nnodes)")
    if args.standby and args.secret_file is None:
        raise ValueError(
            "--standby needs --secret-file FILE, the same on all hosts: without it whoever reaches the "
            "rendezvous' store could have processes of his own made here"
        )


def _check_held(args: argparse.Namespace) -> None:
    """Refuse to have all ranks wait behind a step where they can't."""
    if not args.suspendable and args.snapshot_every is None:
        return
    option, directory = "--suspendable", "by which `jitckpt suspend` finds the job"
    if args.snapshot_every is not None:
        option, directory = "--snapshot-every", "in which the snapshots are"
        if args.suspendable or args.broken_device != "restart":
            raise ValueError("--snapshot-every: not yet with --suspendable, nor with --broken-device")
    if args.mode != "transparent":
        raise ValueError(f"{option}: only --mode transparent can hold all ranks and free their devices")
    if not args.standalone and torchrun.parse_min_max_nnodes(args.nnodes)[1] > 1:
        raise ValueError(f"{option}: not yet with several hosts, only with one (--nnodes 1)")
    if args.checkpoint_dir is None:
        raise ValueError(f"{option} needs --checkpoint-dir, {directory}")
    if shutil.which("nsenter") is None:
        raise ValueError(f"{option} needs nsenter, of the package util-linux")


def _own_domains(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the failure domains that this host is in. Raises ValueError."""
    name = socket.gethostname()
    if args.failure_domains is None:
        return (name,)
    if not args.failure_domains:
        return ()
    names = list(dict.fromkeys(filter(None, (name, name.partition(".")[0], args.local_addr))))
    try:
        return domains_of(args.failure_domains, names)
    except InvalidInput as error:
        raise ValueError(f"--failure-domains: {error}") from error


def _check_hosts(args: argparse.Namespace) -> None:
    args.fixed_place = None
    if args.wait is not None and args.min_hosts is None:
        raise ValueError("--wait goes with --min-hosts")
    if args.slurm:
        _make_slurm(args)
    least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if args.coordination is not None:
        _make_coordinated(args, most)
    if most == 1 or args.standalone:
        args.local_addr = args.local_addr or NO_MASTER  # nobody else comes to the workers' store
        if args.min_hosts is not None:
            raise ValueError("--min-hosts: a job on one host has none to go on without; see --nnodes")
        return
    if least != most:
        raise ValueError(
            f"--nnodes {args.nnodes}: the saves of a job are for its number of ranks, so give one number; "
            "agents that are started beyond it stand by for a host that is lost"
            + (f"; to go on with fewer: --nnodes {most} --min-hosts {max(2, least)}" if most > 2 else "")
        )
    if args.rdzv_backend == "static" and (args.rdzv_endpoint or args.master_addr != NO_MASTER):
        _make_dynamic(args, most)
    if args.rdzv_backend not in ("c10d", COORDINATED) or not args.rdzv_endpoint:
        raise ValueError(
            f"--nnodes {args.nnodes} needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, or "
            "--master-addr HOST and --node-rank"
        )
    if args.min_hosts is not None:
        _make_elastic(args, most)
    if args.local_addr is None:
        name = parse_rendezvous_endpoint(args.rdzv_endpoint, 0)[0]
        if kubernetes.in_pod(os.environ):
            wait_for_name(name)
        args.local_addr = own_address(name)


def _make_elastic(args: argparse.Namespace, hosts: int) -> None:
    """Have torch's rendezvous be content with fewer hosts, once it has waited for the others."""
    args.wait = DEFAULT_WAIT if args.wait is None else args.wait
    if not 2 <= args.min_hosts < hosts:
        raise ValueError(
            f"--min-hosts {args.min_hosts}: with --nnodes {hosts} it is from 2 to {hosts - 1}. One host "
            "alone never goes on: of two that do not see each other nobody could tell which"
        )
    if args.mode == "transparent":
        raise ValueError("--min-hosts: in transparent mode a job keeps its number of ranks")
    if args.coordination is not None:
        raise ValueError("--min-hosts: not with --coordination; let the hosts meet at a store of their own")
    if args.memory_tier not in (None, Wanted(memory_wanted.OFF)):
        raise ValueError(
            "--min-hosts: not with --memory-tier, whose copies only the same number of ranks can take; with "
            "--save-every or jitckpt.init(save_every=...) there are files for failures of all replicas"
        )
    args.nnodes = f"{args.min_hosts}:{hosts}"
    last_call = f"last_call_timeout={math.ceil(args.wait)}"
    args.rdzv_conf = f"{args.rdzv_conf},{last_call}" if args.rdzv_conf else last_call


def _make_slurm(args: argparse.Namespace) -> None:
    """Fill in what Slurm knows: hosts, this one's place, where they meet, and as which job."""
    if args.rdzv_endpoint or args.master_addr != NO_MASTER or args.standalone:
        raise ValueError("--slurm says where the hosts meet: no --rdzv-endpoint, --master-addr, --standalone")
    step = slurm.step_of(os.environ)
    if args.nnodes == NO_HOSTS:
        args.nnodes = str(step.nodes)
    hosts = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if hosts > step.nodes:
        raise ValueError(f"--nnodes {args.nnodes}: the Slurm step has {step.nodes} nodes")
    if step.gpus and args.nproc_per_node == NO_RANKS:
        args.nproc_per_node = str(step.gpus)
    if step.nodes == 1:
        args.standalone = True
        return
    if step.node == 0 and (why := slurm.ends_healthy_ranks(os.environ)):
        say(why)
    args.rdzv_id = step.name
    place = step.node if step.node < hosts else None  # the others stand by
    if args.coordination is None:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", f"{slurm.first_host(step)}:{step.port}"
        is_host = f"is_host={'true' if step.node == 0 else 'false'}"
        args.rdzv_conf = f"{args.rdzv_conf},{is_host}" if args.rdzv_conf else is_host
    args.fixed_place = place


def _make_coordinated(args: argparse.Namespace, hosts: int) -> None:
    """Have the hosts meet at a coordination service, which knows many jobs."""
    if hosts == 1 or args.standalone:
        raise ValueError("--coordination: a job on one host has nobody to meet; see --nnodes")
    if args.rdzv_endpoint or args.master_addr != NO_MASTER:
        raise ValueError("--coordination says where the hosts meet: no --rdzv-endpoint, no --master-addr")
    if args.rdzv_id == NO_ID:
        raise ValueError(
            "--coordination: give the job a name of its own with --rdzv-id, on all hosts the same"
        )
    name, port = min(endpoints_of(args.coordination)[0])
    args.rdzv_backend, args.rdzv_endpoint = (
        COORDINATED,
        f"[{name}]:{port}" if ":" in name else f"{name}:{port}",
    )


def _needs_another_port(args: argparse.Namespace) -> bool:
    """Return whether another job on this host has, or is about to have, the port that is taken by itself."""
    alone = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    if not alone or args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port != MASTER_PORT:
        return False
    claim = socket.socket(socket.AF_UNIX)
    _claims.append(claim)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind(PORT_CLAIM)
            probe.bind(("", MASTER_PORT))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                say(f"port {MASTER_PORT} is in use, perhaps by another job; this one takes a free one.")
                return True
    return False


def _make_dynamic(args: argparse.Namespace, hosts: int) -> None:
    """Meet as with c10d where the user has given every host its place: torch's own has no second meeting."""
    if not 0 <= args.node_rank < hosts:
        raise ValueError(f"--node-rank {args.node_rank}: with --nnodes {hosts} it is from 0 to {hosts - 1}")
    args.fixed_place = args.node_rank
    args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    args.rdzv_backend = "c10d"
    has_store = f"is_host={'true' if args.node_rank == 0 else 'false'}"
    args.rdzv_conf = f"{args.rdzv_conf},{has_store}" if args.rdzv_conf else has_store


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if args.run_path or not (args.module or args.no_python):
        if not Path(script).exists():
            raise ValueError(f"there is no script {script}")
    elif args.no_python:
        if shutil.which(script) is None:
            raise ValueError(f"there is no program {script}")
    elif _is_missing_module(script):
        raise ValueError(f"there is no module {script}")


def _is_missing_module(name: str) -> bool:
    """Return whether `python -m name` could not even find the package that the name begins with."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is None
    finally:
        sys.path.pop(0)


def _check_config(args: argparse.Namespace, config: LaunchConfig) -> None:
    if config.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node must be at least 1, not {config.nproc_per_node}")
    for fault in args.fault:
        ranks = config.nproc_per_node * config.max_nodes
        if max(fault.rank, fault.peer or 0) >= ranks:
            raise ValueError(f"--fault '{fault}': the ranks are 0 to {ranks - 1}")


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


def _add_memory(ours: argparse._ArgumentGroup) -> None:
    """Add the options of the memory tier."""
    ours.add_argument(
        "--memory-tier",
        type=_memory_tier,
        default=None,
        metavar="auto|off|peer[=M][+optimizer]|parity[=D]|sharded[+...]",
        help="keep each rank's whole state in host memory, too, for jobs without replicas. peer: with M "
        "copies (default 2), its own host's and those on other hosts; peer+optimizer: other hosts get "
        "gradients, and make the optimizer's steps on their copies, as long as that gives the same bits; "
        "auto: as peer, only where some rank's state has no replica on another host; parity: once, with XOR "
        "parity over groups of D hosts (default 4), of which one may be lost at a time; sharded, "
        "sharded+peer, sharded+parity: what D replicas hold alike is cut, each copies 1/D of it (default "
        "off)",
    )
    ours.add_argument(
        "--memory-every",
        type=_memory_every,
        metavar="STEPS|auto",
        help="a snapshot for the memory tier after every so many steps; auto: as often as one is whole "
        "everywhere before the next begins, which is measured (default: auto with --memory-tier auto, else "
        "1)",
    )
    ours.add_argument(
        "--memory-limit",
        type=_mebibytes,
        metavar="MIB",
        help="host memory that the memory tier may take on this host (default: four fifths of what is free)",
    )
    ours.add_argument(
        "--memory-keep",
        type=_seconds,
        metavar="SECONDS",
        help="how long the memory tier's memory stays when the agent was killed, for the same command to "
        "go on from (default 60)",
    )
    ours.add_argument(
        "--memory-spill",
        type=_spill,
        default="",
        metavar="DIR",
        help="where this host keeps parts of others' states that no host's memory has room for, in files "
        "without names: on its own disk, or a shared one (default: nowhere)",
    )
    ours.add_argument(
        "--memory-interface",
        type=_interface,
        metavar="NAME|ADDRESS",
        help="the network interface of this host over which others send what its memory is to keep (default: "
        "the one that the agents talk over)",
    )


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of all options, torchrun's and ours."""
    theirs = torchrun.get_args_parser()
    theirs.usage = argparse.SUPPRESS
    theirs.description = "torchrun's options, which mean the same here:"
    options = Parser(
        prog="jitckpt run",
        usage="jitckpt run [options] script.py [the script's arguments]",
        description="Run a training as torchrun does, and save its state just in time when a rank fails.",
        add_help=False,
    )
    ours = options.add_argument_group("jitckpt's own options")
    ours.add_argument(
        "--checkpoint-dir",
        type=_directory,
        metavar="DIR",
        help="where states and events are written, if the script does not say it itself",
    )
    ours.add_argument(
        "--save-deadline",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long healthy ranks may take to save after a failure (default 60)",
    )
    ours.add_argument(
        "--hang-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="a collective that makes no progress for so long is looked into (default: learned from the "
        f"job's own collectives, {HANG_FLOOR:g} to {DEFAULT_HANG_TIMEOUT:g}; in transparent mode "
        f"{DEFAULT_HANG_TIMEOUT:g}, and of any answer of the device)",
    )
    ours.add_argument(
        "--mode",
        choices=("user", "transparent"),
        default="user",
        help="transparent: the device is behind a proxy, and when it fails all ranks go back by a minibatch "
        "in the same processes (default user)",
    )
    ours.add_argument(
        "--recovery-deadline",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="in transparent mode: an order of a recovery (to stop, to start a new server, to make the calls "
        "again) that takes a rank so long has failed (default 120)",
    )
    ours.add_argument(
        "--validate-every",
        type=_steps,
        default=DEFAULT_VALIDATE_EVERY,
        metavar="STEPS",
        help="in transparent mode: before the fifth optimizer step, and every so many after it, all ranks "
        "make their minibatch's calls again and compare what comes out; 0: in the fifth alone (default "
        f"{DEFAULT_VALIDATE_EVERY})",
    )
    ours.add_argument(
        "--state-on-device",
        action=argparse.BooleanOptionalAction,
        help="in transparent mode: once that is seen to be safe, parameters and optimizer "
        "state are not copied to the host with each step; a device that is lost gets them from another rank "
        "that has the same (default: unless the script calls jitckpt.init; without, the loss of all devices "
        "that have them is survived, too)",
    )
    ours.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=540.0,
        metavar="SECONDS",
        help="how long a rank that is alive may keep the others waiting in a collective (default 540)",
    )
    ours.add_argument(
        "--host-timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="of several hosts one that is silent for so long is lost (default 10)",
    )
    ours.add_argument(
        "--silent-hosts",
        choices=("cut-off", "dead"),
        default="cut-off",
        help="what a host is taken for that has become silent. cut-off: it may live, so only the greater "
        "part of the hosts goes on without the others; dead: you know that it does not (default cut-off)",
    )
    ours.add_argument(
        "--secret-file",
        type=_secret,
        metavar="FILE",
        help="the same on all hosts, for you alone to read: by what it holds their agents know each other, "
        "and what they leave in the rendezvous' store (default: a secret that the first host makes and tells "
        "the others through that store)",
    )
    ours.add_argument(
        "--min-hosts",
        type=_steps,
        metavar="N",
        help="in user mode: with hosts missing for longer than --wait the job goes on with N of them or "
        "more, and takes others in at the end of a step when they come; the first start needs all (default: "
        "every start does)",
    )
    ours.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help="with --min-hosts: how long missing hosts are waited for, and how long at least a start is left "
        f"alone before others are taken in (default {DEFAULT_WAIT:g})",
    )
    ours.add_argument(
        "--max-standby",
        type=_steps,
        metavar="N",
        help="of the hosts beyond --nnodes so many stand by; a further one ends with status 0 (default: all)",
    )
    ours.add_argument(
        "--health-check",
        metavar="COMMAND",
        help="run by this host's shell before each start of the ranks; where it does not end with 0 in 120 s "
        "the host is not taken, until it does",
    )
    ours.add_argument(
        "--slurm",
        action="store_true",
        help="in a step of a Slurm job, with one task on each node: hosts, their order and where they meet "
        "are Slurm's; beyond --nnodes they stand by (srun --ntasks-per-node=1 --kill-on-bad-exit=0 ...)",
    )
    ours.add_argument(
        "--coordination",
        type=_coordination,
        metavar="URL",
        help="etcd://HOST:2379[,HOST:PORT...] (etcds:// for TLS): the hosts meet at an etcd cluster, by "
        "--rdzv-id, and no host of theirs has to live; who it is and by which certificates the variables of "
        "etcdctl say (ETCDCTL_USER, ETCDCTL_CACERT ...; needs jitckpt[etcd]; default: at their own store)",
    )
    _add_memory(ours)
    ours.add_argument(
        "--failure-domains",
        type=_domains,
        default={},
        metavar="FILE|hostname",
        help="no two copies of a state go where one failure could take both, if there is another way. FILE: "
        "a line for each host, its name and the racks, switches ... that it is in; hostname: hosts of one "
        "name are one machine",
    )
    ours.add_argument(
        "--objects",
        type=_objects,
        metavar="s3://BUCKET/PREFIX",
        help="copy what is saved in --checkpoint-dir to this place of an object store, and go on from there "
        "where the directory lacks it",
    )
    ours.add_argument(
        "--objects-deadline",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long the job's end waits for what is not copied there yet (default 600)",
    )
    ours.add_argument(
        "--staging",
        type=_mebibytes,
        default=DEFAULT_BYTES >> 20,
        metavar="MIB",
        help="page-locked host memory through which a rank saves (default 64)",
    )
    ours.add_argument(
        "--warm-spares",
        type=_spares,
        metavar="N",
        help="processes for each rank that have loaded torch before a failure needs them (default: 1 where "
        "memory allows)",
    )
    ours.add_argument(
        "--warm-start",
        action="store_true",
        help="fork all workers, those of the first start too, from one process that has loaded torch",
    )
    ours.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        help="after the first steps restore what a save would hold into copies of the training's objects and "
        "compare, and let replicas compare theirs; a warning names what differs (default: on, or as "
        f"{environment.SELF_CHECK.name} says)",
    )
    ours.add_argument(
        "--frameworks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="in user mode: protect the trainings of transformers' Trainer, Accelerate, Lightning and "
        "DeepSpeed by themselves, without a line in the script (default: on)",
    )
    ours.add_argument(
        "--save-every",
        type=_steps,
        metavar="STEPS",
        help="of trainings that --frameworks protects, save after each so many optimizer steps as well, for "
        "failures that no replica survives (default: never)",
    )
    ours.add_argument(
        "--reshard",
        action="store_true",
        help="in user mode: if the newest save is of another number of ranks or another layout, cut it anew; "
        "else that is refused",
    )
    ours.add_argument(
        "--exclude-suspect",
        action="store_true",
        help="restart without devices on which a rank has failed twice, if others are free; else end the job",
    )
    ours.add_argument(
        "--metrics",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, from a process of their own (default host 127.0.0.1; needs "
        "jitckpt[metrics])",
    )
    ours.add_argument(
        "--page",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve a live view of the job there, as `jitckpt watch --page` does (default host 127.0.0.1; "
        "elsewhere a token is needed; needs jitckpt[page])",
    )
    ours.add_argument(
        "--broken-device",
        choices=("restart", "exchange", "move"),
        default="restart",
        help="in transparent mode, what is done about a device that fails with a new server, too. restart: "
        "the job starts again; exchange: the rank goes on with a device of its host that no rank has; move: "
        "the same, in a process that CRIU makes anew of its own (default restart)",
    )
    ours.add_argument(
        "--suspendable",
        action="store_true",
        help="in transparent mode, on one host: `jitckpt suspend` can have the job give its devices and "
        "memory back, and `jitckpt resume` have it go on (needs CRIU)",
    )
    ours.add_argument(
        "--snapshot-every",
        type=_seconds,
        metavar="MINUTES",
        help="in transparent mode, on one host: write all ranks' processes to the checkpoint directory so "
        "often, and go back there if one dies (needs CRIU)",
    )
    ours.add_argument(
        "--standby",
        action="store_true",
        help="this host takes no part until the devices of another one are broken for good (--broken-device "
        "move, which all hosts need); then that one's ranks go on here",
    )
    ours.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="SPEC",
        help="rehearse a failure, such as 'rank=1 step=20 phase=backward kind=kill'; repeatable",
    )
    add_device_argument(ours)
    parser = RunParser(options, theirs)
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    return parser


def _directory(text: str) -> Path:
    path = Path(text).absolute()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a directory")
    return path


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


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


def _memory(args: argparse.Namespace) -> Wanted | None:
    """Return what is wanted of the memory tier, or that the script may say it; None if it is off."""
    wanted = args.memory_tier or Wanted(memory_wanted.BY_SCRIPT)
    if wanted.mode == memory_wanted.OFF or args.mode == "transparent" or args.min_hosts is not None:
        return None
    return replace(
        wanted,
        every=args.memory_every,
        limit=None if args.memory_limit is None else args.memory_limit << 20,
        keep=wanted.keep if args.memory_keep is None else args.memory_keep,
        domains=args.own_domains,
        address=args.memory_interface or "",
        directory=args.memory_spill,
    )


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
