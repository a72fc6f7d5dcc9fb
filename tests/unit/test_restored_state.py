"""What was restored is put back once the loop goes on; what the script has changed of it is taken back."""

from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.encoding import tree_codec
from jitckpt.state.host_state import HostState
from jitckpt.worker.restored_state import CHANGED_TWICE, RestoredState


class Script:
    """A model and what is told of it."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.host = HostState(
            model=self.model,
            optimizers=[self.optimizer],
            schedulers=[],
            scaler=None,
            extra=None,
            device=None,
        )
        self.said: list[str] = []
        self.variables_put = self.watched = 0
        self.restored = RestoredState(
            self.host, warn=self.said.append, put_variables=self._put_variables, watch=self._watch
        )

    def _put_variables(self) -> None:
        self.variables_put += 1

    def _watch(self) -> None:
        self.watched += 1

    def parts(self) -> dict[str, Any]:
        """Return what this rank alone knows, as a save would bring it."""
        return {
            name: tree_codec.decode(one.tree, one.tensors, None) for name, one in self.host.local().items()
        }

    def change(self) -> None:
        with torch.no_grad():
            self.model.weight.add_(1.0)


def test_of_a_fresh_start_nothing_is_put_back() -> None:
    script = Script()
    script.restored.loop_begins(goes_on=True)
    script.change()
    script.restored.put_back()
    script.restored.put_own_back()
    assert (script.variables_put, script.watched, script.said) == (0, 0, [])


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_the_head_of_an_epoch_changes_a_second_time_is_taken_back(is_ours: bool) -> None:
    """Where the save is jitckpt's own; with the script's save nobody can."""
    script = Script()
    before = script.model.weight.detach().clone()

    def put() -> None:
        with torch.no_grad():
            script.model.weight.copy_(before)

    script.restored.take(script.parts(), put if is_ours else None)
    script.restored.loop_begins(goes_on=True)
    script.change()
    script.restored.put_back()
    assert torch.equal(script.model.weight, before) == is_ours
    assert (script.watched, script.said) == ((1, []) if is_ours else (0, [CHANGED_TWICE]))
    assert script.variables_put == 1


def test_what_changes_behind_the_first_step_is_the_trainings() -> None:
    script = Script()
    script.restored.take(script.parts(), lambda: pytest.fail("nothing is to be put back"))
    script.restored.loop_begins(goes_on=True)
    script.restored.has_stepped()
    script.change()
    script.restored.put_back()
    assert script.said == []
