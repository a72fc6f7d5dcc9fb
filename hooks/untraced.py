"""Hooks that torch.compile calls, but does not look into.

A compiled function that makes an optimizer step, or calls the model, has our hooks in it. Dynamo would trace
into them, and compile all that jitckpt does at a boundary, with guards on values that change each time: that
takes long, warns of what can't be traced, and uses up the recompilations that the training may need itself.
"""

from collections.abc import Callable
from typing import Any

import torch

REASON = (
    "jitckpt counts the training's steps here. With fullgraph=True give jitckpt.init what torch.compile "
    "returned, not the model inside of it"
)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, at which a compiled function is cut. It costs less than a microsecond a call.

    What it needs of torch is loaded by every optimizer.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=REASON)
    return disabled
