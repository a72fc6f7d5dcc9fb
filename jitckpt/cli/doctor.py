"""`jitckpt doctor`: names the script's frameworks at once; the table comes when torch is imported."""

from importlib import import_module

from jitckpt.cli.script import script_of
from jitckpt.console import say
from jitckpt.doctor import imports


def main(arguments: list[str]) -> int:
    """Name the frameworks, and print the table; return its exit status."""
    script = arguments[arguments.index("--") :] if "--" in arguments else []
    if told := imports.sentence(script_of(script)):
        say(told)
    status: int = import_module("jitckpt.cli.doctor_table").main(arguments)
    return status
