"""What a save that is made while the training goes on takes of the device, and when."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import Shared
from jitckpt.state.kept import NOTHING
from jitckpt.state.optimizer_state import OptimizerPart
from jitckpt.worker.saving.beside import Begun
from jitckpt.worker.saving.history import SharedSnapshot
from jitckpt.worker.saving.periodic import PeriodicSaver, PeriodicSettings

NAMES = {"optimizer.0.beside.slow": (2,), "optimizer.0.others.0": (3,), "progress.rate": ()}


class Copies:
    """In the place of the device's: a copy is on the host, and says in which turn it was begun."""

    def __init__(self) -> None:
        self.turns = 0

    def begin(
        self, first: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> tuple[int, dict[str, Tensor]]:
        self.turns += 1
        shapes = {name: one.shape for name, one in {**first, **others}.items()}
        return self.turns, {name: torch.full(shape, self.turns) for name, shape in shapes.items()}


class Saver(PeriodicSaver):
    written: Mapping[str, Tensor]

    def _write(self, begun: Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        self.written = tensors


def on_device(name: str) -> Tensor:
    return torch.empty(NAMES[name], device="meta")


def encoded(*names: str) -> Encoded:
    return Encoded({"of": [*names]}, {name: on_device(name) for name in names})


def shared(beside: Encoded) -> Shared:
    part = OptimizerPart({}, encoded("optimizer.0.others.0"), {}, {}, [], beside)
    return Shared((part,), (), [[]])


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    unused: Any = None
    host: Any = SimpleNamespace(device=None, scaler_state=lambda due: None, kept=NOTHING)
    made = Saver(
        PeriodicSettings(1, 1, replica=True),
        root=tmp_path,
        identity=Identity("job", "", 2, 0, 0, 2),
        host=host,
        history=unused,
        wanted_step=lambda: 0,
        write_word=lambda *_: None,
        report=lambda message: pytest.fail(str(message)),
        warn=pytest.fail,
    )
    copies: Any = Copies()
    made._copies = copies
    return made


def settle(saver: Saver, begun: Shared, now: Shared) -> None:
    history: Any = SimpleNamespace(
        snapshot=lambda step: SharedSnapshot(now, Encoded({}, {}), (), False),
        usual_scheduler_steps=(),
        may_lack=lambda step: False,
        is_settled=lambda step: True,
        waits_for_boundary=False,
    )
    saver._history = history
    saver.step_ended(1, {}, begun)
    saver.settled(1)
    assert saver._writer is not None
    saver._writer.join()


def test_what_an_optimizer_has_in_lists_and_attributes_is_copied_as_the_step_ends(saver: Saver) -> None:
    """Not read by the thread that writes, which may come to it when the next steps have changed it."""
    state = shared(encoded("optimizer.0.beside.slow"))
    settle(saver, state, state)
    assert {name: one.tolist() for name, one in saver.written.items()} == {
        "optimizer.0.beside.slow": [1, 1],
        "optimizer.0.others.0": [1, 1, 1],
    }


def test_what_a_wrapper_has_changed_behind_the_step_is_copied_again(saver: Saver) -> None:
    memory = encoded("optimizer.0.beside.slow")
    state, again = shared(memory), shared(Encoded(memory.tree, memory.tensors))
    settle(
        saver,
        state,
        state._replace(optimizers=(state.optimizers[0]._replace(beside=again.optimizers[0].beside),)),
    )
    assert saver.written["optimizer.0.beside.slow"].tolist() == [2, 2]
