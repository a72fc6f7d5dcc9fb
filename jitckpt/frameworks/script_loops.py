"""For frameworks that leave the loop to the script: its position is that of its loaders, and nothing else tells it.

So a restart runs the script from its beginning, a pass over the training batches that was done comes again
without batches, and the one in which the job failed goes on behind the last batch. What the script does beside
its batches in epochs that are done it does again; what the framework would write then (checkpoints, logs) is
left out, as it is there already.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from jitckpt.frameworks import protection

LEFT_OUT = (
    "variables of the script's own loop, such as counters; evaluations in epochs that are done are made again"
)

_begin_pass: list[Callable[[Any], Iterator[Any] | None]] = []


def unless_repeated(kind: type, names: tuple[str, ...]) -> None:
    """Let these methods do nothing while a restart runs through epochs that are done."""
    for name in names:
        setattr(kind, name, _unless_repeated(getattr(kind, name)))


def _unless_repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = protection.current()
        if current is not None and current.job.loop.is_repeating:
            return None
        return method(self, *args, **kwargs)

    return write


def when_iterated(begin_pass: Callable[[Any], Iterator[Any] | None]) -> None:
    """Ask for what to iterate in the place of each of torch's loaders; None: the loader itself."""
    _begin_pass.append(begin_pass)
    if len(_begin_pass) > 1:
        return
    plain = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Any:
        if torch.is_grad_enabled():
            for begin in _begin_pass:
                if (iteration := begin(loader)) is not None:
                    return iteration
        return plain(loader)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
