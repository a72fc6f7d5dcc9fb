"""What `import torch` runs because jitckpt is installed (entry point group torch.backends)."""

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType

from jitckpt.bindings import symbols
from jitckpt.console import say
from jitckpt.system import signals
from jitckpt.system.imports import when_imported
from jitckpt.wire import environment
from jitckpt.worker.ends import mistakes

# The variables that `begin` goes by.
VARIABLES = tuple(
    variable.name for variable in (environment.STEPS_RECORD, environment.MODE, environment.FRAMEWORKS)
)
# By the module that a framework's training needs: what protects it, imported when that is. They stand above
# this room, which so has them by name alone, as if they were entry points of other packages.
FRAMEWORKS = {
    "accelerate.accelerator": "jitckpt.frameworks.accelerate",
    "accelerate.local_sgd": "jitckpt.frameworks.local_sgd",
    "transformers.trainer": "jitckpt.frameworks.transformers",
    "lightning.pytorch.trainer.trainer": "jitckpt.frameworks.lightning",
    "deepspeed.runtime.engine": "jitckpt.frameworks.deepspeed",
    "megatron.core.optimizer": "jitckpt.frameworks.megatron",
    "pytorch_lightning.trainer.trainer": "jitckpt.frameworks.lightning",
    "torchtitan.components.checkpoint": "jitckpt.frameworks.torchtitan",
    # Another loader of theirs.
    "torchdata.stateful_dataloader.stateful_dataloader": "jitckpt.frameworks.script_loops",
}


IDLE = "jitckpt.frameworks.idle"  # says so where no training of theirs is protected


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
    mode = environment.MODE.get()
    if mode == "user":
        from jitckpt.hooks import captured_graphs

        captured_graphs.watch()
    if mode == "user" and environment.FRAMEWORKS.get():
        when_imported({name: partial(_protect, adapter) for name, adapter in FRAMEWORKS.items()})
    if mode == "transparent":
        from jitckpt.worker.in_place import keeper

        keeper.begin()


def _protect(adapter: str, framework: ModuleType) -> None:
    """Let what protects a framework's trainings get in place; the framework is there in any case."""
    try:
        importlib.import_module(adapter).install(framework)
        importlib.import_module(IDLE).watch(framework)
    except Exception as error:  # a framework of another version may lack anything
        say(f"trainings of {framework.__name__} are not protected: this version is not known: {error!r}")


def _load_operators() -> None:
    if symbols.with_name("softgpu_shadow") is None:
        return
    import torch

    operators = Path(__file__).parents[1] / "lib" / "libsoftgpu_aten.so"
    if not operators.exists():
        raise OSError(f"softgpu is preloaded, but its operators are not installed: there is no {operators}")
    torch.ops.load_library(operators)
