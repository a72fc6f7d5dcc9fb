"""`jitckpt suspend`: a running job gives its devices and memory back."""

from pathlib import Path

from jitckpt.cli.parser import Parser
from jitckpt.system.job_socket import ask
from jitckpt.wire.commands import Suspend, ToLauncher


def main(arguments: list[str]) -> int:
    """Return 0 once the job is suspended, 1 if it runs on. Raises JobSocketError if there is none."""
    parser = Parser(
        prog="jitckpt suspend",
        description="Have a job of `jitckpt run --mode transparent --suspendable` give its devices and "
        "memory back: its processes become files. The launcher stays. `jitckpt resume` has the job go on.",
    )
    parser.add_argument("job", type=Path, metavar="DIR", help="the job's checkpoint directory")
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="where the files go (default: the job's directory)"
    )
    parsed = parser.parse_args(arguments)
    return told(parsed.job, Suspend("" if parsed.to is None else str(parsed.to.absolute())))


def told(job: Path, wanted: ToLauncher) -> int:
    """Ask the job's launcher, print what it says, and return the status. Raises JobSocketError."""
    status = 1
    for text, ends in ask(job, wanted):
        print(f"{text[:1].upper()}{text[1:]}", flush=True)
        status = status if ends is None else ends
    return status
