"""Masks that a training sets anew (torch.nn.utils.prune) by weights that no save holds.

Pruning goes by what the last forward pass has left in the module's attribute, which is made of the parameters
before the last step. A small one is kept as other attributes are.
"""

from collections.abc import Callable

from torch import Tensor, nn

from jitckpt.state import module_attributes
from jitckpt.state.plain_attributes import PlainAttributes
from jitckpt.state.unwrapping import unwrapped

PRUNED = (
    "The training prunes {names} once more. Where it chooses by the values of the weights, it goes by those "
    "that the last forward pass has left there. They are in no save, as they are too large: a restart that "
    "prunes again before its first forward pass may choose others. Give prune importance_scores= of the "
    "parameters themselves, such as module.weight_orig * module.weight_mask."
)


class Pruning:
    """Of one model; looked at as each step ends."""

    def __init__(self, model: nn.Module | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._masks: dict[tuple[str, str], tuple[nn.Module, Tensor | None]] = {}
        for path, module in [] if model is None else unwrapped(model).named_modules():
            for name in module._buffers:
                of = name.removesuffix("_mask")
                if of != name and module_attributes.is_derived(module, of):
                    self._masks[path, of] = module, module._buffers[name]
        self.is_looking = bool(self._masks)

    def step_ended(self, attributes: PlainAttributes) -> None:
        changed = [
            key
            for key, (module, mask) in self._masks.items()
            if module._buffers.get(f"{key[1]}_mask") is not mask
        ]
        lost = [".".join(key) for key in changed if not attributes.keeps(*key)]
        for key in changed:
            del self._masks[key]
        if lost:
            self._warn(PRUNED.format(names=", ".join(lost)))
