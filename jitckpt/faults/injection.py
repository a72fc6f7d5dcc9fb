"""Rehearsed failures: what `--fault` says, and the injector that makes it happen inside the worker.

A fault is a line of text such as 'rank=1 step=20 phase=backward kind=kill'. It fires once in the life of the
job: the worker reports it to the agent before it fires, and the agent leaves it out after the restart.

Some kinds befall the process; the others are the device's, which softgpu plays on order
(docs/reference/faults.md).
"""

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

from jitckpt.bindings import clock, softgpu
from jitckpt.errors import JitckptError, RehearsedFailure
from jitckpt.faults import processes
from jitckpt.wire import environment

PHASES = ("forward", "backward", "allreduce", "optimizer", "between")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}
FAILURES_OF_THE_DEVICE = ("sticky", "ecc", "device-lost")
FAILURES_OF_MEMORY = ("failed-allocation", "oom")
FAILURES_OF_THE_NETWORK = ("collective-hang", "collective-error", "network-cut")
DEVICE_KINDS = (*FAILURES_OF_THE_DEVICE, *FAILURES_OF_MEMORY, *FAILURES_OF_THE_NETWORK, "slow", "heal")
# Of transparent mode alone: they befall the server that has the rank's device.
DRIVER_SUSPECT = "driver-suspect"
PROXY_KINDS = ("proxy-kill", DRIVER_SUSPECT)
# The same, and the device fails every server that is started on it from then on.
LASTING_KINDS = ("device-lost-hard",)
# What has a new server find that out.
OF_A_BROKEN_DEVICE = {"SOFTGPU_FAULTS": "kind=device-lost"}
# The time of day of a process jumps: the rank's, or its agent's.
CLOCK_KINDS = ("clock", "agent-clock")
# Of processes beside the rank, or of the rank's whole process.
PROCESS_KINDS = (*processes.BY_KIND, *processes.AGENTS_KINDS, "clock")
KINDS = (*SIGNALS, "exception", "exit", *PROCESS_KINDS, *DEVICE_KINDS, *PROXY_KINDS, *LASTING_KINDS)
# Those that transparent mode brings a rank back from.
TRANSPARENT_KINDS = (*PROXY_KINDS, *FAILURES_OF_THE_NETWORK, *FAILURES_OF_THE_DEVICE)
# Those after which a job can't go on as it is, and those of them that only the hang timeout finds.
FATAL_KINDS = (
    *SIGNALS,
    "exception",
    "exit",
    "segfault",
    "gil-hold",
    *FAILURES_OF_THE_DEVICE,
    "oom",
    *FAILURES_OF_THE_NETWORK,
)
SILENT_KINDS = ("stop", "gil-hold", "collective-hang", "network-cut")


class FaultError(JitckptError):
    """A fault that can't be understood; the text is a sentence that names the part and what is allowed."""


@dataclass(frozen=True)
class FaultSpec:
    """One failure of one rank: in `phase` of the `step`-th optimizer step (from 1), of one of KINDS.

    The keys after `seed` are for the device's kinds. call: the how manyeth call from the beginning of the
    phase. peer: the rank at the other end of the network. part (kernels or link) and factor (times as long):
    of what is slow. result (remote or system): NCCL's. jump: by how many seconds a
    clock does (an hour ahead).
    """

    rank: int
    step: int
    phase: str = "any"
    kind: str = "kill"
    seed: int | None = None
    call: int | None = None
    peer: int | None = None
    part: str | None = None
    factor: float | None = None
    result: str | None = None
    jump: int | None = None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    def with_phase(self) -> "FaultSpec":
        """Return the fault with `any` replaced by one phase, the same for the same fault and seed."""
        if self.phase != "any":
            return self
        seed = self.seed if self.seed is not None else f"rank {self.rank} step {self.step}"
        return replace(self, phase=random.Random(seed).choice(phases_of(self.kind)))

    def for_the_device(self) -> str:
        """Return the text that arms it in softgpu, when its phase begins."""
        suspect = self.kind == "driver-suspect"  # NCCL says so by a system call that fails
        kind = "collective-error" if suspect else self.kind.removesuffix("-hard")
        values: dict[str, object] = {"kind": kind}
        values |= {key: getattr(self, key) for key in ("call", "peer", "part", "factor", "result")}
        values |= {"result": "system"} if suspect else {}
        if self.phase == "allreduce":
            # It waits for the next NCCL call.
            values["call"] = self.call or 1
            if kind in FAILURES_OF_THE_DEVICE:
                values["at"] = "collective"
        return " ".join(f"{key}={value}" for key, value in values.items() if value is not None)


