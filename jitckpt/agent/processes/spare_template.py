"""The agent's side of the warm spares (spare.py): the process they are forked from, and orders to each."""

import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

from jitckpt.agent.processes import children
from jitckpt.system import datagrams, descriptor_limit, process_tree
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.spares import FROM_SPARE, Become, Begins, Fork, Forked, FromSpare, NotForked, Prepare
from jitckpt.worker import spare

# To load torch from a slow file system. Then a new process is started in the place of a spare.
LOADING_SECONDS = 120.0
# Between two looks at a process that has not answered yet.
LOOK_SECONDS = 0.1
_TEMPLATE = "the process they are forked from"
_NONSENSE = f"{_TEMPLATE} says what makes no sense"


class ForkedProcess:
    """A child of this process that another has forked for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Wait for its end; return its exit code (minus the number of a signal)."""
        status = os.waitpid(self.pid, 0)[1]
        children.waited_for(self.pid)
        return os.waitstatus_to_exitcode(status)


class Template:
    """A process that has loaded what every worker needs, and forks spares of itself.

    Spares become children of the agent, which is a subreaper from here on (prctl(2)): so are then all
    processes whose parents have ended and that a worker has started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one for spares that run `command` (spare.can_become). Raises OSError."""
        children.adopt_orphans()
        self.environment = environment
        self._asked: deque[Spare] = deque()  # that have not been forked yet, as far as was heard
        self._told: set[str] = set()  # the modules that it was asked to import
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [command[0], "-u", "-c", spare.PROGRAM]
        try:
            with children.starting() as note:
                self._process = _start(
                    [*program, str(theirs.fileno()), spare.first_on_path(command)],
                    environment,
                    theirs.fileno(),
                )
                note(self._process.pid)
                children.note_template(self._process.pid)
        finally:
            theirs.close()
        descriptor_limit.give_back(self._process.pid)

    def new_spare(
        self,
        modules: Sequence[str],
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Spare":
        """Return a spare that imports `modules` as soon as it has been forked. Raises OSError.

        command, environment: of whom it is to take the place, for what is imported; else the template's.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, ours):
            end.setblocking(False)
        for_all = [module for module in modules if spare.is_for_all(module) and module not in self._told]
        self._told.update(for_all)
        with theirs:
            made = Spare(self, ours)
            try:
                _send_imports(self._socket, for_all)
                datagrams.send(self._socket, Fork(), [theirs.fileno()])
                if command is None or environment is None or made.prepare(command, environment):
                    _send_imports(ours, modules)
            except OSError:
                ours.close()
                raise
        self._asked.append(made)
        return made

    def wait_for(self, made: "Spare") -> None:
        """Wait until the spare has been forked, or can't be any more."""
        patience = process_tree.Patience(self._process.pid, LOADING_SECONDS)
        why = ""
        while made in self._asked:
            self._socket.settimeout(LOOK_SECONDS)
            try:
                answer = _process(datagrams.receive(self._socket, FROM_SPARE))
            except TimeoutError:
                if self.alive():
                    if lost := patience.lost():
                        why = lost
                        self._end()  # what it would say later is not waited for
                    continue
                answer = None  # what it was forking has its end of the socket, too
            except ProtocolError as error:
                answer = f"{_NONSENSE}: {_clause(error)}"
            if isinstance(answer, int):
                self._asked.popleft().forked(answer)
            else:
                self._asked.popleft().not_forked(answer or f"{_TEMPLATE} {why or 'has ended'}")

    def alive(self) -> bool:
        """Return whether it can fork more spares."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it, and tell nobody."""
        self._process.kill()

    def close(self) -> None:
        """End it. Its spares live on."""
        self._end()
        for made in list(self._asked):
            self.wait_for(made)
        self._socket.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        children.waited_for(self._process.pid)


def _start(
    command: Sequence[str], environment: Mapping[str, str], descriptor: int
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=environment, pass_fds=(descriptor,), start_new_session=True)


def _process(heard: tuple[FromSpare, list[int]] | None) -> int | str | None:
    """Return the process that a template has forked, or why it has not, if it has said anything.

    It has loaded the training's modules, which may do anything: a process that is no child of this one is
    none of its spares.
    """
    match heard:
        case None:
            return None
        case Forked(pid), _:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except OSError:
                return f"{_NONSENSE}: process {pid} is no child of this one"
            return pid
        case NotForked(why), _:
            return why
        case message, _:
            return f"{_NONSENSE}: {message!r:.100}"


def _clause(error: Exception) -> str:
    return str(error).rstrip(".")


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return what is to be set in an environment, and with None what is to be removed."""
    changes: dict[str, str | None] = {
        name: value for name, value in after.items() if before.get(name) != value
    }
    return changes | {name: None for name in before if name not in after}


def _send_imports(to: socket.socket, modules: Sequence[str]) -> None:
    for message in spare.imports(modules):
        with contextlib.suppress(BlockingIOError, ProtocolError):  # too much: that is imported later
            datagrams.send(to, message)


class Spare:
    """A process that can become a worker in no time. Made by a template."""

    def __init__(self, template: Template, control: socket.socket) -> None:
        self._template = template
        self._socket = control
        self._environment = template.environment
        self._process: ForkedProcess | None = None
        self._failure = ""

    def forked(self, pid: int) -> None:
        """Take note of its process id."""
        self._process = ForkedProcess(pid)

    def not_forked(self, reason: str) -> None:
        """Take note of why there is no such process."""
        self._failure = reason

    def prepare(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Have it import what it imports as a worker of this command would; return whether it was told."""
        order = Prepare(_changes(self._environment, environment), spare.arguments_of(command))
        try:
            datagrams.send(self._socket, order)
        except (BlockingIOError, ProtocolError):
            return False
        self._environment = environment
        return True

    def become(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[str, int]
    ) -> ForkedProcess:
        """Have it run `command`; return its process, which is the caller's from now on.

        descriptors: copies of these are given to it, the numbers in the variables of these names; "1" and "2"
        become its output. Raises OSError if it can't be told; it is ended then.
        """
        changes = _changes(self._environment, environment)
        self._template.wait_for(self)
        try:
            if self._process is None:
                raise OSError(self._failure)
            children.note_own(self._process.pid)
            order = Become(changes, list(command[1:]), list(descriptors))
            datagrams.send(self._socket, order, descriptors.values())
            self._wait_until_begun(self._process.pid)
        except (OSError, ProtocolError) as error:
            self.close()
            raise OSError(f"A warm spare could not be told to become a worker: {_clause(error)}.") from error
        self._socket.close()
        return self._process

    def _wait_until_begun(self, pid: int) -> None:
        """Wait until it is about to run the script: what fails before costs no restart. Raises OSError."""
        patience = process_tree.Patience(pid, LOADING_SECONDS)
        self._socket.settimeout(LOOK_SECONDS)
        while True:
            try:
                heard = datagrams.receive(self._socket, FROM_SPARE)
            except TimeoutError:
                if lost := patience.lost():
                    raise OSError(f"it {lost}") from None
                continue
            if heard is None:
                raise OSError("it has ended")
            if not isinstance(heard[0], Begins):
                raise OSError(f"it says what makes no sense: {heard[0]!r:.100}")
            return

    def close(self) -> None:
        """End it, if it has been forked: it is not needed."""
        self._socket.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
