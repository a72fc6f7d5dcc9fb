"""`jitckpt kubernetes`: print the manifests by which a training runs on a Kubernetes cluster."""

import argparse
import math
import os
import re
import shlex
import string
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch.distributed import run as torchrun

from jitckpt.cli.parser import Parser
from jitckpt.cli.run_checks import check_config, check_modes, check_values
from jitckpt.cli.run_hosts import settle_hosts
from jitckpt.cli.run_options import RunParser, run_parser
from jitckpt.clusters import kubernetes
from jitckpt.clusters.kubernetes import EtcdSecrets, JobToRun, Manifest
from jitckpt.decisions import memory_wanted
from jitckpt.errors import JitckptError

KINDS: dict[str, Callable[[JobToRun], list[Manifest]]] = {
    "jobset": partial(kubernetes.job_set, in_place=False),
    "job": kubernetes.job,
    "trainjob": kubernetes.train_job,
    "pytorchjob": kubernetes.pytorch_job,
}
PLACES = ("trainjob", "pytorchjob")  # where the operator says who each host is
# The command says these, so nobody else may.
SAID_HERE = {
    "nnodes": "--nodes",
    "nproc_per_node": "--gpus",
    "checkpoint_dir": "--claim",
    "secret_file": "--secret",
    "metrics": "port 9400",
    "rdzv_backend": "the name of the first pod",
    "rdzv_endpoint": "the name of the first pod",
    "rdzv_id": "--name",
    "master_addr": "the name of the first pod",
    "master_port": "port 29500",
    "node_rank": "the number of the pod",
    "local_addr": "the pod",
    "standalone": "--nodes",
    "slurm": "Kubernetes",
    "spare_for": "Kubernetes",
    "standby": "--standby N",
}
# Of files and interfaces that need not be on this machine.
OF_THE_POD = ("failure_domains", "memory_interface", "memory_spill", "secret_file")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # of which the names of pods are made
LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
OTHERS_NAME = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*")  # of what is there already
QUEUE_NAME = re.compile(rf"(?=.{{1,63}}\Z){LABEL}(\.{LABEL})*")  # which becomes a label
GIB = 1024  # MiB
# MiB beside the training itself: the launcher; for each rank a warm spare.
LAUNCHER, RANK = 1024, 512
LEEWAY = 30  # seconds, in which those that have saved end


def main(arguments: list[str]) -> int:
    """Print the manifests. Raises JitckptError where the library for YAML is missing."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # options of torchrun's on this machine; the pods have their own
    parser = _parser()
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args, rest = parser.parse_known_args(arguments[:split])
    run = arguments[split + 1 :]
    if rest or not run:
        unknown = f"unrecognized arguments: {' '.join(rest)}; " if rest else ""
        parser.error(
            f"{unknown}after `--` comes what `jitckpt run` is given: [options] script.py [its arguments]"
        )
    try:
        training = _training(args, run)
    except ValueError as error:
        parser.error(str(error))
    make = partial(kubernetes.job_set, in_place=True) if args.in_place_restart else KINDS[args.kind]
    try:
        import yaml
    except ImportError as error:
        raise JitckptError("manifests need a library: pip install 'jitckpt[kubernetes]'") from error

    class WithoutAliases(yaml.SafeDumper):
        """What two replicas have alike is written twice, for who reads it."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    made_by = shlex.join(["jitckpt", "kubernetes", *arguments])
    print("\n".join(f"# {line}" for line in f"Made by: {made_by}".splitlines()))
    print(yaml.dump_all(make(training), Dumper=WithoutAliases, sort_keys=False, width=100), end="")
    return 0