def phases_of(kind: str) -> tuple[str, ...]:
    """Return the phases in which a kind can fire.

    At an NCCL call only what the preloaded libraries do can: signals, and the device's failures.
    """
    of_devices = (*FAILURES_OF_THE_DEVICE, *LASTING_KINDS)
    at_collectives = (*SIGNALS, *of_devices, *FAILURES_OF_THE_NETWORK, "driver-suspect")
    return PHASES if kind in at_collectives else tuple(phase for phase in PHASES if phase != "allreduce")


def parse_fault(text: str) -> FaultSpec:
    """Return the fault that `text` describes: key=value pairs with spaces between.

    rank and step are required, factor is for kind=slow; phase is `any` and kind is `kill` where they are not
    given.
    Raises FaultError.
    """
    values: dict[str, str] = {}
    for part in text.split():
        key, _, value = part.partition("=")
        if key not in _KEYS:
            raise _error(text, f"{key!r} is not known; the keys are {_listed(_KEYS)}")
        if key in values:
            raise _error(text, f"{key} is given twice")
        values[key] = value
    for key in ("rank", "step"):
        if key not in values:
            raise _error(text, f"{key} is missing")
    spec = FaultSpec(
        rank=_number(text, "rank", values["rank"], least=0),
        step=_number(text, "step", values["step"], least=1),
        phase=_one_of(text, "phase", values.get("phase", "any"), (*PHASES, "any")),
        kind=_one_of(text, "kind", values.get("kind", "kill"), KINDS),
        seed=_number(text, "seed", values["seed"], least=0) if "seed" in values else None,
        call=_number(text, "call", values["call"], least=1) if "call" in values else None,
        peer=_number(text, "peer", values["peer"], least=0) if "peer" in values else None,
        part=_one_of(text, "part", values["part"], _PARTS) if "part" in values else None,
        factor=_factor(text, values["factor"]) if "factor" in values else None,
        result=_one_of(text, "result", values["result"], _RESULTS) if "result" in values else None,
        jump=_jump(text, values["jump"]) if "jump" in values else None,
    )
    if spec.phase not in (*phases_of(spec.kind), "any"):
        kinds = tuple(kind for kind in KINDS if spec.phase in phases_of(kind))
        raise _error(text, f"phase={spec.phase} goes only with kind {_listed(kinds)}")
    for key in _KEYS[_KEYS.index("call") :]:
        if key in values and key not in keys_of(spec.kind):
            raise _error(text, f"{key} does not go with kind={spec.kind}")
    if spec.kind == "slow" and spec.factor is None:
        raise _error(text, "factor is missing")
    if spec.kind == "slow" and spec.peer is not None and spec.part != "link":
        raise _error(text, "peer goes only with part=link")
    if spec.peer == spec.rank:
        raise _error(text, "peer is the rank itself")
    return spec


def to_environment(specs: Sequence[FaultSpec]) -> str:
    """Return the value of environment.FAULTS that arms these faults; none is an empty one."""
    return json.dumps([str(spec) for spec in specs]) if specs else ""


def from_environment(value: str, rank: int) -> list[FaultSpec]:
    """Return the faults of `rank` that environment.FAULTS holds. Raises FaultError."""
    try:
        texts = json.loads(value or "[]")
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FaultError(f"{environment.FAULTS.name} must be a JSON list of texts, not {value!r}.")
    return [spec.with_phase() for spec in map(parse_fault, texts) if spec.rank == rank]


