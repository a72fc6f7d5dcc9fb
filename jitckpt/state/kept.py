"""What trains along though jitckpt.init was not given it, and is kept as if it had been.

Found once, among all objects that there are. It has no name in the script, so it goes by one that its class
and what it belongs to make up. Two that would have the same name are kept neither: nothing tells after a
restart which is which (the garbage collector changes the order of objects).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import TreeError
from jitckpt.state import parallel
from jitckpt.state.unwrapping import unwrapped

SCALER = "the gradient scaler"
AVERAGE = "the average of the model, AveragedModel"


class Kept(NamedTuple):
    """By what a save calls them. scaler: None for none."""

    schedulers: Mapping[str, LRScheduler] = MappingProxyType({})
    scaler: GradScaler | None = None
    average: AveragedModel | None = None

    def objects(self) -> list[object]:
        others = [one for one in (self.scaler, self.average) if one is not None]
        return [*self.schedulers.values(), *others]

    def averages(self) -> list[nn.Module]:
        return [] if self.average is None else [self.average]

    def document(self) -> dict[str, Json]:
        """Return what a save says of them, beside their states."""
        return {
            "schedulers": [*self.schedulers],
            "scaler": self.scaler is not None,
            "average": self.average is not None,
        }

    def names(self) -> list[str]:
        return names_in(self.document())


NOTHING = Kept()


def names_in(document: Mapping[str, Json]) -> list[str]:
    """Return the names of what a save holds of such objects; of one without `Kept.document` none."""
    others = [name for name, key in ((SCALER, "scaler"), (AVERAGE, "average")) if document.get(key)]
    return [*document.get("schedulers", []), *others]


def find(
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Collection[object],
    scaler: object,
    extra: Any,
) -> Kept:
    """Return what is kept beside the given ones. Looks through all objects: for once.

    What `extra` says of schedulers, a scaler or an average it may say of these: then they are left to it.
    """
    every = parallel.all_of(LRScheduler, GradScaler, AveragedModel)
    said = "" if extra is None else tree_codec.to_json(tree_codec.encode(extra.state_dict(), "extra").tree)
    found = [one for one in every if isinstance(one, LRScheduler)] if '"last_epoch"' not in said else []
    known = {id(part) for one in (*found, *schedulers) for part in _parts(one)} | {*map(id, schedulers)}
    called = [
        (f"the scheduler of optimizer {number}, {type(one).__qualname__}", one)
        for one in found
        for number, optimizer in enumerate(optimizers)
        if one.optimizer is optimizer and id(one) not in known and _can_be_saved(one)
    ]
    times = Counter(name for name, _ in called)
    scalers = [one for one in every if isinstance(one, GradScaler) and one.is_enabled()]
    is_only = scaler is None and len(scalers) == 1 and '"growth_factor"' not in said
    # In an order that is the same in every start.
    alone = sorted((pair for pair in called if times[pair[0]] == 1), key=lambda pair: pair[0])
    averages = [one for one in every if isinstance(one, AveragedModel) and model is not None]
    averages = [one for one in averages if _is_beside(one, model)] if '"n_averaged"' not in said else []
    average = averages[0] if len(averages) == 1 else None
    return Kept(dict(alone), scalers[0] if is_only else None, average)


def _is_beside(average: AveragedModel, model: Any) -> bool:
    """Whether it is an average of this model, and no part of it."""
    if any(one is average for one in model.modules()):
        return False
    own = parallel.parameters(unwrapped(model))
    averaged = parallel.parameters(unwrapped(average.module))
    every = [*own.values(), *averaged.values()]
    # On the host it may be steps ahead of the model's device.
    is_together = len({one.device for one in every}) == 1
    return own.keys() == averaged.keys() and is_together and all(map(parallel.is_plain, every))


def _parts(one: object) -> Iterator[object]:
    """Yield the schedulers inside of one."""
    for value in getattr(one, "__dict__", {}).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, LRScheduler):
                yield part


def _can_be_saved(scheduler: LRScheduler) -> bool:
    try:
        tree_codec.encode(scheduler.state_dict(), "scheduler")
    except (TreeError, AttributeError):  # or one whose class has not made it whole
        return False
    return True
