"""Writes down what is seen of a script's optimizer steps, for `jitckpt steps`.

In the first steps it also compares the values of all named tensors, which waits for the device: what changes
where is what transparent mode has to know.
"""

import atexit
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, distributed
from torch.optim import Optimizer

from jitckpt.hooks import guard
from jitckpt.hooks.torch_steps import OptimizerSteps, State, named_buffers

COMPARED_STEPS = 6


@dataclass(frozen=True)
class Record:
    """What was seen of one rank. optimizers: class and number of parameters, in the order of first steps.

    state: of every tensor that the optimizers change, by name, [type, shape]. outside: those of them that
    change outside the step, too. buffers: all that have a name; changing: those that change outside the
    step, in_step: those that change in it. unsupported: clauses. compared: the steps that were compared.
    """

    rank: int
    steps: int
    compared: int
    optimizers: list[list[Any]]
    state: dict[str, list[Any]]
    outside: list[str]
    buffers: list[str]
    changing: list[str]
    in_step: list[str]
    unsupported: list[str]


class StepRecorder:
    """A listener that remembers; `record` says what."""

    def __init__(self) -> None:
        self.steps = OptimizerSteps(self)
        self._compared = 0
        self._state: Mapping[str, Tensor] = {}
        self._optimizers: list[list[Any]] = []
        self._buffers: list[str] = []
        self._before: dict[str, str] = {}
        self._changed: dict[bool, set[str]] = {True: set(), False: set()}  # in the step, outside
        self._unsupported: list[str] = []
        self._collectives = 0
        self._called = False  # a collective, in a step

    def step_begins(self, step: int, optimizer: Optimizer, state: State) -> None:
        self._collectives = _collectives()
        if step <= COMPARED_STEPS:
            self._compare(state(), in_step=False)

    def step_ended(self, step: int, optimizer: Optimizer, state: State) -> None:
        self._state = state()
        if (called := _collectives() - self._collectives) and not self._called:
            self._called = True
            self.unsupported(
                f"step {step} calls {called} collectives, so a rank can neither finish it alone nor skip it"
            )
        known = self.steps.optimizers()
        for one in known[len(self._optimizers) :]:
            assert one is not None
            parameters = sum(len(group["params"]) for group in one.param_groups)
            self._optimizers.append([type(one).__name__, parameters])
        if step <= COMPARED_STEPS:
            self._compare(self._state, in_step=True)
            self._compared = step

    def unsupported(self, reason: str) -> None:
        self._unsupported.append(reason)

    def failed(self, step: int, error: Exception) -> None:
        self.unsupported(f"from step {step} on nothing was seen any more: {guard.in_words(error)}")

    def record(self) -> Record:
        in_step, outside = self._changed[True], self._changed[False]
        return Record(
            rank=int(os.environ.get("RANK", "0")),
            steps=self.steps.step,
            compared=self._compared,
            optimizers=self._optimizers,
            state={name: [str(one.dtype), list(one.shape)] for name, one in self._state.items()},
            outside=sorted(outside & self._state.keys()),
            buffers=self._buffers,
            changing=sorted(outside - self._state.keys()),
            in_step=sorted(in_step - self._state.keys()),
            unsupported=self._unsupported,
        )

    def _compare(self, state: Mapping[str, Tensor], in_step: bool) -> None:
        buffers = named_buffers(self.steps.optimizers())
        self._buffers = [*buffers]
        now = {name: _checksum(tensor) for name, tensor in {**buffers, **state}.items()}
        self._changed[in_step] |= {
            name for name, value in now.items() if self._before.get(name, value) != value
        }
        self._before = now


def begin(folder: Path) -> None:
    """Record this process's steps; its file is written as it ends, if it has made any."""
    recorder = StepRecorder()

    def write() -> None:
        if recorder.steps.step:
            text = json.dumps(asdict(recorder.record()))
            (folder / f"{os.getpid()}.json").write_text(text)

    atexit.register(write)


def read(folder: Path) -> list[Record]:
    """Return what the processes of a job have written, by rank."""
    found = [Record(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: record.rank)


def _collectives() -> int:
    """Return how many collectives this process has called."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    groups: Iterable[Any] = distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _checksum(tensor: Tensor) -> str:
    with torch.no_grad():
        content = tensor.detach().reshape(-1).cpu().contiguous()
    return xxhash.xxh3_128(content.view(torch.uint8).numpy().tobytes()).hexdigest()
