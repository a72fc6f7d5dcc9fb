"""What `import torch` runs because jitckpt is installed (entry point group torch.backends)."""

import ctypes
from pathlib import Path

from jitckpt.system import signals
from jitckpt.wire import environment
from jitckpt.worker.ends import mistakes

# The variables that `begin` goes by.
VARIABLES = (environment.STEPS_RECORD.name, environment.MODE.name)


def load() -> None:
    """Put softgpu's operators and jitckpt's hooks in place where the environment asks for them.

    Raises OSError if softgpu is preloaded but its operators cannot be loaded: without them every operator on
    the device would fail.
    """
    _load_operators()
    begin()


def begin() -> None:
    """Put the hooks of this rank in place that its environment asks for: a spare has it only at its order."""
    signals.hold_still()
    signals.hold_still_in_loaders()
    mistakes.watch()
    if folder := environment.STEPS_RECORD.get():
        from jitckpt.worker.in_place import step_record

        step_record.begin(folder)
    if environment.MODE.get() == "transparent":
        from jitckpt.worker.in_place import keeper

        keeper.begin()


def _load_operators() -> None:
    if not hasattr(ctypes.CDLL(None), "softgpu_shadow"):
        return
    import torch

    operators = Path(__file__).parents[1] / "lib" / "libsoftgpu_aten.so"
    if not operators.exists():
        raise OSError(f"softgpu is preloaded, but its operators are not installed: there is no {operators}")
    torch.ops.load_library(operators)
