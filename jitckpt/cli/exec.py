"""`jitckpt exec`: become another command, with softgpu or CUDA as its device."""

import argparse
import os

from jitckpt.cli.parser import Parser
from jitckpt.device import KINDS, LIBRARY_DIR, check_libraries, choose_device, device_environment

# As many as softgpu itself has if nobody says how many.
DEFAULT_DEVICES = 2


def main(arguments: list[str]) -> int:
    """Replace this process by the command. Raises DeviceError if its device can't be given."""
    parser = Parser(
        prog="jitckpt exec",
        usage="jitckpt exec [--device KIND] [--devices N] [--proxy] [--] command ...",
        description="Run any command with softgpu or CUDA as its device.",
    )
    add_device_argument(parser)
    parser.add_argument(
        "--devices",
        type=positive_number,
        default=DEFAULT_DEVICES,
        help="number of softgpu devices (default 2)",
    )
    parser.add_argument(
        "--proxy",
        action="store_true",
        help="each process gets its device through a server process of its own (docs/how-it-works/proxy.md)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    parsed = parser.parse_args(arguments)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        parser.error("there is no command to run")
    kind = choose_device(parsed.device, os.environ)
    check_libraries(kind, LIBRARY_DIR, proxy=parsed.proxy)
    environment = os.environ | device_environment(
        kind, parsed.devices, LIBRARY_DIR, os.environ, proxy=parsed.proxy
    )
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        parser.error(f"{command[0]} can't be run: {error.strerror}")


def add_device_argument(parser: argparse._ActionsContainer) -> None:
    """Add --device."""
    parser.add_argument(
        "--device",
        choices=KINDS,
        default="auto",
        help="softgpu: a CUDA device without a GPU; cuda: NVIDIA's; auto (default): cuda if a driver answers",
    )


def positive_number(text: str) -> int:
    """Return the whole number of at least 1 that `text` is; for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
