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
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.agent.agent import launch
from jitckpt.agent.migration import lost_job
from jitckpt.agent.migration.suspended_job import Meets, SuspendedJob
from jitckpt.agent.object_copies import WantedObjects
from jitckpt.agent.settings import Settings
from jitckpt.agent.standby import stand_by
from jitckpt.bindings import clock, criu, own_numbers, softgpu
from jitckpt.bindings.criu import Criu, CriuError
from jitckpt.cli.exec import DEFAULT_DEVICES
from jitckpt.cli.run_options import DEFAULT_HANG_TIMEOUT, DEFAULT_WAIT, HANG_FLOOR, run_parser
from jitckpt.clusters import kubeflow, kubernetes, slurm, slurm_spares
from jitckpt.console import said_aside, say
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import domains_of
from jitckpt.decisions.limits import Limits, conflicts
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.decisions.redundancy import groups
from jitckpt.decisions.suspects import visible_devices
from jitckpt.device import LIBRARY_DIR, check_libraries, choose_device, device_environment
from jitckpt.doctor import moved_process
from jitckpt.errors import (
    HostsError,
    HostsMissing,
    HostUnfit,
    JobEnded,
    JobSuspended,
    NoProgress,
    NotNeeded,
    SaveError,
)
from jitckpt.events import Event, EventLog
from jitckpt.faults.injection import (
    CLOCK_KINDS,
    DEVICE_KINDS,
    DRIVER_SUSPECT,
    LASTING_KINDS,
    PROXY_KINDS,
)
from jitckpt.hosts.etcd import Etcd, endpoints_of
from jitckpt.hosts.limited_calls import has_calls_out
from jitckpt.hosts.rendezvous import own_address, wait_for_name
from jitckpt.reports.timeline import in_words
from jitckpt.saves import directory_lock
from jitckpt.saves.start_record import note_finished
from jitckpt.system.door import NO_ROOM
from jitckpt.system.launcher_folder import launcher_folder
from jitckpt.system.nameless_user import give_name
from jitckpt.system.signals import end_in_order
from jitckpt.web.beside import served, traced
from jitckpt.wire import environment
from jitckpt.wire.exit_statuses import HOSTS_MISSING, NO_PROGRESS, SAVED
from jitckpt.worker.in_place.keeper import WITHOUT_INIT
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)

CLOCK_LIBRARY = LIBRARY_DIR / clock.LIBRARY
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
        except (HostsMissing, NotNeeded) as error:  # nothing was started
            say(str(error))
            status = 0 if isinstance(error, NotNeeded) else HOSTS_MISSING
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
    if args.snapshot_every is not None and not _has_several_hosts(args):  # each has a folder of its own
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
        _say_conflicts(args)
        told = {**_told_to_ranks(args, kind, config), **fault_folder}
        reporter = _reporter(args)
        settings = _settings(args, kind, config, arguments, told=told, run=run, temporary=temporary)
        settings = replace(settings, on_progress=None if reporter is None else reporter.note)
        log = EventLog(args.checkpoint_dir, aside=True)
        with (
            served("metrics", args.metrics, lambda: log.directory),
            served("page", args.page, lambda: log.directory),
            traced(lambda: log.directory if log.leading else None),
            _spared(args.spared) as over,
        ):
            status = _launch(settings, log, config, command, command_arguments)
        if reporter is not None:
            reporter.finish(succeeded=any(event.get("outcome") == "succeeded" for event in log.events))
        if status == 1 and over:  # another run of the job may need it
            status = HOSTS_MISSING
        if status == 0 and temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
    return status


def _reporter(args: argparse.Namespace) -> kubeflow.KubeflowReporter | None:
    """Return who tells Kubeflow how far the training is, if that is wanted and it has said where."""
    server = kubeflow.server_of(os.environ)
    return kubeflow.KubeflowReporter(server, args.total_steps, say) if server and args.total_steps else None


def _still_wanted(step: slurm.SlurmStep | None) -> Callable[[], None]:
    return (lambda: None) if step is None else partial(slurm_spares.check_wanted, step)


