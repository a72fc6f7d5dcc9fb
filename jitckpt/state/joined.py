"""A model together with averages of its weights, as one module whose state is kept as one.

The model stands under the empty name, so that all in it is called as it is without averages.
"""

from collections.abc import Collection

from torch import nn

AVERAGES = "_averages"


def joined(model: nn.Module, averages: Collection[nn.Module]) -> nn.Module:
    """Return the model, with averages if there are any."""
    if not averages:
        return model
    both = nn.Module()
    both._modules |= {"": model, AVERAGES: nn.ModuleList(averages)}
    return both


def is_of_average(name: str) -> bool:
    """Whether a parameter or a buffer of that name is an average's."""
    return name.startswith(f"{AVERAGES}.")
