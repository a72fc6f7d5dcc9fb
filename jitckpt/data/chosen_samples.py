"""Which samples a Subset has that the script chooses inside of its loop, as an epoch begins.

By the model's losses, say: after a restart in the middle of the epoch the same lines would choose others. So
what was chosen is kept with the pass. A Subset from before the loop every start makes alike.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from jitckpt.data.generators import samplers
from jitckpt.encoding import packed, tree_codec

MOST = 1 << 17  # samples: more would be copied in each step for too long
TOO_MANY = (
    "A Subset of {count} samples is made inside of the loop, and only the choice of up to {most} is kept: if "
    "it follows from the training's values, and not from the epoch's number alone, a restart in the middle "
    "of the epoch would choose others. Choose fewer, or keep the indices in `extra`."
)
_made: WeakSet[Any] = WeakSet()
_plain: Callable[..., None] = Subset.__init__
_is_watched = False


def watch() -> None:
    """From now on a Subset that is made is one of the loop's, in this process."""
    global _is_watched  # noqa: PLW0603
    if not _is_watched:
        _is_watched = True
        Subset.__init__ = _init  # type: ignore[method-assign,assignment]


def _init(subset: Any, *arguments: Any, **named: Any) -> None:
    _plain(subset, *arguments, **named)
    _made.add(subset)


def chosen(dataset: object, warn: Callable[[str], None]) -> bytes:
    """Return what was chosen, packed; nothing of what is no choice of the loop's."""
    if not isinstance(dataset, Subset) or dataset not in _made:
        return b""
    indices: Any = dataset.indices
    if len(indices) > MOST:
        warn(TOO_MANY.format(count=len(indices), most=MOST))
        return b""
    values = indices if isinstance(indices, torch.Tensor) else torch.from_numpy(numpy.asarray(indices, int))
    return packed.pack(tree_codec.encode(values.to("cpu", torch.int32), "chosen"))


def choose_again(loader: DataLoader[Any], kept: bytes) -> None:
    """Have a loader's Subset what `chosen` returned."""
    dataset: Any = loader.dataset
    if not kept or not isinstance(dataset, Subset):
        return
    here: Any = dataset.indices
    values: Any = packed.unpack(kept)
    if isinstance(here, torch.Tensor):
        values = values.to(here.device, here.dtype)
    elif isinstance(here, numpy.ndarray):
        values = values.numpy().astype(here.dtype)
    else:
        values = values.tolist()
    dataset.indices = values
    for one in samplers(loader):
        if isinstance(one, DistributedSampler) and one.dataset is dataset:  # it has counted the others
            epoch = one.epoch
            DistributedSampler.__init__(
                one, dataset, one.num_replicas, one.rank, one.shuffle, one.seed, one.drop_last
            )
            one.epoch = epoch
