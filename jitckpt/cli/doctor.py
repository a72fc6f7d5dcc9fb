"""`jitckpt doctor`: names the script's frameworks at once; the table comes when torch is imported."""

from importlib import import_module

from jitckpt.cli.script import script_of
from jitckpt.console import say
from jitckpt.doctor import imports


def main(arguments: list[str]) -> int:
    """Name the frameworks, and print the table; return its exit status."""
    if told := imports.sentence(script_of(_script(arguments))):
        say(told)
    status: int = import_module("jitckpt.cli.doctor_table").main(arguments)
    return status


def _script(arguments: list[str]) -> list[str]:
    """Return the script with its arguments; argparse has taken the `--` where no option stands before it."""
    if "--" in arguments:
        return arguments[arguments.index("--") :]
    return [] if arguments[:1] and arguments[0].startswith("-") else arguments
