"""What `jitckpt run` refuses, by ValueError with a sentence, before anything is started."""

import argparse
import importlib.util
import math
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig

from jitckpt.cli.exec import DEFAULT_DEVICES
from jitckpt.cli.run_hosts import (
    NO_MASTER,
    has_several_hosts,
    hosts_of,
    needs_another_port,
    own_domains,
    settle_hosts,
)
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.decisions.redundancy import groups
from jitckpt.faults.injection import DEVICE_KINDS, DRIVER_SUSPECT, LASTING_KINDS, PROXY_KINDS
from jitckpt.hosts.rendezvous import join_timeout

LONGEST_NAME = 200  # bytes of a job's name: torch makes a folder of it and a few letters


def check_options(args: argparse.Namespace, kind: str) -> None:
    """Refuse, by ValueError, what torch would find out too late; fill in what depends on the device."""
    _check_job_name(args.rdzv_id)
    settle_hosts(args)
    args.master_addr = args.master_addr or NO_MASTER  # for torch, which has it so
    args.own_domains, args.domains_by = own_domains(args)
    check_modes(args)
    _check_ports(args)
    check_values(args, kind)
    if args.nproc_per_node in ("gpu", "auto") and kind == "softgpu":
        args.nproc_per_node = os.environ.get("SOFTGPU_DEVICES", str(DEFAULT_DEVICES))
    if args.standalone or needs_another_port(args):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", f"{NO_MASTER}:0", str(uuid.uuid4())
    _check_script(args)


def check_values(args: argparse.Namespace, kind: str) -> None:
    """Refuse, by ValueError, what is wrong on any host. kind: of the device, auto while it is unknown."""
    if args.state_on_device and args.mode != "transparent":
        raise ValueError("--state-on-device: only --mode transparent keeps copies of the device's memory")
    if args.monitor_interval <= 0:
        raise ValueError("--monitor-interval must be more than 0 seconds")
    for name in args.signals_to_handle.split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ValueError(f"--signals-to-handle: there is no signal {name.strip()!r}")
    for fault in args.fault:
        if fault.kind in (*DEVICE_KINDS, *LASTING_KINDS, DRIVER_SUSPECT) and kind == "cuda":
            raise ValueError(f"--fault '{fault}': only softgpu fails on order (--device softgpu)")
        if fault.kind in (*PROXY_KINDS, *LASTING_KINDS) and args.mode != "transparent":
            raise ValueError(f"--fault '{fault}': only --mode transparent has a server that it could befall")


def _check_job_name(name: str) -> None:
    """It is part of the name of a folder, and of keys in etcd, where / stands behind it."""
    if not name.isprintable() or "/" in name or not 0 < len(name.encode()) <= LONGEST_NAME:
        raise ValueError(
            f"--rdzv-id {name!r}: the name of a job has no / and no control characters, and is up to "
            f"{LONGEST_NAME} bytes long"
        )


def _check_ports(args: argparse.Namespace) -> None:
    if args.page is not None and args.metrics is not None and args.page[1] == args.metrics[1] != 0:
        raise ValueError(f"--page and --metrics have one port, {args.page[1]}; give each its own")


def check_modes(args: argparse.Namespace) -> None:
    """Refuse what is for another mode of protection."""
    _check_memory_tier(args)
    for name in ("every", "limit", "keep"):
        if getattr(args, f"memory_{name}") is not None and args.memory_tier is None:
            raise ValueError(
                f"--memory-{name} goes with --memory-tier; where the script asks for the tier, it says "
                f"this, too: jitckpt.init(memory={{'tier': 'auto', '{name}': ...}})"
            )
    if args.objects is not None and args.checkpoint_dir is None:
        raise ValueError("--objects needs --checkpoint-dir, which is what it copies")
    if args.broken_device != "restart" and args.mode != "transparent":
        raise ValueError(
            f"--broken-device {args.broken_device}: only --mode transparent goes on without a restart"
        )
    if args.move_wait is not None and (args.broken_device != "move" or not has_several_hosts(args)):
        raise ValueError("--move-wait goes with --broken-device move, on several hosts")
    _check_held(args)
    if args.standby:
        _check_standby(args)


def may_have_memory_tier(args: argparse.Namespace) -> bool:
    """Return whether no process is to be written down, which with that memory can't be made anew."""
    held = args.suspendable or args.snapshot_every is not None
    return not held and args.broken_device != "move"


