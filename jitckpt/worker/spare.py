"""A warm spare: a Python that has loaded torch, jitckpt and what the training imported, before it is needed.

The agent runs one process a node, the template, as a program. Arguments: the file descriptor of a socket to
the agent, and the folder that Python would put first on sys.path for the training. The spares are forked from
it, so torch is loaded once for all of them and for those of later failures, and its memory is shared.

Each spare has a socket to the agent of its own. When its order comes it becomes a worker; when the agent dies
or needs it no more, the socket ends, and so does the spare. The same is true of the template.
"""

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jitckpt.console import say
from jitckpt.system import datagrams, installed, signals
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.spares import TO_SPARE, Become, Begins, Fork, Forked, Import, NotForked, Prepare, ToSpare
from jitckpt.worker import autoload

# Nothing is imported from the working folder, which Python would put first, nor from beside the script: files
# named like modules are the script's own affair.
PROGRAM = """
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from jitckpt.worker.spare import main
main()
"""
# What every training loads sooner or later: torch's optimizers import its compiler's front when first used.
MODULES = ("torch.nn.parallel", "torch.distributed", "torch.optim", "torch._dynamo", "jitckpt.worker.job")
MODULES_IN_A_MESSAGE = 500
MOST_DESCRIPTORS = 8  # that come with an order
ASKING_SECONDS = 60.0  # for the driver, when it is asked how many devices there are


def imports(modules: Sequence[str]) -> Iterator[Import]:
    """Yield the messages that have a spare import these modules."""
    for begin in range(0, len(modules), MODULES_IN_A_MESSAGE):
        yield Import([*modules[begin : begin + MODULES_IN_A_MESSAGE]])


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


def arguments_of(command: Sequence[str]) -> list[str]:
    """Return what `command`, for which `can_become` holds, has as sys.argv; of a module's file the name."""
    return [*command[3 if command[2] == "-m" else 2 :]]


def is_for_all(module: str) -> bool:
    """Return whether a template can import this module: others may start threads, which a fork would lose.

    So may torch's compiler, which starts processes that compile.
    """
    return module.startswith("torch.") and not module.startswith("torch._inductor")


def importable_modules(loaded: Mapping[str, Any]) -> list[str]:
    """Return the names of the loaded modules that are installed, in the order of their loading.

    Not those beside the training's script: they are the user's own, and may do anything when imported.
    """
    folders = installed.folders()
    return [
        name
        for name, module in loaded.items()
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(folders)
    ]


def changed_environment(now: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that were set after it began."""
    with open("/proc/self/environ", "rb") as file:
        begun = {os.fsdecode(entry) for entry in file.read().split(b"\0")}
    return {name: value for name, value in now.items() if f"{name}={value}" not in begun}


def main() -> None:
    """Fork spares as the agent asks for them; in a spare, wait for the order, then be the worker."""
    control, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    signals.hold_still()
    gc.disable()  # modules are no garbage
    _import(["torch"])
    _device_count.in_children(sys.modules.get("torch"))
    _import(MODULES)
    gc.freeze()  # what is never looked at stays shared with the spares
    gc.enable()
    while True:
        match _heard(control):
            case Import(modules), _:
                _import(modules)
            case Fork(), [descriptor]:
                with socket.socket(fileno=descriptor) as ours:
                    try:
                        pid = _fork_spare()
                    except OSError as error:
                        datagrams.send(control, NotForked(str(error)))
                    else:
                        if pid == 0:
                            control.close()
                            _be_spare(ours, folder)
                            return
                        datagrams.send(control, Forked(pid))
            case None:
                return


class _DeviceCount:
    """Torch's question how many devices there are, which modules ask when they are imported.

    (torch.cuda.is_available(); torch.utils.cpp_extension does, and so all that has own operators.) Once a
    process has asked the driver, nothing that is forked from it can use CUDA; and the driver goes by the
    environment as it is then. So a child is forked that asks and tells, until the spare becomes a worker.
    """

    def __init__(self) -> None:
        self._bindings: Any = None
        self._asks: Callable[[], int] = lambda: 0

    def in_children(self, torch: Any) -> None:
        """From now on let children ask."""
        bindings: Any = getattr(torch, "_C", None)
        if hasattr(bindings, "_cuda_getDeviceCount"):
            self._bindings, self._asks = bindings, bindings._cuda_getDeviceCount
            bindings._cuda_getDeviceCount = self._ask_in_child

    def by_itself(self) -> None:
        """This process asks by itself again."""
        if self._bindings is not None:
            self._bindings._cuda_getDeviceCount = self._asks

    def can_be_used_no_more(self) -> bool:
        """Return whether this process was forked from one that had used CUDA all the same."""
        return self._bindings is not None and bool(self._bindings._cuda_isInBadFork())

    def _ask_in_child(self) -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, b"%d" % self._asks())
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            answer = pipe.read() if select.select([pipe], [], [], ASKING_SECONDS)[0] else b""
        if not answer:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not answer:  # the import fails, and is left to the training
            raise RuntimeError("The driver did not say how many devices there are.")
        return int(answer)


_device_count = _DeviceCount()


def _fork_spare() -> int:
    """Fork a child of the agent's, in this session until it becomes a worker; return its process id, 0 in it.

    A process whose parent has ended becomes a child of the next process above that is a subreaper, which the
    agent is. When this returns it has done so. Raises OSError.
    """
    if _threads() > 1:
        _fork_in_vain()  # OpenBLAS, for one, ends its threads before a fork, until they are needed again
    if (threads := _threads()) > 1:
        raise OSError(f"{threads} threads run in it, and what they have locked would stay locked in a spare")
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        if _device_count.can_be_used_no_more():
            os.write(write, b"0")
            os._exit(1)
        os.write(write, b"%d" % os.getpid())
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    with open(read, "rb") as pipe:
        number = pipe.read()
    os.waitpid(between, 0)
    if not number:
        raise OSError("there is no room for another process")
    if number == b"0":
        raise OSError("a module that it has imported has used CUDA, and nothing forked after that can")
    return int(number)


def _fork_in_vain() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _be_spare(control: socket.socket, folder: str) -> None:
    if "numpy" in sys.modules:  # else all would draw the same numbers, which new processes do not
        sys.modules["numpy"].random.seed()
    while True:
        match _heard(control):
            case Import(modules), _:
                _import(modules)
            case Prepare(environment, arguments), _:
                _change_environment(environment)
                sys.argv = arguments
            case Become() as order, descriptors:
                _become(order, descriptors, control, folder)
                return
            case None:
                return


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        # What can't be imported here the training imports itself, or fails to; nothing is lost but time.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _heard(control: socket.socket) -> tuple[ToSpare, list[int]] | None:
    """Wait for a message; return None when no more will come."""
    while True:
        try:
            return datagrams.receive(control, TO_SPARE, MOST_DESCRIPTORS)
        except ProtocolError as error:
            say(f"a warm spare is told what makes no sense: {error}")


def _change_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _become(order: Become, descriptors: list[int], control: socket.socket, folder: str) -> None:
    os.setsid()
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    _change_environment(order.environment)
    for name, descriptor in zip(order.descriptors, descriptors, strict=True):
        if name in ("1", "2"):
            os.dup2(descriptor, int(name))
            os.close(descriptor)
        else:
            os.set_inheritable(descriptor, True)
            os.environ[name] = str(descriptor)
    datagrams.send(control, Begins())
    control.close()
    _device_count.by_itself()
    autoload.begin()
    _, *rest = order.arguments  # -u: as this process runs already
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
