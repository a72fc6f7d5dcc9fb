"""`jitckpt run`: torchrun's flags and ours, checked; then the job, and what it cost in plain words."""

import argparse
import atexit
import errno
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
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.agent.agent import launch
from jitckpt.agent.migration import lost_job
from jitckpt.agent.migration.suspended_job import Meets, SuspendedJob
from jitckpt.agent.object_copies import WantedObjects
from jitckpt.agent.settings import Settings
from jitckpt.agent.standby import stand_by
from jitckpt.bindings import clock, criu, own_numbers, softgpu
from jitckpt.bindings.criu import Criu, CriuError
from jitckpt.cli.run_checks import check_config, check_options, may_have_memory_tier
from jitckpt.cli.run_hosts import coordination_of, has_several_hosts, waits_for_a_loss
from jitckpt.cli.run_options import DEFAULT_HANG_TIMEOUT, HANG_FLOOR, run_parser
from jitckpt.clusters import kubeflow, slurm, slurm_spares
from jitckpt.console import said_aside, say
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.limits import Limits, conflicts
from jitckpt.decisions.memory_wanted import Wanted
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
)
from jitckpt.hosts.limited_calls import has_calls_out
from jitckpt.hosts.rendezvous import join_timeout
from jitckpt.reports.timeline import in_words
from jitckpt.saves import directory_lock
from jitckpt.saves.start_record import note_finished
from jitckpt.system.door import NO_ROOM
from jitckpt.system.launcher_folder import launcher_folder
from jitckpt.system.nameless_user import give_name
from jitckpt.system.own_outputs import outputs_of_own
from jitckpt.system.signals import end_in_order
from jitckpt.web.beside import served, traced
from jitckpt.wire import environment
from jitckpt.wire.exit_statuses import HOSTS_MISSING, NO_PROGRESS, SAVED
from jitckpt.worker.in_place.deterministic import CUBLAS
from jitckpt.worker.in_place.keeper import WITHOUT_INIT
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)

CLOCK_LIBRARY = LIBRARY_DIR / clock.LIBRARY
SAVES = ("saved", "memory_written")  # events

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
        except HostUnfit:  # as a new host, which is taken when its check passes, or goes on from what it has
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
    if args.snapshot_every is not None and not has_several_hosts(args):  # each has a folder of its own
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
    with (
        outputs_of_own(_moves(args)),
        _log_dir(args) as temporary,
        _fault_folder(transparent and bool(args.fault)) as fault_folder,
    ):
        try:
            check_options(args, kind)
            config, command, command_arguments = torchrun.config_from_args(args)
            check_config(args, config)
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
    """Return the agent's settings. arguments: this command's. told: to the ranks.

    Raises CriuError, HostsError.
    """
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
        move_wait=args.move_wait or 0.0,
        suspendable=args.suspendable,
        snapshot_every=None if args.snapshot_every is None else 60 * args.snapshot_every,
        snapshot_copies=args.snapshot_copies,
        from_snapshot=args.from_snapshot,
        command=command_of(arguments, args),
        criu=_criu(args) if _moves(args) else None,
        health_check=args.health_check,
        report_host=args.report_host,
        host_name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        max_standby=args.max_standby,
        is_spare=args.spared is not None or waits_for_a_loss(args),
        stands_by=args.standby and not waits_for_a_loss(args),
        temporary=temporary,
        domains=args.own_domains if args.snapshot_copies else (),
        domains_by=args.domains_by if args.snapshot_copies else "",
        memory=_memory(args),
        coordination=coordination_of(args, join_timeout(config)),
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
    if args.validate == "deterministic":
        variables |= environment.VALIDATE_DETERMINISTIC.to(True)
        variables |= {name: os.environ.get(name, value) for name, value in CUBLAS.items()}
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


def command_of(arguments: Sequence[str], args: argparse.Namespace) -> SuspendedJob:
    """Return the command by which a suspended job goes on."""
    script = [args.training_script, *args.training_script_args]
    meets: Meets = "nobody"
    if has_several_hosts(args):
        meets = "c10d" if args.fixed_place is None else "place"
        meets = "slurm" if args.slurm else "etcd" if args.coordination is not None else meets
    return SuspendedJob(list(arguments[: len(arguments) - len(script)]), script, os.getcwd(), meets)


def _memory(args: argparse.Namespace) -> Wanted | None:
    """Return what is wanted of the memory tier, or that the script may say it; None if it is off."""
    wanted = args.memory_tier or Wanted(memory_wanted.BY_SCRIPT)
    if wanted.mode == memory_wanted.OFF or not may_have_memory_tier(args):
        return None
    return replace(
        wanted,
        every=args.memory_every,
        limit=None if args.memory_limit is None else args.memory_limit << 20,
        keep=wanted.keep if args.memory_keep is None else args.memory_keep,
        domains=args.own_domains,
        domains_by=args.domains_by,
        address=args.memory_interface or "",
        directory=args.memory_spill or "",
    )
