"""Schedulers and a gradient scaler that jitckpt.init was not given, but that a save function may read.

They are found among the objects that there are, and their states of the last steps are kept beside those of
the objects that were given. A restart leaves them to the script, whose save function has written them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jitckpt.encoding.tensor_file import to_host
from jitckpt.errors import SaveError
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.presented import presented


class Found:
    """Told of each step by the training thread; `presented` is for the saver."""

    def __init__(self, schedulers: Sequence[LRScheduler], scaler: Any) -> None:
        self.host = HostState(
            model=None, optimizers=[], schedulers=schedulers, scaler=scaler, extra=None, device=None
        )
        self._history = History(self.host)

    def add(self, step: int) -> None:
        self._history.add(step, self.host.shared())

    def settle(self, step: int) -> None:
        self._history.settle(step)

    def settle_again(self, step: int) -> None:
        self._history.settle_again(step)

    def step_begins(self, step: int) -> None:
        self._history.step_begins(step)

    @property
    def is_irregular(self) -> bool:
        return self._history.is_irregular

    def may_come(self, step: int) -> bool:
        return self._history.may_come(step)

    def may_lack(self, step: int) -> bool:
        return self._history.may_lack(step)

    def forget_before(self, step: int) -> None:
        self._history.forget_before(step)

    @contextmanager
    def presented(self, step: int, optimizers_restored: bool) -> Iterator[None]:
        """Until the `with` statement is left, they say what they did after this step.

        optimizers_restored: a restart puts the hyperparameters back, as they are without steps that are due.
        Raises SaveError if that is not known.
        """
        snapshot = self._history.snapshot(step)
        if snapshot is None:
            raise SaveError(f"What the training's schedulers were after step {step} is kept no more.")
        if optimizers_restored and any(snapshot.scheduler_steps_due):
            raise SaveError(
                f"A scheduler that jitckpt.init was not given is still to be stepped after step {step}: give "
                "it to jitckpt.init (scheduler=...), which then takes care of that."
            )
        document = {
            "step": step,
            "optimizers": [],
            "progress": snapshot.progress.tree,
            "scheduler_steps_due": snapshot.scheduler_steps_due,
            "scaler": self.host.scaler_state(snapshot.scaler_update_due),
            "local": {"trees": {}},
        }
        tensors = {name: to_host(tensor) for name, tensor in snapshot.progress.tensors.items()}
        with presented(self.host, snapshot, document, tensors):
            yield


def several_optimizers(unexpected: Optimizer) -> str:
    """Return the sentence about an optimizer that makes no minibatch with those that were found."""
    return (
        "jitckpt.init was not given the optimizers, and they do not make one step each in every minibatch: "
        f"{type(unexpected).__name__} with {sum(len(group['params']) for group in unexpected.param_groups)} "
        "parameters made one that was not expected, so there is no saying which step the device has ended. "
        "Give them to jitckpt.init (optimizer=[...])."
    )


def look(known: Iterable[object], scaler: Any) -> Found | None:
    """Return all schedulers but the known ones and those that are part of another; None if there is nothing.

    Looks through all objects: for once.
    """
    every: list[LRScheduler] = parallel.all_of(LRScheduler)
    parts = {id(part) for one in every for part in getattr(one, "_schedulers", ())} | {*map(id, known)}
    parts |= {id(part) for one in known for part in getattr(one, "_schedulers", ())}
    found = [one for one in every if id(one) not in parts]
    return Found(found, scaler) if found or scaler is not None else None


def buffers_of(optimizers: Iterable[Optimizer]) -> list[str]:
    """Return the buffers of all modules whose own parameters these optimizers have: class and name.

    Looks through all objects: for once.
    """
    own = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    names: dict[str, None] = {}
    for module in parallel.all_of(nn.Module):
        if any(id(parameter) in own for parameter in module._parameters.values()):
            for name in module._buffers.keys() - module._non_persistent_buffers_set:
                names[f"{type(module).__name__}.{name}"] = None
    return sorted(names)
