"""`jitckpt lib`: print the path of the library to preload, for LD_PRELOAD=$(jitckpt lib) torchrun ..."""

from jitckpt.cli.parser import Parser
from jitckpt.device import LIBRARY_DIR, check_libraries


def main(arguments: list[str]) -> int:
    """Print the path. Raises DeviceError if the library is not there."""
    Parser(prog="jitckpt lib", description=__doc__).parse_args(arguments)
    check_libraries("cuda", LIBRARY_DIR)
    print(LIBRARY_DIR / "libjitckpt.so")
    return 0