@contextmanager
def _spared(step: slurm.SlurmStep | None) -> Iterator[list[str]]:
    """Have this host end with the training for which it stands by; yield why it was, once it was.

    Raises NotNeeded or HostsMissing where its agents have ended: another run of it may need this host.
    """
    over: list[str] = []
    if step is None:
        yield over
        return

    def end(why: str) -> None:
        say(f"{why} This host ends, too.")
        over.append(why)
        os.kill(os.getpid(), signal.SIGTERM)

    with slurm_spares.until_over(step, end):
        try:
            yield over
        except JobEnded as ended:
            say(str(ended))
            slurm_spares.wait_for_end(step)


def _say_conflicts(args: argparse.Namespace) -> None:
    """Say which limits of time don't go together."""
    transparent = args.mode == "transparent"
    limits = Limits(
        args.hang_timeout or (DEFAULT_HANG_TIMEOUT if transparent else None),
        args.stall_timeout,
        args.save_deadline,
        args.recovery_deadline if transparent else None,
    )
    for sentence in conflicts(limits):
        say(sentence)


def _settings(
    args: argparse.Namespace,
    kind: str,
    config: LaunchConfig,
    arguments: Sequence[str],
    *,
    told: dict[str, str],
    run: str,
    temporary: Path | None,
) -> Settings:
    """Return the agent's settings. arguments: this command's. told: to the ranks. Raises CriuError."""
    coordination = None
    if args.coordination is not None:
        coordination = Etcd(args.coordination, os.environ, args.host_timeout)
    return Settings(
        checkpoint_dir=args.checkpoint_dir,
        save_deadline=args.save_deadline,
        hang_timeout=DEFAULT_HANG_TIMEOUT if args.hang_timeout is None else args.hang_timeout,
        hang_floor=0.0 if args.hang_timeout is not None else HANG_FLOOR,
        stall_timeout=args.stall_timeout,
        staging=args.staging << 20,
        device_environment=told,
        warm_spares=args.warm_spares,
        warm_start=args.warm_start,
        faults=tuple(args.fault),
        host_timeout=args.host_timeout,
        recovery_deadline=args.recovery_deadline if args.mode == "transparent" else None,
        state_on_device=_keeps_on_device(args, config),
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
        from_snapshot=args.from_snapshot,
        command=command_of(arguments, args),
        criu=_criu(args) if _moves(args) else None,
        health_check=args.health_check,
        report_host=args.report_host,
        host_name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        max_standby=args.max_standby,
        is_spare=args.spared is not None or _waits_for_a_loss(args),
        stands_by=args.standby and not _waits_for_a_loss(args),
        temporary=temporary,
        memory=_memory(args),
        coordination=coordination,
        objects=None if args.objects is None else WantedObjects(args.objects, args.objects_deadline),
        still_wanted=_still_wanted(args.spared),
        wait=None if args.min_hosts is None else args.wait,
    )


def _keeps_on_device(args: argparse.Namespace, config: LaunchConfig) -> bool:
    """Return whether state may stay on the device alone. One rank has nobody to get its own from."""
    several = config.nproc_per_node * config.max_nodes > 1
    return args.mode == "transparent" and several and args.state_on_device is not False


def _told_to_ranks(args: argparse.Namespace, kind: str, config: LaunchConfig) -> dict[str, str]:
    """Return the variables by which the ranks have their device, and know what is wanted of them."""
    variables = device_environment(
        kind,
        config.nproc_per_node,
        LIBRARY_DIR,
        os.environ,
        proxy=args.mode == "transparent",
        relay=_moves(args),
    )
    variables |= _self_check(args.self_check)
    variables |= environment.MODE.to(args.mode)
    variables |= environment.FRAMEWORKS.to(args.frameworks)
    if args.reshard or args.min_hosts:
        variables |= environment.RESHARD.to(True)
    if args.min_hosts is not None:
        variables |= environment.FULL_WORLD.to(config.nproc_per_node * config.max_nodes)
    if args.save_every is not None:
        variables |= environment.SAVE_EVERY.to(args.save_every)
    variables |= environment.VALIDATE_EVERY.to(args.validate_every)
    on_device = "1" if args.state_on_device else WITHOUT_INIT
    return variables | environment.STATE_ON_DEVICE.to(on_device if _keeps_on_device(args, config) else "0")


