"""Looks whether libraries choose by the clock how they compute: after a restart they may choose otherwise."""

import sys
from collections.abc import Callable

import torch
from torch import nn

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
CHOSEN = (
    "{what}. Each process measures anew which way is the fastest, so after a restart this run may differ "
    "from an undisturbed one in the last bits, as two undisturbed runs may. {how}"
)
CUDNN = "torch.backends.cudnn.benchmark is on, so cuDNN chooses by time how it convolves"
INDUCTOR = "Inductor's max_autotune is on, so torch.compile chooses kernels by time"
CUDNN_HOW = "Set it to False, and torch.backends.cudnn.deterministic to True, for the same bits."
INDUCTOR_HOW = "Leave it out for the same bits."


class ChosenByTime:
    """Looked at once, as the first step ends: by then a script has set what it sets."""

    def __init__(self, model: nn.Module | None, warn: Callable[[str], None]) -> None:
        self._model: nn.Module | None = model
        self._warn = warn
        self.has_looked = False

    def step_ended(self) -> None:
        if self.has_looked:
            return
        self.has_looked = True
        cudnn = torch.backends.cudnn
        if cudnn.benchmark and cudnn.enabled and cudnn.is_available() and self._is_convolving():
            self._warn(CHOSEN.format(what=CUDNN, how=CUDNN_HOW))
        if getattr(sys.modules.get("torch._inductor.config"), "max_autotune", False):
            self._warn(CHOSEN.format(what=INDUCTOR, how=INDUCTOR_HOW))

    def _is_convolving(self) -> bool:
        return self._model is not None and any(isinstance(one, CONVOLUTIONS) for one in self._model.modules())
