"""For frameworks that leave the loop to the script: its position is that of its loaders, and nothing else
tells it.

So a restart runs the script from its beginning, a pass over the training batches that was done comes again
without batches, and the one in which the job failed goes on behind the last batch. What the script does
beside its batches in epochs that are done it does again; what the framework would write then (checkpoints,
logs) is left out, as it is there already.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from jitckpt.data import progress_bars
from jitckpt.frameworks import own_checkpoints, protection
from jitckpt.system.bytecode import place_in

LEFT_OUT = "evaluations in epochs that are done are made again"

STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"

_begin_pass: list[Callable[[Any, FrameType], Iterator[Any] | None]] = []


def left_out(frame: FrameType, method: str, *others: str, in_epochs: bool) -> str:
    """Return what is not protected. method: what the script loads checkpoints of the framework's own by.

    in_epochs: a restart goes on in the script's loop over epochs (script_epochs.py).
    """
    parts = [*([] if in_epochs else [LEFT_OUT]), *others, own_checkpoints.left_out(frame, method)]
    return "; ".join(part for part in parts if part)


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


def why_not(frame: FrameType | None) -> str | None:
    """Return why a loop can't go on whose loader is iterated from this frame, if so.

    A loop over numbers that draws batches beside them begins with the first number again.
    """
    while frame is not None and progress_bars.is_in_one(frame):
        frame = frame.f_back
    if frame is None:
        return None
    doing = dis.opname[frame.f_code.co_code[place_in(frame)]] if frame.f_lasti >= 0 else ""
    by_hand = doing.startswith("CALL") and {"iter", "cycle"} & {*frame.f_code.co_names}
    if by_hand or frame.f_code.co_flags & inspect.CO_GENERATOR:
        return (
            "the script draws its batches by next(), and its own loop alone counts the steps. Write "
            "`for batch in loader:`, or call jitckpt.init and take job.steps (docs/guides/user-level.md)."
        )
    return None


def when_iterated(begin_pass: Callable[[Any, FrameType], Iterator[Any] | None]) -> None:
    """Ask for what to iterate in the place of each loader of torch's or torchdata's; None: the loader itself.

    It is given the loader, and the frame that iterates it.
    """
    _begin_pass.append(begin_pass)
    if len(_begin_pass) == 1:
        _ask_before(DataLoader)
        if (torchdatas := sys.modules.get(STATEFUL)) is not None:
            install(torchdatas)


@protection.once
def install(stateful_dataloader: ModuleType) -> None:
    """Ask for torchdata's loader as for torch's, whose subclass it is with an `__iter__` of its own."""
    _ask_before(stateful_dataloader.StatefulDataLoader)


def _ask_before(kind: Any) -> None:
    plain = kind.__iter__

    def iterate(loader: Any) -> Any:
        frame = sys._getframe(1)
        # A pass that stands in the loader's place iterates it in its turn.
        is_own = frame.f_globals.get("__name__", "").startswith("jitckpt.data.")
        if torch.is_grad_enabled() and not is_own and not progress_bars.makes_one(frame):
            for begin in _begin_pass:
                if (iteration := begin(loader, frame)) is not None:
                    return iteration
        return plain(loader)

    kind.__iter__ = iterate