def _check_memory_tier(args: argparse.Namespace) -> None:
    wanted = args.memory_tier
    if wanted is None or wanted.mode == memory_wanted.OFF:
        return
    if not may_have_memory_tier(args):
        raise ValueError(
            "--memory-tier: not with --suspendable, --snapshot-every and --broken-device move, by which "
            "processes are made anew: they would lack the memory that their devices write to"
        )
    most = 1 if args.standalone else hosts_of(args.nnodes)[1]
    if wanted.mode == memory_wanted.PARITY:
        try:
            groups(most, wanted.copies, wanted.beside)
        except InvalidInput as error:
            raise ValueError(f"--memory-tier parity: {error}") from error
    elif wanted.copies > max(most, Wanted(memory_wanted.PEER).copies):
        raise ValueError(
            f"--memory-tier peer={wanted.copies}: each copy is on another host, and there "
            f"{'are' if most > 1 else 'is'} {most} (--nnodes)"
        )
    if args.memory_spill and (wanted.mode == memory_wanted.PARITY or wanted.sharded):
        raise ValueError(
            "--memory-spill: not with parity or sharded, of which nothing goes in parts to other hosts"
        )
    if wanted.optimizer and args.memory_every not in (None, 1):
        raise ValueError(
            "--memory-every: with --memory-tier peer+optimizer it is 1, since other hosts need the gradients "
            "of each step; with --memory-tier peer it may be more"
        )


def _check_standby(args: argparse.Namespace) -> None:
    """A host stands by for one that is lost, or with --broken-device move for one with broken devices."""
    if not has_several_hosts(args):
        raise ValueError("--standby: a job on one host has no other (--nnodes)")
    if args.broken_device == "move" and args.secret_file is None:
        raise ValueError(
            "--standby: with --broken-device move it needs --secret-file FILE, the same on all hosts: else "
            "whoever reaches the rendezvous' store could have processes of his own made here"
        )


def _check_held(args: argparse.Namespace) -> None:
    """Refuse to have all ranks wait behind a step where they can't."""
    _check_copies(args)
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
    if has_several_hosts(args) and args.broken_device != "restart":
        raise ValueError(f"{option}: on several hosts not yet with --broken-device")
    if args.checkpoint_dir is None:
        raise ValueError(f"{option} needs --checkpoint-dir, {directory}")
    if shutil.which("nsenter") is None:
        raise ValueError(f"{option} needs nsenter, of the package util-linux")
    if args.snapshot_every is None and has_several_hosts(args):
        args.snapshot_every = math.inf  # the job is suspended by a snapshot, and there is no other
    if args.from_snapshot and args.snapshot_every is None:
        raise ValueError("--from-snapshot: the launcher of a suspended job on one host stays")


def _check_copies(args: argparse.Namespace) -> None:
    """Refuse copies of snapshots of which there are none, or on more hosts than there are."""
    if not args.snapshot_copies:
        return
    if args.snapshot_every is None:
        raise ValueError("--snapshot-copies goes with --snapshot-every, whose snapshots are copied")
    most = 1 if args.standalone else hosts_of(args.nnodes)[1]
    if args.snapshot_copies >= most:
        raise ValueError(
            f"--snapshot-copies {args.snapshot_copies}: of {most} host{'s' if most > 1 else ''} "
            f"{most - 1} can have a copy of another one's part"
        )


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


def check_config(args: argparse.Namespace, config: LaunchConfig, *, are_alike: bool = False) -> None:
    """are_alike: all hosts have as many ranks. Else one does not know which ranks the others have."""
    if config.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node must be at least 1, not {config.nproc_per_node}")
    _check_join_timeout(config)
    for fault in args.fault if are_alike or config.max_nodes == 1 else ():
        ranks = config.nproc_per_node * config.max_nodes
        if max(fault.rank, fault.peer or 0) >= ranks:
            raise ValueError(f"--fault '{fault}': the ranks are 0 to {ranks - 1}")


def _check_join_timeout(config: LaunchConfig) -> None:
    try:
        seconds = join_timeout(config)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        text = config.rdzv_configs["join_timeout"]
        raise ValueError(f"--rdzv-conf join_timeout={text}: it is a number of seconds above 0")
