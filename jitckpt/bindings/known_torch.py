"""The part of jitckpt that is built with one torch and knows no other (native/seen): whether it is here."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator

try:
    from jitckpt import _tensors
except ImportError:  # it was built without torch, or this torch lacks what it was built with
    is_here = False
else:
    is_here = _tensors.torch_version == torch.__version__.split("+")[0]


def counter_of(generator: Generator) -> Callable[[], bytes] | None:
    """Return what returns seed and offset of a CUDA device's generator, 64 bits each; None: nothing does."""
    return partial(_tensors.counter, generator) if is_here else None
