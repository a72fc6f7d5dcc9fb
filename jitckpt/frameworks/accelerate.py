"""Hugging Face Accelerate: what was prepared is the state, and the loop is the script's own."""

import importlib
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from jitckpt.data import data_pass, progress_bars
from jitckpt.frameworks import (
    dispatched,
    local_sgd,
    own_checkpoints,
    protection,
    read_ahead,
    script_epochs,
    script_loops,
)
from jitckpt.frameworks.protection import FrameworkProtection
from jitckpt.frameworks.script_pass import ScriptPass
from jitckpt.wire import environment
from jitckpt.worker.self_check import comparison

# Methods of an Accelerator that write what is there already where an epoch is done.
WRITES = ("save_state", "save_model", "save", "log")

LOADS_BY = "load_state"
SKIPS = "SkipBatchSampler"

_accelerators: "weakref.WeakSet[Any]" = weakref.WeakSet()
_training: "AccelerateTraining | None" = None
_has_removed = False


def protect() -> None:
    """For programs that `jitckpt run` does not start itself: call it before Accelerator.prepare."""
    from accelerate import accelerator
    from accelerate import local_sgd as theirs

    install(accelerator)
    local_sgd.install(theirs)


@protection.once
def install(accelerator: ModuleType) -> None:
    """Have every Accelerator protect the training with what it has prepared."""
    from accelerate import data_loader

    kind = accelerator.Accelerator
    for fits_and_begin in ((read_ahead.is_read_ahead, read_ahead.begin), (dispatched.fits, dispatched.begin)):
        if fits_and_begin not in data_pass.OTHER_KINDS:
            data_pass.OTHER_KINDS.append(fits_and_begin)
    if kind not in comparison.KEPT_OTHERWISE:  # a function for a scheduler may ask it for the processes
        comparison.KEPT_OTHERWISE.append(kind)
    prepare_one, load_one, save_one = kind.prepare, kind.load_state, kind.save_state

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        _accelerators.add(self)
        script_epochs.watch(sys._getframe(1), _goes_on)
        return prepare_one(self, *args, **kwargs)

    def __iter__(self: Any) -> Iterator[Any]:
        iteration = _begin_pass(self, sys._getframe(1))
        return read_ahead.iterated(self) if iteration is None else iteration

    def load_state(self: Any, *args: Any, **kwargs: Any) -> None:
        handle = self.register_load_state_pre_hook(_loads)
        try:
            load_one(self, *args, **kwargs)
        finally:
            handle.remove()

    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.project_configuration.automatic_checkpoint_naming:
            _remove_later_ones(self)
        return save_one(self, *args, **kwargs)

    kind.prepare, kind.load_state, kind.save_state = prepare, load_state, save_state
    for loader in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        setattr(loader, read_ahead.ORIGINAL, loader.__iter__)
        loader.__iter__ = __iter__
    script_loops.unless_repeated(kind, (*WRITES, LOADS_BY))  # what it would load is older


def _remove_later_ones(accelerator: Any) -> None:
    """Remove numbered checkpoints that are made again: Accelerate refuses to save where one is.

    Only a start before has made them.
    """
    global _has_removed  # noqa: PLW0603
    current = protection.current()
    if _has_removed or current is None or (current.restored == 0 and environment.RESTART.get() == 0):
        return
    _has_removed = True
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        for folder in Path(accelerator.project_dir, "checkpoints").glob("checkpoint_*"):
            number = folder.name.rpartition("_")[2]
            if number.isdecimal() and int(number) >= accelerator.save_iteration:
                shutil.rmtree(folder, ignore_errors=True)
    accelerator.wait_for_everyone()


def _loads(models: list[nn.Module], folder: str) -> None:
    if _training is None:
        own_checkpoints.loaded(folder)


def _name() -> str:
    return f"accelerate {importlib.import_module('accelerate').__version__}"


def _begin_pass(loader: Any, frame: FrameType) -> ScriptPass | None:
    """Return the pass over a loader of training batches; None for another one, and without protection."""
    global _training  # noqa: PLW0603
    if not torch.is_grad_enabled() or progress_bars.makes_one(frame):
        return None
    of = next(
        (one for one in _accelerators if any(_is_or_skips(loader, known) for known in one._dataloaders)),
        None,
    )
    if of is None or not any(model.training for model in of._models):
        return None
    if _training is None and not protection.is_taken():
        _training = AccelerateTraining(of, frame, in_epochs=script_epochs.may_be_found())
        script_epochs.training_begins(_training.protection, frame)
    if _training is None or _training.protection is None or _training.accelerator is not of:
        return None
    return ScriptPass(_training.protection.job, loader, frame)


def _goes_on(frame: FrameType) -> FrameworkProtection | None:
    """Protect the training, where a restart comes to its loop over epochs."""
    global _training  # noqa: PLW0603
    script_epochs.end()
    of = next((one for one in _accelerators if one._models and one._optimizers), None)
    if of is None or _training is not None or protection.is_taken():
        return None
    _training = AccelerateTraining(of, frame, in_epochs=True)
    return _training.protection


def _is_or_skips(loader: Any, known: Any) -> bool:
    """Whether it is a loader that was prepared, or what skip_first_batches makes of one, over the same data.

    Another one over them may be an evaluation's, even where that takes gradients.
    """
    if loader is known:
        return True
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    skips = isinstance(loader.dataset, IterableDataset) or any(type(one).__name__ == SKIPS for one in parts)
    return skips and loader.dataset is known.dataset


class AccelerateTraining:
    """The training of one Accelerator; as `extra` of the job, what the Accelerator itself counts."""

    def __init__(self, accelerator: Any, frame: FrameType, *, in_epochs: bool) -> None:
        """frame: it iterates the loader, or has the loop over epochs. in_epochs: there is such a loop."""
        self.accelerator = accelerator
        refusal = script_loops.why_not(frame)
        self.protection: FrameworkProtection | None = None
        name = _name()
        if refusal is not None:
            protection.refuse(f"{name}: recognised, but not protected: {refusal}")
            return
        if accelerator.distributed_type == "DEEPSPEED" or not (
            accelerator._models and accelerator._optimizers
        ):
            protection.refuse(
                f"{name}: recognised, but not protected: Accelerator.prepare got no model and optimizer "
                "that train by themselves."
            )
            return
        models = accelerator._models
        self.protection = protection.begin(
            name,
            model=models[0] if len(models) == 1 else nn.ModuleList(models),
            optimizers=[protection.inner(one) for one in accelerator._optimizers],
            schedulers=[getattr(one, "scheduler", one) for one in accelerator._schedulers],
            scaler=accelerator.scaler,
            progress=self,
            left_out=script_loops.left_out(frame, LOADS_BY, in_epochs=in_epochs),
            keeps_variables=True,
            loads_by=LOADS_BY,
            keep="give an object with state_dict and load_state_dict that has them to "
            "accelerator.register_for_checkpointing",
        )

    def state_dict(self) -> dict[str, Any]:
        accelerator = self.accelerator
        return {
            "step": accelerator.step,
            "saves": accelerator.project_configuration.iteration,
            "sync_gradients": accelerator.gradient_state.sync_gradients,
            "custom": [one.state_dict() for one in accelerator._custom_objects],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        accelerator = self.accelerator
        accelerator.step = state["step"]
        accelerator.project_configuration.iteration = state["saves"]
        accelerator.gradient_state._set_sync_gradients(state["sync_gradients"])
        for one, of_one in zip(accelerator._custom_objects, state["custom"], strict=True):
            one.load_state_dict(of_one)
