"""A warm spare: a Python that has loaded torch, jitckpt and what the training imported, before it is needed.

It is run as a program by the agent. Arguments: the file descriptor of a socket to the agent, and the folder
that Python would put first on sys.path for the training. When its order comes it becomes a worker; when the
agent dies, or needs it no more, the socket ends, and so does the spare.
"""

import array
import contextlib
import importlib
import json
import os
import runpy
import socket
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_BYTES = 128 * 1024
MODULES_IN_A_MESSAGE = 500


@dataclass(frozen=True)
class Order:
    """Become this worker.

    environment: variables to set, and those with None to remove. arguments: of Python, such as
    ["-u", "train.py", "--steps", "7"]. The file descriptors that come with it are named in `descriptors`.
    """

    environment: dict[str, str | None]
    arguments: list[str]
    descriptors: list[str]


def encode_order(order: Order) -> bytes:
    """Return the order as one message. Raises ValueError if it is too long to be sent."""
    data = json.dumps(asdict(order)).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"an order of {len(data)} bytes can't be sent to a spare; at most {MAX_BYTES} can")
    return data


def import_messages(modules: Sequence[str]) -> Iterator[bytes]:
    """Yield the messages that have a spare import these modules."""
    for begin in range(0, len(modules), MODULES_IN_A_MESSAGE):
        yield json.dumps({"import": modules[begin : begin + MODULES_IN_A_MESSAGE]}).encode()


def can_become(command: Sequence[str]) -> bool:
    """Return whether a spare can take the place of this command: `python -u` with a script or a module."""
    return (
        len(command) > 2
        and command[0] == sys.executable
        and command[1] == "-u"
        and (not command[2].startswith("-") or (command[2] == "-m" and len(command) > 3))
    )


def first_on_path(command: Sequence[str]) -> str:
    """Return what `command`, for which `can_become` holds, would have first on sys.path."""
    return os.getcwd() if command[2] == "-m" else os.path.dirname(os.path.realpath(command[2]))


def importable_modules(loaded: Mapping[str, Any]) -> list[str]:
    """Return the names of the loaded modules that are installed, in the order of their loading.

    Not those beside the training's script: they are the user's own, and may do anything when imported.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple({os.path.join(sysconfig.get_path(name), "") for name in names})
    return [
        name
        for name, module in loaded.items()
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(installed)
    ]


def changed_environment(now: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that were set after it began."""
    with open("/proc/self/environ", "rb") as file:
        begun = {os.fsdecode(entry) for entry in file.read().split(b"\0")}
    return {name: value for name, value in now.items() if f"{name}={value}" not in begun}


def main() -> None:
    """Wait for the order, then be the worker."""
    control = socket.socket(fileno=int(sys.argv[1]))
    if not sys.flags.safe_path:
        sys.path[0] = sys.argv[2]
    _import(("torch.nn.parallel", "torch.distributed", "torch.optim", "jitckpt.job"))
    order, descriptors = _await_order(control)
    control.close()
    _become(order, descriptors)


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        # What can't be imported here the training imports itself, or fails to; nothing is lost but time.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _await_order(control: socket.socket) -> tuple[Order, list[int]]:
    size = array.array("i").itemsize
    while True:
        data, ancillary, _, _ = control.recvmsg(MAX_BYTES, socket.CMSG_SPACE(8 * size))
        if not data:
            sys.exit(0)
        message = json.loads(data)
        if "import" in message:
            _import(message["import"])
            continue
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        return Order(**message), list(descriptors)


def _become(order: Order, descriptors: list[int]) -> None:
    for name, value in order.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name, descriptor in zip(order.descriptors, descriptors, strict=True):
        if name in ("1", "2"):
            os.dup2(descriptor, int(name))
            os.close(descriptor)
        else:
            os.environ[name] = str(descriptor)
    _, *rest = order.arguments  # -u: as this process runs already
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
