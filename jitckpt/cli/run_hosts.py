"""Where the hosts of `jitckpt run` meet, and which place this one has: from the options and the cluster.

What does not go together is refused by ValueError, with a sentence.
"""

import argparse
import errno
import math
import os
import socket
from dataclasses import replace

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from jitckpt.cli.run_options import DEFAULT_WAIT, LOOPBACK
from jitckpt.clusters import kubernetes, slurm, slurm_spares
from jitckpt.console import say
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import domains_of
from jitckpt.errors import HostsError, HostsMissing
from jitckpt.hosts.coordination import CoordinationError, ServiceRefuses
from jitckpt.hosts.etcd import Etcd, endpoints_of
from jitckpt.hosts.meeting_entries import meeting_of
from jitckpt.hosts.rendezvous import own_address, wait_for_name

NO_MASTER = "127.0.0.1"  # torch's, where --master-addr is not given
NO_HOSTS, NO_RANKS = "1:1", "1"  # where --nnodes, --nproc-per-node are not given
NO_ID = "none"  # where --rdzv-id is not given
COORDINATED = "jitckpt"  # the name of its rendezvous in torch's registry
MASTER_PORT = 29500  # where --master-port is not given
# Of two jobs that begin at one time both would find the port free. So who takes it has this name, in the
# network namespace that the port is of, as long as the process lives.
PORT_CLAIM = f"\0jitckpt port {MASTER_PORT}"
_claims: list[socket.socket] = []


def settle_hosts(args: argparse.Namespace) -> None:
    """Fill in where the hosts meet, and which place this one has."""
    args.fixed_place, args.spared, place = None, None, _given_place(args)
    if args.spare_for is not None and not args.slurm:
        raise ValueError("--spare-for goes with --slurm")
    if args.wait is not None and args.min_hosts is None:
        raise ValueError("--wait goes with --min-hosts")
    args.slurm = args.slurm or is_found_in_slurm(args)
    if args.slurm:
        make_slurm(args)
    least, most = hosts_of(args.nnodes)
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
    if args.rdzv_backend == "static" and (args.rdzv_endpoint or args.master_addr is not None):
        _make_dynamic(args, most)
    if args.rdzv_backend not in ("c10d", COORDINATED) or not args.rdzv_endpoint:
        raise ValueError(
            f"--nnodes {args.nnodes} needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, or "
            "--master-addr HOST and --node-rank" + _loopback_of_environment()
        )
    if args.min_hosts is not None:
        _make_elastic(args, most)
    if args.local_addr is None:
        args.local_addr = _address_towards_others(args)


def waits_for_a_loss(args: argparse.Namespace) -> bool:
    """Return whether this host is to have the place of one that is lost, and none before."""
    return bool(args.standby) and args.broken_device != "move"


def has_several_hosts(args: argparse.Namespace) -> bool:
    return not args.standalone and hosts_of(args.nnodes)[1] > 1


def own_domains(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
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


def hosts_of(nnodes: str) -> tuple[int, int]:
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


def is_found_in_slurm(args: argparse.Namespace) -> bool:
    """Return whether Slurm has started several hosts, and nobody has said where they meet; then say so."""
    is_said = args.rdzv_endpoint or args.master_addr is not None or args.rdzv_id != NO_ID or args.standalone
    if is_said or args.standby or args.nnodes == "1" or not slurm.is_one_of_several(os.environ):
        return False
    say("this is one of several nodes of a Slurm step: they meet as with --slurm (alone: --standalone).")
    return True


def make_slurm(args: argparse.Namespace) -> None:
    """Fill in what Slurm knows: hosts, this one's place, where they meet, and as which job."""
    if args.rdzv_endpoint or args.master_addr is not None or args.standalone:
        raise ValueError("--slurm says where the hosts meet: no --rdzv-endpoint, --master-addr, --standalone")
    if args.standby:
        raise ValueError("--standby: with --slurm the nodes beyond --nnodes stand by; --spare-for has more")
    step = slurm.step_of(os.environ)
    if args.nnodes == NO_HOSTS and args.spare_for is None:
        args.nnodes = str(step.nodes)
    hosts = hosts_of(args.nnodes)[1]
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
    if args.rdzv_endpoint or args.master_addr is not None:
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


def coordination_of(args: argparse.Namespace, timeout: float) -> Etcd | None:
    """Return the service by which the hosts meet, if any; say so where it is not there yet.

    timeout: for how many seconds it is then waited for.
    Raises HostsError where it never takes this host. In a pod that is HostsMissing: what it shows comes from
    a Secret, which may have changed since the job began, and status 2 would end all other pods, too.
    """
    if args.coordination is None:
        return None
    try:
        service = Etcd(args.coordination, os.environ, args.host_timeout)
        service.check(meeting_of(args.rdzv_id))
    except ServiceRefuses as error:
        kind = HostsMissing if kubernetes.in_pod(os.environ) else HostsError
        raise kind(f"--coordination: {error}.") from error
    except CoordinationError as error:
        say(f"{error}. It is waited for at most {timeout:g} s.")
        service.silence = str(error)
    return service


def needs_another_port(args: argparse.Namespace) -> bool:
    """Return whether another job on this host has, or is about to have, the port that is taken by itself."""
    alone = hosts_of(args.nnodes)[1] == 1
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
    if not waits_for_a_loss(args):
        _take_place(args, args.node_rank, hosts)
    args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    args.rdzv_backend = "c10d"
    has_store = f"is_host={'true' if args.node_rank == 0 and not waits_for_a_loss(args) else 'false'}"
    args.rdzv_conf = f"{args.rdzv_conf},{has_store}" if args.rdzv_conf else has_store


def _loopback_of_environment() -> str:
    address = os.environ.get("PET_MASTER_ADDR", "")
    return f" (PET_MASTER_ADDR={address} is each host itself)" if address in LOOPBACK else ""


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
