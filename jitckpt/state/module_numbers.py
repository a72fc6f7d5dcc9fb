"""Notices numbers that a model's modules keep in plain attributes and change: no save holds those.

A module's state is its parameters, buffers and extra state. A counter in an attribute (for an annealing, say)
is as the script builds it after a restart, and nobody would hear of that. So it is named in the first steps.
"""

from torch import nn

LOOKED_STEPS = 4  # of a start: what changes in one of the first minibatches is seen


class ModuleNumbers:
    """Of one model, since this was made of it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if not type(module).__module__.startswith("torch.")
            and type(module).get_extra_state is nn.Module.get_extra_state
        ]
        self._looks = 0
        self._first = self._numbers()

    def changed(self) -> list[str]:
        """Return clauses that name those that have changed; after the first looks it looks no more."""
        if self._looks >= LOOKED_STEPS:
            return []
        self._looks += 1
        now = self._numbers()
        return [
            f"the attribute {name!r} of {type(module).__qualname__}{f' ({path})' if path else ''}"
            for (path, module), before, after in zip(self._modules, self._first, now, strict=True)
            for name, value in after.items()
            if name in before and before[name] != value
        ]

    def _numbers(self) -> list[dict[str, int | float | complex]]:
        return [
            {
                name: value
                for name, value in vars(module).items()
                if type(value) in (int, float, complex) and not name.startswith("_")
            }
            for _, module in self._modules
        ]