def _training(args: argparse.Namespace, run: list[str]) -> JobToRun:
    """Return what the flags say. Raises ValueError with a sentence where they contradict each other."""
    parser = _pod_parser()
    wanted = parser.parse_args(run)
    for name, place in SAID_HERE.items():
        if getattr(wanted, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is not for after `--`: {place} says it here")
    if args.kind in PLACES and (args.standby or wanted.coordination):
        raise ValueError(
            f"--kind {args.kind}: Kubeflow gives each host its place, so none stands by, and there is no "
            "--coordination; take --kind jobset or job"
        )
    if args.standby and args.nodes == 1:
        raise ValueError("--standby: a job on one host is not taken over by another; its pod is replaced")
    if wanted.max_standby is not None and wanted.max_standby < args.standby:
        raise ValueError(f"--max-standby {wanted.max_standby} is less than --standby {args.standby}")
    etcd = EtcdSecrets(args.etcd_ca, args.etcd_certificate, args.etcd_user)
    if etcd != EtcdSecrets() and wanted.coordination is None:
        raise ValueError(
            "--etcd-ca, --etcd-certificate and --etcd-user go with `-- --coordination etcd://...`"
        )
    _check_run(args, run, coordinated=wanted.coordination is not None)
    if args.in_place_restart and args.kind != "jobset":
        raise ValueError("--in-place-restart: only --kind jobset has it")
    has_tier = wanted.memory_tier is not None and wanted.memory_tier.mode != memory_wanted.OFF
    if has_tier and wanted.memory_limit is None:
        raise ValueError(
            "--memory-tier needs --memory-limit here: a pod that takes more than it has is killed"
        )
    beside = LAUNCHER + max(args.gpus, 1) * (RANK + wanted.staging)
    if args.gpus and wanted.device == "auto":
        run = ["--device", "cuda", *run]  # with a dead driver a pod is to end, not to train on softgpu
    seconds = wanted.save_deadline + (wanted.objects_deadline if wanted.objects is not None else 0)
    return JobToRun(
        name=args.name,
        image=args.image,
        nodes=args.nodes,
        standbys=args.standby,
        gpus=args.gpus,
        cpus=args.cpus,
        memory=(args.memory + args.shared_memory) * GIB + (wanted.memory_limit or 0) + beside,
        shared_memory=args.shared_memory * GIB,
        grace=math.ceil(seconds) + LEEWAY,
        claim=args.claim,
        secret=args.secret,
        queue=args.queue,
        etcd=etcd,
        coordinated=wanted.coordination is not None,
        run=tuple(run),
    )


def _check_run(args: argparse.Namespace, run: list[str], coordinated: bool) -> None:
    """Refuse by ValueError what `jitckpt run` would refuse in each pod, where it would end the job."""
    _check_pod(args, _pod_parser().parse_args(run))
    meeting = ["--rdzv-id", args.name]
    if not coordinated and args.nodes > 1:
        meeting += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first"]
    given = ["--nnodes", str(args.nodes), *meeting, "--local-addr", "pod"]
    in_pod = _pod_parser().parse_args([*given, "--checkpoint-dir", kubernetes.CHECKPOINTS, *run])
    settle_hosts(in_pod)
    check_modes(in_pod)
    check_values(in_pod, in_pod.device)
    in_pod.log_dir = os.devnull  # else a folder is made, and here
    try:
        config, _, _ = torchrun.config_from_args(in_pod)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    check_config(in_pod, replace(config, nproc_per_node=max(args.gpus, 1)), are_alike=True)


def _pod_parser() -> RunParser:
    """Return the parser of `jitckpt run`, which takes names of the pod's files and interfaces as they are."""
    parser = run_parser()
    for action in parser._actions:
        if action.dest in OF_THE_POD:
            action.type = str
    return parser


def _check_pod(args: argparse.Namespace, wanted: argparse.Namespace) -> None:
    """Refuse by ValueError what the pod has no port, rights or room for."""
    if wanted.page is not None and wanted.page[1] in (kubernetes.METRICS_PORT, kubernetes.PORT):
        raise ValueError(
            f"--page: in a pod {kubernetes.METRICS_PORT} is the metrics' port, and {kubernetes.PORT} "
            "where the hosts meet; give another one"
        )
    for option, is_wanted in (
        ("--broken-device move", wanted.broken_device == "move"),
        ("--suspendable", wanted.suspendable),
        ("--snapshot-every", wanted.snapshot_every is not None),
    ):
        if is_wanted:
            raise ValueError(f"{option} needs root and its capabilities (CRIU), which these pods don't have")
    if wanted.device == "cuda" and args.gpus == 0:
        raise ValueError("--gpus 0: there is none for --device cuda")
    for option, folder in (("--log-dir", wanted.log_dir), ("--memory-spill", wanted.memory_spill)):
        if folder and not f"{folder}/".startswith(kubernetes.WRITABLE):
            raise ValueError(
                f"{option} {folder}: a pod can write to {' and '.join(kubernetes.WRITABLE)} alone"
            )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jitckpt kubernetes",
        usage="jitckpt kubernetes [options] -- [options of jitckpt run] script.py [its arguments]",
        description="Print the manifests by which a training runs on a Kubernetes cluster, for kubectl apply "
        "-f -.",
    )
    parser.add_argument(
        "--kind",
        choices=sorted(KINDS),
        default="jobset",
        help="jobset (the default); job: of Kubernetes itself; trainjob: of Kubeflow Trainer 2; pytorchjob: "
        "of Kubeflow's older operator",
    )
    parser.add_argument("--name", type=_name, default="training", help="of the job (default training)")
    parser.add_argument(
        "--image", type=_image, required=True, help="with jitckpt and the script: docs/guides/containers"
    )
    parser.add_argument("--nodes", type=_count, required=True, metavar="N", help="hosts, a pod on each")
    parser.add_argument(
        "--standby", type=_amount, default=0, metavar="N", help="further hosts, for those that are lost"
    )
    parser.add_argument(
        "--gpus", type=_amount, required=True, metavar="N", help="of each host, a rank on each; 0: one rank"
    )
    parser.add_argument("--cpus", type=_count, metavar="N", help="that each host asks for")
    parser.add_argument(
        "--memory",
        type=_count,
        required=True,
        metavar="GIB",
        help="that the training takes on a host; what jitckpt and /dev/shm take comes on top",
    )
    parser.add_argument(
        "--shared-memory",
        type=_count,
        default=8,
        metavar="GIB",
        help="room in /dev/shm, for data loaders and NCCL (default 8; jitckpt itself needs none)",
    )
    _add_what_is_there(parser)
    parser.add_argument(
        "--in-place-restart",
        action="store_true",
        help="a host whose launcher fails starts again in the same pod (JobSet's feature gate "
        "InPlaceRestart, and Kubernetes 1.35)",
    )
    return parser


