"""Hooks that torch.compile calls, but does not look into.

A compiled function that makes an optimizer step, or calls the model, has our hooks in it. Dynamo would trace
into them, and compile all that jitckpt does at a boundary, with guards on values that change each time: that
takes long, warns of what can't be traced, and uses up the recompilations that the training may need itself.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jitckpt.state.parallel import all_of

REASON = (
    "jitckpt counts the training's steps here. With fullgraph=True call torch.compile before jitckpt.init"
)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, at which a compiled function is cut. It costs less than a microsecond a call.

    What it needs of torch is loaded by every optimizer.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=REASON)
    return disabled


def left_out(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, of which compiled code has nothing: somebody else is told there."""

    def called(*arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*arguments)

    return called


def compiled_from(model: nn.Module) -> list[nn.Module]:
    """Return what torch.compile has made of a model that is still called what it was."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return []
    return [one for one in all_of(module.OptimizedModule) if one._orig_mod is model]
