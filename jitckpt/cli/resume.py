"""`jitckpt resume`: a suspended job goes on where it was."""

from pathlib import Path

from jitckpt.cli.parser import Parser
from jitckpt.cli.suspend import told
from jitckpt.wire.commands import ResumeJob


def main(arguments: list[str]) -> int:
    """Have the job go on; return 0 once all ranks run, 1 if they don't. Raises JobSocketError."""
    parser = Parser(
        prog="jitckpt resume",
        description="Have a job go on that `jitckpt suspend` has suspended. Its devices have to be free.",
    )
    parser.add_argument("job", type=Path, metavar="DIR", help="the job's checkpoint directory")
    return told(parser.parse_args(arguments).job, ResumeJob())
