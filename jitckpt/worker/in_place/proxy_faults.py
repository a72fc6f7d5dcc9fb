"""Rehearsed failures of a worker in transparent mode: they befall the server that has its device."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jitckpt.bindings import softgpu
from jitckpt.bindings.interpose import Native
from jitckpt.faults import injection
from jitckpt.faults.injection import FaultError, FaultSpec, Injector
from jitckpt.hooks.torch_training import TrainingHooks
from jitckpt.system import descriptors
from jitckpt.system.resting_place import Guest
from jitckpt.wire import environment, protocol


class _Nobody:
    """Listens to a training loop, of which only the phases are wanted."""

    def minibatch_begun(self, step: int) -> None: ...

    def forward_ended(self, step: int) -> None: ...

    def step_begun(self, step: int) -> None: ...

    def step_ended(self, step: int) -> None: ...

    def passed_again(self, step: int) -> None: ...

    def closure_again(self, step: int) -> None: ...

    def unequal_turns(self, step: int) -> None: ...

    def minibatch_ended(self, step: int) -> None: ...

    def drawn_ahead(self) -> None: ...

    def steps_again(self) -> None: ...

    def several_steps(self) -> None: ...

    def captured_step(self, step: int) -> None: ...


# Of this process, until `taken_over`: the hooks of its faults, and what they befall.
_begun: "tuple[TrainingHooks, Server] | None" = None


def begin(process: Any, guest: Guest | None = None) -> TrainingHooks | None:
    """Have this rank's faults happen. process: the symbols of this process.

    guest: tells what has happened already, should this process be made again from a snapshot.
    """
    global _begun  # noqa: PLW0603
    text = environment.FAULTS.get()
    specs = injection.from_environment(text, int(os.environ["RANK"])) if text else []
    if not specs:
        return None
    server = Server(process)
    injector = Injector(
        specs,
        _report,
        lambda signum: Native().arm_fault(signum),
        server.befall,
        lambda spec: guest is not None and str(spec) in guest.fired,
    )
    hooks = TrainingHooks(_Nobody(), model=None, optimizers=[], on_phase=injector.on_phase)
    _begun = hooks, server
    return hooks


def taken_over() -> Callable[[FaultSpec], None] | None:
    """Leave this rank's faults to the caller, who knows the job's steps; return what has the server meet one.

    None if no faults have been begun here.
    """
    global _begun
    if _begun is None:
        return None
    (hooks, server), _begun = _begun, None
    hooks.detach()
    return server.befall


class Server:
    """The server that has this process's device."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def befall(self, spec: FaultSpec) -> None:
        """Let the fault happen. Raises FaultError if it can't."""
        server = self._process.jitckpt_proxy_server()
        if not server:
            raise FaultError(f"Fault {str(spec)!r}: this process has no device yet.")
        if spec.kind == "proxy-kill":
            with contextlib.suppress(ProcessLookupError):  # just ended, for another rank's failure
                os.kill(server, signal.SIGKILL)
            return
        status, sentence = self._order(spec.for_the_device())
        if status != "ok":
            raise FaultError(f"Fault {str(spec)!r}: {sentence}")
        if spec.kind in injection.FAILURES_OF_MEMORY and spec.call is None:
            injection.ask_for_memory()

    def _order(self, fault: str) -> tuple[str, str]:
        """Tell the server, or the one that takes its place meanwhile; return what it answers."""
        while True:
            # The server has still to read what this process has said so far, and a recovery to end.
            torch.cuda.synchronize()
            server = self._process.jitckpt_proxy_server()
            try:
                answer = softgpu.order(_control_of(server), fault)
            except softgpu.ChaosError as error:
                answer = "gone", str(error)
            if answer[0] != "gone":
                return answer
            torch.cuda.synchronize()
            if self._process.jitckpt_proxy_server() == server:
                return answer


def _control_of(server: int) -> Path:
    """Return where the server can be told of faults: elsewhere once this process has moved."""
    content = os.fsdecode(Path(f"/proc/{server}/environ").read_bytes())
    variables = dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)
    return Path(variables[softgpu.VARIABLE]) / str(server)


def _report(spec: FaultSpec) -> None:
    """Tell the agent, so that the fault does not happen again in other workers."""
    message = protocol.Fault(spec.rank, str(spec), spec.step, spec.phase)
    given = descriptors.given()
    if given is not None:
        with socket.socket(fileno=os.dup(given.agent)) as agent:
            agent.send(protocol.encode(message))