def _moves(args: argparse.Namespace) -> bool:
    """Return whether workers may be dumped and made again."""
    return args.broken_device == "move" or args.suspendable or args.snapshot_every is not None


def _criu(args: argparse.Namespace) -> Criu:
    """Return the CRIU by which workers are moved. Raises CriuError if they can't be here."""
    trial = moved_process.try_it()
    if "error" in trial:
        option = "--suspendable" if args.suspendable else "--broken-device move"
        option = option if args.snapshot_every in (None, math.inf) else "--snapshot-every"
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
    except JobSuspended:
        outcome = "is suspended"
        return SAVED
    except NotNeeded as error:
        outcome = "ended without this host"
        if settings.is_spare and isinstance(error, JobEnded):
            raise
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
    """Return whether the job, ended by a signal in this start, has left its state in files.

    A start that came to no step of its own has lost nothing of what the start before it, or the command
    before this one, had left there.
    """
    for start in range(restart, -1, -1):
        of_start = [event for event in events if event["restart"] == start]
        if any(event["event"] in SAVES for event in of_start):
            return True
        if any(event["event"] == "first_step" for event in of_start):
            return False
    return any(event["event"] == "restored" and not event["in_memory"] for event in events)


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
    args.own_domains, args.domains_by = _own_domains(args)
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
        most = 1 if args.standalone else _hosts_of(args.nnodes)[1]
        try:
            groups(most, args.memory_tier.copies, args.memory_tier.beside)
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
    if args.standby:
        _check_standby(args)


def _check_standby(args: argparse.Namespace) -> None:
    """A host stands by for one that is lost, or with --broken-device move for one with broken devices."""
    if not _has_several_hosts(args):
        raise ValueError("--standby: a job on one host has no other (--nnodes)")
    if args.broken_device == "move" and args.coordination is not None:
        raise ValueError(
            "--standby: with --broken-device move not with --coordination, where hosts that stand by are not "
            "known"
        )
    if args.broken_device == "move" and args.secret_file is None:
        raise ValueError(
            "--standby: with --broken-device move it needs --secret-file FILE, the same on all hosts: else "
            "whoever reaches the rendezvous' store could have processes of his own made here"
        )


def _waits_for_a_loss(args: argparse.Namespace) -> bool:
    """Return whether this host is to have the place of one that is lost, and none before."""
    return bool(args.standby) and args.broken_device != "move"


def _has_several_hosts(args: argparse.Namespace) -> bool:
    return not args.standalone and _hosts_of(args.nnodes)[1] > 1


def command_of(arguments: Sequence[str], args: argparse.Namespace) -> SuspendedJob:
    """Return the command by which a suspended job goes on."""
    script = [args.training_script, *args.training_script_args]
    meets: Meets = "nobody"
    if _has_several_hosts(args):
        meets = "c10d" if args.fixed_place is None else "place"
        meets = "slurm" if args.slurm else "etcd" if args.coordination is not None else meets
    return SuspendedJob(list(arguments[: len(arguments) - len(script)]), script, os.getcwd(), meets)


def _check_held(args: argparse.Namespace) -> None:
    """Refuse to have all ranks wait behind a step where they can't."""
    if not args.suspendable and args.snapshot_every is None:
        if args.from_snapshot:
            raise ValueError("--from-snapshot goes with --snapshot-every, or on several hosts --suspendable")
        return
    option, directory = "--suspendable", "by which `jitckpt suspend` finds the job"
    if args.snapshot_every is not None:
        option, directory = "--snapshot-every", "in which the snapshots are"
        if args.broken_device != "restart":
            raise ValueError("--snapshot-every: not yet with --broken-device")
    if args.mode != "transparent":
        raise ValueError(f"{option}: only --mode transparent can hold all ranks and free their devices")
    if _has_several_hosts(args) and args.broken_device != "restart":
        raise ValueError(f"{option}: on several hosts not yet with --broken-device")
    if args.checkpoint_dir is None:
        raise ValueError(f"{option} needs --checkpoint-dir, {directory}")
    if shutil.which("nsenter") is None:
        raise ValueError(f"{option} needs nsenter, of the package util-linux")
    if args.snapshot_every is None and _has_several_hosts(args):
        args.snapshot_every = math.inf  # the job is suspended by a snapshot, and there is no other
    if args.from_snapshot and args.snapshot_every is None:
        raise ValueError("--from-snapshot: the launcher of a suspended job on one host stays")


