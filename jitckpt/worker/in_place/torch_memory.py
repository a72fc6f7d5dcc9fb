"""What torch keeps of the device's memory that none of its tensors in Python show, and where those lie, fast:
libjitckpt_torch knows.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from jitckpt._seen import Seen
from jitckpt.bindings import torch_library
from jitckpt.bindings.torch_library import BucketExtents
from jitckpt.device import LIBRARY_DIR
from jitckpt.state import parallel

MOST_BUCKETS = 64  # of one module, in the first try


class UnknownTorch(RuntimeError):
    """The library does not know this torch; the text is a clause."""


@functools.cache
def library() -> Any:
    """Return libjitckpt_torch; its calls are made with Python's lock. Raises UnknownTorch."""
    found = torch_library.opened(LIBRARY_DIR / "libjitckpt_torch.so")
    here, known = torch.__version__.split("+")[0], found.jitckpt_torch_version().decode()
    if here != known:
        raise UnknownTorch(f"jitckpt was built for torch {known}, and this is {here}: install it again")
    return found


def steady_step(
    seen: Seen,
    parameters: list[Tensor],
    versions: bytearray,
    *,
    buckets: "Buckets",
    places: bytes,
    digest: int,
    needs_gradients: bool,
) -> Any:
    """Return what does in one call what there is to do for a step that is as the one that has just ended.

    seen: tells that the state has the same tensors. versions: of the parameters (jitckpt._seen.versions); it
    is where they are put after each step. places, digest: of the state, as the proxy is told of
    them. needs_gradients: an image has gradients and buckets, too. None where that can't be.
    """
    try:
        make = library().jitckpt_torch_steady_step
    except UnknownTorch:  # which is said where the allocator is asked what is free
        return None
    count = len(places) // torch_library.EXTENT_BYTES
    return make(seen, tuple(parameters), versions, buckets.modules(), places, count, digest, needs_gradients)


class Buckets:
    """Where DistributedDataParallel adds up gradients, of the modules that there were at the first question.

    A backward pass that adds any up writes all of a bucket before it reads it: so it holds nothing that a
    later minibatch needs. Where buckets are the gradients themselves (gradient_as_bucket_view) none are told.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[DistributedDataParallel]] | None = None
        self._library: Any = None
        self._extents = BucketExtents(MOST_BUCKETS)

    def modules(self) -> list[weakref.ref[DistributedDataParallel]]:
        """Return those of which it is known where their buckets lie."""
        if self._modules is None:
            self._modules = [*map(weakref.ref, parallel.all_of(DistributedDataParallel))]
            try:
                if self._modules:
                    self._library = library()
            except UnknownTorch:  # which is said where the allocator is asked what is free
                self._modules = []
        return self._modules

    def extents(self) -> bytes:
        """Return address and bytes of each, 64 bits each."""
        return b"".join(
            [
                self._extents.of(self._library, module.reducer)
                for one in self.modules()
                if (module := one()) is not None
            ]
        )
