"""The command `jitckpt`; each subcommand is a module that is loaded only when it is used."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata

from jitckpt.errors import JitckptError

COMMANDS = {
    "run": "run a training as torchrun does, and save its state just in time when a rank fails",
    "exec": "run any command with softgpu or CUDA as its device, without the launcher",
    "chaos": "order a fault from a running process whose device is softgpu",
    "lib": "print the library to preload where another launcher is used",
    "inspect": "show what is saved in a checkpoint directory, and what a restart would take",
    "timeline": "show what happened to a job and what it cost",
    "doctor": "before a long run: look for what would hurt later",
    "verify": "prove that a training comes back bit for bit from random failures",
    "steps": "say what is seen of a script's optimizer steps, with no word of the script about it",
    "plan": "compare the ways to protect a job on a cluster, and recommend one",
    "simulate": "play a job through failures, and say where its time went",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status. 2: it was called wrongly, and nothing was started."""
    parser = argparse.ArgumentParser(
        prog="jitckpt",
        description="Fault tolerance for distributed PyTorch training.",
        epilog="\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jitckpt {metadata.version('jitckpt')}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `jitckpt COMMAND --help`")
    parsed = parser.parse_args(arguments)
    command: Callable[[list[str]], int] = import_module(f"jitckpt.cli.{parsed.command}").main
    try:
        return command(parsed.arguments)
    except JitckptError as error:
        print(f"jitckpt {parsed.command}: {error}", file=sys.stderr)
        return 2
