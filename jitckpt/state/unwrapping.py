"""The module inside of what wraps it."""

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile, whose names are the same with and without them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
