"""Where frameworks add up gradients in memory of their own, which holds nothing between two minibatches.

DeepSpeed's third stage of ZeRO has a bucket of `reduce_bucket_size` elements, 2 GB by default, however small
the model is. Gradients are written there, reduced, and taken from there before the optimizer's step. A
validation finds out whether that is true: it fills what no image has.
"""

import struct
import sys
import weakref
from typing import Any

from torch import Tensor

from jitckpt.state import parallel
from jitckpt.worker.in_place import naming

_MODULE, _CLASS = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"


class Scratch:
    """Of the frameworks' objects that there were at the first question."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] | None = None

    def extents(self) -> bytes:
        """Return address and bytes, 64 bits each, of all that is empty now."""
        if self._optimizers is None:
            kind = getattr(sys.modules.get(_MODULE), _CLASS, None)
            self._optimizers = [] if kind is None else [*map(weakref.ref, parallel.all_of(kind))]
        return b"".join(
            [
                struct.pack("=QQ", address, size)
                for one in self._optimizers
                if (optimizer := one()) is not None
                for address, size in map(naming.extent, _buckets(optimizer))
                if size
            ]
        )


def _buckets(optimizer: Any) -> list[Tensor]:
    """Return the empty ones of an optimizer; another version of DeepSpeed may have none that we know."""
    known = getattr(optimizer, "ipg_buckets", None)
    if not isinstance(known, dict):
        return []
    return [
        bucket.buffer
        for bucket in known.values()
        if isinstance(getattr(bucket, "buffer", None), Tensor) and getattr(bucket, "elements", None) == 0
    ]