class Injector:
    """Makes this rank's faults happen when the training reaches their step and phase.

    `report` is called with the fault before it fires. `arm_signal` has a signal sent to this process at its
    next NCCL call; it serves the phase `allreduce`, which only the preloaded library sees. `arm_device` has
    softgpu play a fault of the device, or ends the server that has it.
    """

    def __init__(
        self,
        specs: Sequence[FaultSpec],
        report: Callable[[FaultSpec], None],
        arm_signal: Callable[[int], None],
        arm_device: Callable[[FaultSpec], None],
        has_fired: Callable[[FaultSpec], bool] = lambda spec: False,
    ) -> None:
        """has_fired: in a process from which this one has been made again, which can't know."""
        self._has_fired = has_fired
        self._armed = list(specs)
        self._report = report
        self._arm_signal = arm_signal
        self._arm_device = arm_device

    def on_phase(self, step: int, phase: str) -> None:
        """Fire the faults of this step and phase; called when the rank enters the phase of step `step`."""
        for spec in [spec for spec in self._armed if spec.step == step]:
            at_next_collective = spec.phase == "allreduce" and phase == "backward"
            if spec.phase == phase or at_next_collective:
                self._armed.remove(spec)
                if self._has_fired(spec):
                    continue
                self._report(spec)
                if spec.kind in (*DEVICE_KINDS, *PROXY_KINDS, *LASTING_KINDS):
                    self._arm_device(spec)
                elif at_next_collective:
                    self._arm_signal(SIGNALS[spec.kind])
                else:
                    _fire(spec)


def arm_device(spec: FaultSpec) -> None:
    """Arm a fault in the softgpu that is this process's device. Raises FaultError if there is none."""
    reason = softgpu.fault(spec.for_the_device())
    if reason is None:
        reason = "the device of this process is not softgpu, which alone fails on order"
    if reason:
        raise _error(str(spec), reason)
    if spec.kind in FAILURES_OF_MEMORY and spec.call is None:
        ask_for_memory()


def ask_for_memory() -> None:
    """Allocate more than torch has cached: it would go on with that for ever, and never ask the device."""
    import torch

    bytes_needed = torch.cuda.memory_reserved() + (2 << 20)
    torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def _fire(spec: FaultSpec) -> None:
    if spec.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[spec.kind])
    elif spec.kind == "exit":
        os._exit(1)
    elif spec.kind in processes.BY_KIND:
        processes.BY_KIND[spec.kind]()
    elif spec.kind == "clock":
        clock.jump(seconds_of(spec))
    elif spec.kind not in processes.AGENTS_KINDS:
        raise RehearsedFailure(f"rehearsed failure: {spec}")


_PARTS = ("kernels", "link")
_RESULTS = ("remote", "system")
_KEYS = tuple(f.name for f in fields(FaultSpec))


def seconds_of(spec: FaultSpec) -> int:
    """Return by how much a clock jumps."""
    return clock.HOUR if spec.jump is None else spec.jump


def keys_of(kind: str) -> tuple[str, ...]:
    """Return the keys beyond those of every kind that go with a kind."""
    if kind in CLOCK_KINDS:
        return ("jump",)
    if kind not in (*DEVICE_KINDS, *LASTING_KINDS, DRIVER_SUSPECT) or kind == "heal":
        return ()
    more = {"network-cut": ("peer",), "slow": ("peer", "part", "factor"), "collective-error": ("result",)}
    return "call", *more.get(kind, ())


def _number(text: str, key: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise _error(text, f"{key} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _jump(text: str, value: str) -> int:
    return _number(text, "jump", value.removeprefix("-"), least=1) * (-1 if value[:1] == "-" else 1)


def _factor(text: str, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not (isfinite(factor) and 1 <= factor <= 1_000_000 and value.isascii() and "_" not in value):
        raise _error(text, f"factor must be a number of at least 1 and at most 1000000, not {value!r}")
    return factor


def _one_of(text: str, key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _error(text, f"{key} must be {_listed(allowed)}, not {value!r}")
    return value


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _error(text: str, reason: str) -> FaultError:
    return FaultError(f"Fault {text!r}: {reason}.")
