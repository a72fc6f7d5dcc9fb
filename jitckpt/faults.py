"""Rehearsed failures: what `--fault` says, and the injector that makes it happen inside the worker.

A fault is a line of text such as 'rank=1 step=20 phase=backward kind=kill'. It fires once in the life of the
job: the worker reports it to the agent before it fires, and the agent leaves it out after the restart.
"""

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from jitckpt.errors import JitckptError, RehearsedFailure

PHASES = ("forward", "backward", "allreduce", "optimizer", "between")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS = (*SIGNALS, "exception", "exit")


class FaultError(JitckptError):
    """A fault that can't be understood; the text is a sentence that names the part and what is allowed."""


@dataclass(frozen=True)
class FaultSpec:
    """One failure of one rank: in `phase` of the `step`-th optimizer step (from 1), of one of KINDS."""

    rank: int
    step: int
    phase: str = "any"
    kind: str = "kill"
    seed: int | None = None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    def with_phase(self) -> "FaultSpec":
        """Return the fault with `any` replaced by one phase, the same for the same fault and seed."""
        if self.phase != "any":
            return self
        seed = self.seed if self.seed is not None else f"rank {self.rank} step {self.step}"
        return replace(self, phase=random.Random(seed).choice(_phases_of(self.kind)))


def parse_fault(text: str) -> FaultSpec:
    """Return the fault that `text` describes: key=value pairs with spaces between.

    rank and step are required; phase is `any` and kind is `kill` where they are not given.
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
    )
    if spec.phase not in (*_phases_of(spec.kind), "any"):
        raise _error(text, f"phase={spec.phase} goes only with kind {_listed(tuple(SIGNALS))}")
    return spec


def to_environment(specs: Sequence[FaultSpec]) -> str:
    """Return the value of JITCKPT_FAULTS that arms these faults."""
    return json.dumps([str(spec) for spec in specs])


def from_environment(value: str, rank: int) -> list[FaultSpec]:
    """Return the faults of `rank` that JITCKPT_FAULTS holds. Raises FaultError."""
    try:
        texts = json.loads(value)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FaultError(f"JITCKPT_FAULTS must be a JSON list of texts, not {value!r}.")
    return [spec.with_phase() for spec in map(parse_fault, texts) if spec.rank == rank]


class Injector:
    """Makes this rank's faults happen when the training reaches their step and phase.

    `report` is called with the fault before it fires. `arm_signal` has a signal sent to this process at its
    next NCCL call; it serves the phase `allreduce`, which only the preloaded library sees.
    """

    def __init__(
        self,
        specs: Sequence[FaultSpec],
        report: Callable[[FaultSpec], None],
        arm_signal: Callable[[int], None],
    ) -> None:
        self._armed = list(specs)
        self._report = report
        self._arm_signal = arm_signal

    def on_phase(self, step: int, phase: str) -> None:
        """Fire the faults of this step and phase; called when the rank enters the phase of step `step`."""
        for spec in [spec for spec in self._armed if spec.step == step]:
            at_next_collective = spec.phase == "allreduce" and phase == "backward"
            if spec.phase == phase or at_next_collective:
                self._armed.remove(spec)
                self._report(spec)
                if at_next_collective:
                    self._arm_signal(SIGNALS[spec.kind])
                else:
                    _fire(spec)


def _fire(spec: FaultSpec) -> None:
    if spec.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[spec.kind])
    elif spec.kind == "exit":
        os._exit(1)
    else:
        raise RehearsedFailure(f"rehearsed failure: {spec}")


_KEYS = tuple(f.name for f in fields(FaultSpec))


def _phases_of(kind: str) -> tuple[str, ...]:
    """The phases in which a kind can fire: inside an NCCL call only a signal can."""
    return PHASES if kind in SIGNALS else tuple(phase for phase in PHASES if phase != "allreduce")


def _number(text: str, key: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise _error(text, f"{key} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _one_of(text: str, key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _error(text, f"{key} must be {_listed(allowed)}, not {value!r}")
    return value


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _error(text: str, reason: str) -> FaultError:
    return FaultError(f"Fault {text!r}: {reason}.")
