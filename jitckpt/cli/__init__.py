"""The command `jitckpt`; each subcommand is a module that is loaded only when it is used."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module, metadata

from jitckpt.cli.parser import Parser, did_you_mean
from jitckpt.console import say
from jitckpt.errors import JitckptError

GROUPS = {
    "Run a training": {
        "run": "run a training as torchrun does, and save its state just in time when a rank fails",
        "exec": "run any command with softgpu or CUDA as its device, without the launcher",
        "kubernetes": "print the manifests by which a training runs on a Kubernetes cluster",
        "lib": "print the library to preload where another launcher is used",
    },
    "Look at it": {
        "watch": "show a job while it runs: its ranks, what protects it, its recoveries",
        "timeline": "show what happened to a job and what it cost",
        "inspect": "show what is saved in a checkpoint directory, and what a restart would take",
        "export": "turn a save into torch.distributed.checkpoint's format, or into safetensors",
        "steps": "say what is seen of a script's optimizer steps, with no word of the script about it",
    },
    "Share the devices": {
        "suspend": "have a running job give its devices and memory back (jitckpt run --suspendable)",
        "resume": "have a suspended job go on where it was",
        "migrate": "suspend a job, and see it go on on other hosts, where `jitckpt resume --wait` waits",
    },
    "Rehearse": {
        "doctor": "before a long run: look for what would hurt later",
        "verify": "prove that a training comes back bit for bit from random failures",
        "chaos": "order a fault from a running process whose device is softgpu",
    },
    "Plan": {
        "plan": "compare the ways to protect a job on a cluster, and recommend one",
        "simulate": "play a job through failures, and say where its time went",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status. 2: it was called wrongly, and nothing was started."""
    _open_standard_streams()
    parser = Parser(
        prog="jitckpt",
        usage="jitckpt [--version] COMMAND ...",
        description="Fault tolerance for distributed PyTorch training.",
        epilog="\n\n".join(
            f"{title}:\n" + "\n".join(f"  {name:12}{what}" for name, what in group.items())
            for title, group in GROUPS.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jitckpt {metadata.version('jitckpt')}")
    parser.add_argument("command", nargs="?", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `jitckpt COMMAND --help`")
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    if parsed.command not in COMMANDS:
        parser.error(f"there is no command {parsed.command}{did_you_mean(parsed.command, COMMANDS)}")
    try:
        command: Callable[[list[str]], int] = import_module(f"jitckpt.cli.{parsed.command}").main
    except OSError as error:
        say(f"`jitckpt {parsed.command}` can't be loaded, so nothing was started: {error}")
        return 1
    try:
        status = command(parsed.arguments)
        sys.stdout.flush()
        return status
    except JitckptError as error:
        print(f"jitckpt {parsed.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if parsed.command == "run" or not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return 1


def _reader_is_gone() -> bool:
    """Return whether nobody reads what is printed any more (`jitckpt plan ... | head`)."""
    stdout = select.poll()
    stdout.register(sys.stdout.fileno(), 0)  # errors and hang-ups are told in any case
    return bool(stdout.poll(0))


def _open_standard_streams() -> None:
    """Open those that this process was started without (`2>&-`), before a socket gets their number."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
