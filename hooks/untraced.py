"""Hooks that torch.compile calls, but does not look into.

A compiled function that makes an optimizer step, or calls the model, has our hooks in it. Dynamo would trace
into them, and compile all that jitckpt does at a boundary, with guards on values that change each time: that
takes long, warns of what can't be traced, and uses up the recompilations that the training may need itself.

torch's own way to keep it out takes five calls in Python, at six hooks a step. They are of use where compiled
code is running; where torch says that there is none, the hook is called at once.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from jitckpt import _seen
from jitckpt.state.parallel import all_of

REASON = (
    "jitckpt counts the training's steps here. With fullgraph=True call torch.compile before jitckpt.init"
)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, at which a compiled function is cut.

    What it needs of torch is loaded by every optimizer.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=REASON)
    try:
        compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # of the code that runs now, if any
    except AttributeError:  # this torch does not tell, and has its own way alone
        return disabled
    _tell_compiler()
    return partial(_seen.call_if_none, compiler, hook, disabled)


@cache
def _tell_compiler() -> None:
    """Let torch.compile, which can't look into C, know where it is to cut."""

    def instead(compiler: object, hook: object, disabled: Callable[..., Any], /, *arguments: Any) -> Any:
        return disabled(*arguments)

    torch.compiler.substitute_in_graph(_seen.call_if_none, skip_signature_check=True)(instead)


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