def _add_what_is_there(parser: argparse.ArgumentParser) -> None:
    """Of the cluster, before the job comes."""
    parser.add_argument(
        "--claim",
        type=_others_name,
        required=True,
        metavar="NAME",
        help="the PersistentVolumeClaim (ReadWriteMany) for the saves",
    )
    parser.add_argument(
        "--secret",
        type=_others_name,
        metavar="NAME",
        help="a Secret with the key `secret`, by which the hosts know each other",
    )
    parser.add_argument(
        "--etcd-ca",
        type=_others_name,
        metavar="NAME",
        help="with --coordination: a Secret with the key `ca.crt`, by which etcd's members are trusted",
    )
    parser.add_argument(
        "--etcd-certificate",
        type=_others_name,
        metavar="NAME",
        help="with --coordination: a Secret with the keys `tls.crt` and `tls.key` (kubernetes.io/tls), "
        "by which etcd trusts the hosts",
    )
    parser.add_argument(
        "--etcd-user",
        type=_others_name,
        metavar="NAME",
        help="with --coordination: a Secret with the keys `username` and `password` "
        "(kubernetes.io/basic-auth)",
    )
    parser.add_argument(
        "--queue", type=_others_name, metavar="NAME", help="of Kueue, where it admits the job"
    )


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a name has up to 40 small letters, digits and -, and begins with a letter"
        )
    return text


def _others_name(text: str) -> str:
    if not OTHERS_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a name in Kubernetes has small letters, digits, - and .")
    return text


def _image(text: str) -> str:
    if not text or set(text) & set(string.whitespace):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an image")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 100000")
    return int(text)