def _own_domains(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Return the failure domains that this host is in, and which scheduler names them, if no option does.

    Raises ValueError.
    """
    name = socket.gethostname()
    if args.failure_domains is None:
        return (name,), ""
    if not args.failure_domains:
        found = slurm.domain_of(os.environ)
        return ((found,), "Slurm") if found else ((), "")
    names = list(dict.fromkeys(filter(None, (name, name.partition(".")[0], args.local_addr))))
    try:
        return domains_of(args.failure_domains, names), ""
    except InvalidInput as error:
        raise ValueError(f"--failure-domains: {error}") from error


def _check_hosts(args: argparse.Namespace) -> None:
    args.fixed_place, args.spared, place = None, None, _given_place(args)
    if args.spare_for is not None and not args.slurm:
        raise ValueError("--spare-for goes with --slurm")
    if args.wait is not None and args.min_hosts is None:
        raise ValueError("--wait goes with --min-hosts")
    args.slurm = args.slurm or _is_found_in_slurm(args)
    if args.slurm:
        _make_slurm(args)
    least, most = _hosts_of(args.nnodes)
    if args.coordination is not None:
        _make_coordinated(args, most, place)
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
        args.local_addr = _address_towards_others(args)


def _hosts_of(nnodes: str) -> tuple[int, int]:
    """Return the fewest and the most hosts. Raises ValueError."""
    try:
        least, most = torchrun.parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes {nnodes}: it is the number of hosts, from 1 on")
    return least, most


def _address_towards_others(args: argparse.Namespace) -> str:
    names = [parse_rendezvous_endpoint(args.rdzv_endpoint, 0)[0]]
    if args.coordination is not None:  # a member that is gone may have no name meanwhile
        names = [name for name, _ in endpoints_of(args.coordination)[0]]
    if kubernetes.in_pod(os.environ):
        wait_for_name(*names)
    return own_address(*names)


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
    args.nnodes = f"{args.min_hosts}:{hosts}"
    last_call = f"last_call_timeout={math.ceil(args.wait)}"
    args.rdzv_conf = f"{args.rdzv_conf},{last_call}" if args.rdzv_conf else last_call


def _is_found_in_slurm(args: argparse.Namespace) -> bool:
    """Return whether Slurm has started several hosts, and nobody has said where they meet; then say so."""
    is_said = args.rdzv_endpoint or args.master_addr != NO_MASTER or args.rdzv_id != NO_ID or args.standalone
    if is_said or args.standby or args.nnodes == "1" or not slurm.is_one_of_several(os.environ):
        return False
    say("this is one of several nodes of a Slurm step: they meet as with --slurm (alone: --standalone).")
    return True


def _make_slurm(args: argparse.Namespace) -> None:
    """Fill in what Slurm knows: hosts, this one's place, where they meet, and as which job."""
    if args.rdzv_endpoint or args.master_addr != NO_MASTER or args.standalone:
        raise ValueError("--slurm says where the hosts meet: no --rdzv-endpoint, --master-addr, --standalone")
    if args.standby:
        raise ValueError("--standby: with --slurm the nodes beyond --nnodes stand by; --spare-for has more")
    step = slurm.step_of(os.environ)
    if args.nnodes == NO_HOSTS and args.spare_for is None:
        args.nnodes = str(step.nodes)
    hosts = _hosts_of(args.nnodes)[1]
    if args.spare_for is not None:
        if hosts == 1:
            raise ValueError("--spare-for needs --nnodes N, as in the job for which this host stands by")
        args.spared = slurm_spares.step_of_training(args.spare_for, hosts)
        step = replace(args.spared, gpus=step.gpus)
    if hosts > step.nodes:
        raise ValueError(f"--nnodes {args.nnodes}: the Slurm step has {step.nodes} nodes")
    if step.gpus and args.nproc_per_node == NO_RANKS:
        args.nproc_per_node = str(step.gpus)
    if step.nodes == 1:
        args.standalone = True
        return
    for warning in slurm.warnings(os.environ) if step.node == 0 else ():
        say(warning)
    if args.coordination is not None and args.checkpoint_dir is None:
        raise ValueError(
            "--slurm: with --coordination a run of a job that is queued again goes by another name, so give "
            "--checkpoint-dir, in which it finds the starts of those before"
        )
    args.rdzv_id = step.name
    place = step.node if step.node < hosts else None  # the others stand by
    if args.coordination is None:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", f"{slurm.first_host(step)}:{step.port}"
        is_host = f"is_host={'true' if step.node == 0 else 'false'}"
        args.rdzv_conf = f"{args.rdzv_conf},{is_host}" if args.rdzv_conf else is_host
    args.fixed_place = place


def _make_coordinated(args: argparse.Namespace, hosts: int, place: int | None) -> None:
    """Have the hosts meet at a coordination service, which knows many jobs. place: that the user gives."""
    if hosts == 1 or args.standalone:
        raise ValueError("--coordination: a job on one host has nobody to meet; see --nnodes")
    if args.rdzv_endpoint or args.master_addr != NO_MASTER:
        raise ValueError("--coordination says where the hosts meet: no --rdzv-endpoint, no --master-addr")
    if args.rdzv_id == NO_ID:
        raise ValueError(
            "--coordination: give the job a name of its own with --rdzv-id, on all hosts the same"
        )
    if place is not None and not args.slurm:
        _take_place(args, place, hosts)
    name, port = min(endpoints_of(args.coordination)[0])
    args.rdzv_backend, args.rdzv_endpoint = (
        COORDINATED,
        f"[{name}]:{port}" if ":" in name else f"{name}:{port}",
    )


def _needs_another_port(args: argparse.Namespace) -> bool:
    """Return whether another job on this host has, or is about to have, the port that is taken by itself."""
    alone = _hosts_of(args.nnodes)[1] == 1
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
    if not _waits_for_a_loss(args):
        _take_place(args, args.node_rank, hosts)
    args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    args.rdzv_backend = "c10d"
    has_store = f"is_host={'true' if args.node_rank == 0 and not _waits_for_a_loss(args) else 'false'}"
    args.rdzv_conf = f"{args.rdzv_conf},{has_store}" if args.rdzv_conf else has_store


def _given_place(args: argparse.Namespace) -> int | None:
    """Return the place that the command gives to this host; for torch, see to torchrun's default."""
    place: int | None = args.node_rank
    if place is None:
        args.node_rank = int(os.environ.get("PET_NODE_RANK", "0"))
    return place


def _take_place(args: argparse.Namespace, place: int, hosts: int) -> None:
    if not 0 <= place < hosts:
        raise ValueError(f"--node-rank {place}: with --nnodes {hosts} it is from 0 to {hosts - 1}")
    args.fixed_place = place


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


def _memory(args: argparse.Namespace) -> Wanted | None:
    """Return what is wanted of the memory tier, or that the script may say it; None if it is off."""
    wanted = args.memory_tier or Wanted(memory_wanted.BY_SCRIPT)
    if wanted.mode == memory_wanted.OFF or args.mode == "transparent":
        return None
    return replace(
        wanted,
        every=args.memory_every,
        limit=None if args.memory_limit is None else args.memory_limit << 20,
        keep=wanted.keep if args.memory_keep is None else args.memory_keep,
        domains=args.own_domains,
        domains_by=args.domains_by,
        address=args.memory_interface or "",
        directory=args.memory_spill,
    )
