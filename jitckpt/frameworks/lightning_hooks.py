"""Hooks that make Lightning's loaders (`train_dataloader`, `val_dataloader`), which a restart calls again.

These hooks may count, and draw random numbers for their data or for the order of these. So what they find
is kept of each one's newest call: attributes, the datamodule's state, and random numbers. A restart has
Lightning call them in the same order, each as it was called then, before what was there after the restored
step is put back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from jitckpt.data import generators
from jitckpt.frameworks import protection
from jitckpt.state.plain_attributes import PlainAttributes

READS_MODEL = (
    "{hook} makes its data with a model. A restart calls it once more, with the model as it is then and not "
    "as it was: data and training would differ. Have a callback make them and keep them in an attribute, or "
    "make them before the training."
)
TRAINER = "trainer"  # among what keeps attributes: callbacks look at it as the training begins
HOOKS = ("train_dataloader", "val_dataloader")
# In which epochs the loaders were made, by which reload_dataloaders_every_n_epochs goes.
RELOADED = ("_last_train_dl_reload_epoch", "_last_val_dl_reload_epoch")
NEVER = float("-inf")


class LoaderHooks:
    """Those of one fit."""

    def __init__(self, trainer: Any, attributes: PlainAttributes) -> None:
        self._trainer, self._attributes = trainer, attributes
        self._loops = dict(zip(HOOKS, (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop), strict=True))
        self._found: dict[str, dict[str, Any]] = {}  # by the newest call of each, in their order

    def state(self) -> dict[str, Any]:
        """Return what the newest calls found, and the epochs of these."""
        epochs = [getattr(loop, name) for loop, name in zip(self._loops.values(), RELOADED, strict=True)]
        return {
            "found": [[*one] for one in self._found.items()],
            "epochs": [None if epoch == NEVER else epoch for epoch in epochs],
        }

    def set_up(self, call: Callable[[], Any], loop: Any) -> None:
        """Let a loop ask for its loaders, if it needs any; keep what the hook that makes them finds."""
        name = next((hook for hook, one in self._loops.items() if one is loop), None)
        if name is None:  # of a validation that is no part of the training
            call()
            return
        found = self._now()
        before, reads = loop._combined_loader, list[None]()
        handle = register_module_forward_pre_hook(lambda *_: reads.append(None))
        try:
            call()
        finally:
            handle.remove()
        if loop._combined_loader is before:
            return
        self._found.pop(name, None)  # it is the last one now
        self._found[name] = found
        if reads:
            protection.tell(READS_MODEL.format(hook=name))

    def call_again(self, saved: dict[str, Any]) -> None:
        """Have the loaders of the restored step made, as its epoch is known."""
        if not saved:
            return  # of a version before
        datamodule = self._trainer.datamodule
        for name, found in saved["found"]:
            if datamodule is not None and found["datamodule"]:
                datamodule.load_state_dict(found["datamodule"])
            self._attributes.restore(found["attributes"])
            generators.put_all(bytes(found["random"].cpu().numpy().tobytes()))
            self._loops[name]._combined_loader = None  # one that was made before the training began
            self._loops[name].setup_data()
        self._found = dict(saved["found"])
        for loop, name, epoch in zip(self._loops.values(), RELOADED, saved["epochs"], strict=True):
            setattr(loop, name, NEVER if epoch is None else epoch)

    def _now(self) -> dict[str, Any]:
        datamodule = self._trainer.datamodule
        return {
            "attributes": {path: of for path, of in self._attributes.changed().items() if path != TRAINER},
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "random": torch.frombuffer(bytearray(generators.all_packed()), dtype=torch.uint8),
        }
