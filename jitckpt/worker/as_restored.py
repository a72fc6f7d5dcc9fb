"""The shared state as a restart goes on with it, whatever the script changes before its first batch.

What an epoch does before its loop over batches (weights drawn anew, an optimizer's state cleared, a group
added) a restart in that epoch does again, to the state that has it already. So what it has changed is put
back from the save as the batches go on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import TreeError
from jitckpt.state import tensors_seen
from jitckpt.state.host_state import HostState, Shared

AT_A_TIME = 1 << 20  # elements, of which 16 bytes each are needed meanwhile
ADD = "add_param_group"
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AsRestored:
    """Of one restart, from the moment at which its loop begins until `is_changed` is asked."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self._before = _look(host)
        self._tensors = _tensors_of(self._before)
        self._sums = sums(self._tensors)  # of what is written through `data` torch counts nothing
        self._writes = tensors_seen.writes(self._tensors.values())
        self._writes.look()
        self._optimizers = [one.optimizer for one in host.optimizers]
        for optimizer in self._optimizers:
            add_no_group_twice(optimizer)

    def end(self) -> None:
        """Let the optimizers be as they were."""
        for optimizer in self._optimizers:
            add_groups_as_ever(optimizer)

    def is_changed(self) -> bool:
        """Return whether it is another now; for once."""
        self.end()
        if self._host.model is not None:
            self._host.model.follow()
        before, now = self._before, _look(self._host)
        if before is None or now is None or self._writes.changed():
            return True
        here = _tensors_of(now)
        if here.keys() != self._tensors.keys() or sums(here) != self._sums:
            return True
        return before.held.frozen != now.held.frozen or any(
            (one.numbers, one.names) != (other.numbers, other.names)
            or not (_are_same(one.others, other.others) and _are_same(one.beside, other.beside))
            for one, other in zip(before.optimizers, now.optimizers, strict=True)
        )


def _look(host: HostState) -> Shared | None:
    try:
        return host.shared()
    except TreeError:  # what can't be saved can't be compared
        return None


def _tensors_of(shared: Shared | None) -> dict[str, Tensor]:
    """Return those on a device, but for hyperparameters, which are put back in any case."""
    if shared is None:
        return {}
    rates = shared.rates()
    return {name: one.detach() for name, one in shared.all_tensors().items() if name not in rates}


def sums(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return a number for each, another once its values or their order are; waits for the device once."""
    found = [_sum(one) for one in tensors.values()]
    return torch.stack([one.to(found[0].device) for one in found]).tolist() if found else []


def _sum(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.view(WORDS[real.itemsize]).reshape(-1)
    weights = torch.arange(1, 1 + min(len(words), AT_A_TIME), dtype=torch.int64, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(AT_A_TIME)):
        total += (2 * number + 1) * (part.to(torch.int64) * weights[: len(part)]).sum()
    return total


def _are_same(one: Encoded, other: Encoded) -> bool:
    if one.tree != other.tree or one.tensors.keys() != other.tensors.keys():
        return False
    pairs = [(tensor, other.tensors[name]) for name, tensor in one.tensors.items()]
    return all(here.device.type != "cpu" or torch.equal(here, there) for here, there in pairs)


class AddIfNew:
    """An optimizer's add_param_group, but for groups that it has by now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._add = optimizer.add_param_group
        self._of_object = {name: own for name, own in vars(optimizer).items() if name == ADD}
        vars(optimizer)[ADD] = self

    def __call__(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else [*given]
        tensors = [one[1] if isinstance(one, tuple) else one for one in parameters]
        known = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        if not (tensors and known.issuperset(map(id, tensors))):
            self._add({**param_group, "params": parameters})

    def __reduce__(self) -> tuple[Any, ...]:
        """Be the method that the class has in a copy of the optimizer: nobody ends it there."""
        return getattr, (self._optimizer, ADD)

    def end(self) -> None:
        """Let the optimizer add as ever."""
        del vars(self._optimizer)[ADD]
        vars(self._optimizer).update(self._of_object)


def add_no_group_twice(optimizer: Optimizer) -> None:
    """Have a group that the restart has brought back stay as it is, where the script adds it once more."""
    if not isinstance(vars(optimizer).get(ADD), AddIfNew):
        AddIfNew(optimizer)


def add_groups_as_ever(optimizer: Optimizer) -> None:
    """End what add_no_group_twice does."""
    if isinstance(add := vars(optimizer).get(ADD), AddIfNew):
        add.end()


def add_no_group_twice_before_a_step(optimizers: Sequence[Optimizer]) -> None:
    """Do so in the iteration that a restart makes again, up to its first optimizer step."""
    for optimizer in optimizers:
        add_no_group_twice(optimizer)

    has_ended = False

    def end(*_: object) -> None:
        nonlocal has_ended
        if not has_ended:  # the hook stays: torch goes through its hooks while they are called
            has_ended = True
            for optimizer in optimizers:
                add_groups_as_ever(optimizer)

    register_optimizer_step_pre_hook(end)
