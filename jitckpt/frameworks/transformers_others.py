"""What a Trainer of the script's own trains beside its model: networks with optimizers of their own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jitckpt.frameworks import protection

TAKEN_AS_ONE = (
    "{names} of the Trainer makes steps beside its own optimizer. All these are one minibatch: a "
    "failure between them leaves nothing to save, and the job goes back to an older save. To have one, start "
    "it with `jitckpt run --save-every N`."
)


@dataclass(frozen=True)
class Others:
    """In attributes of a Trainer, also in lists and dicts there."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)


def found_in(trainer: Any, model: nn.Module) -> Others:
    """Return what is there besides its model, optimizer and scheduler; name optimizers."""
    others, names = Others(), []
    known = {id(one) for whole in (model, trainer.model) for one in whole.modules()}
    known |= {id(protection.inner(trainer.optimizer)), id(_scheduler(trainer.lr_scheduler))}
    for name, value in [*vars(trainer).items()]:
        for part in _parts(value):
            one = _scheduler(protection.inner(part))
            if id(one) in known:
                continue
            if isinstance(one, Optimizer):
                others.optimizers.append(one)
                names.append(name)
            elif isinstance(one, LRScheduler):
                others.schedulers.append(one)
            elif isinstance(one, nn.Module) and any(weight.requires_grad for weight in one.parameters()):
                others.modules.append(one)
            else:
                continue
            known.add(id(one))
    if names:
        protection.tell(TAKEN_AS_ONE.format(names=", ".join(dict.fromkeys(names))))
    return others


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield value


def _scheduler(one: Any) -> Any:
    """Return torch's scheduler inside of Accelerate's."""
    return one.scheduler if type(one).__name__ == "AcceleratedScheduler" else one
