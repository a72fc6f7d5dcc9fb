"""Notices numbers that a model's modules keep in plain attributes and change, and their training mode.

A module's state is its parameters, buffers and extra state. A counter in an attribute (for an annealing, say)
is as the script builds it after a restart, and nobody would hear of that. So it is named: whole numbers in
the first steps, as later they may be the size of a last batch; others, and whether a module is in training
mode, whenever they change.
"""

from typing import Any

from torch import nn

from jitckpt._seen import Seen

LOOKED_STEPS = 4  # of a start: what changes in one of the first minibatches is seen
EACH = 8  # of the steps after these is looked at, which takes 0.1 us a module
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
SHOWN = 3  # names of modules
MOST_MODES = 3  # changes of modes that are named: after these they go on so


class ModuleNumbers:
    """Of one model, since this was made of it."""

    def __init__(self, model: nn.Module) -> None:
        self._every = [*model.named_modules()]
        self._modules = [
            (name, module)
            for name, module in self._every
            if (not type(module).__module__.startswith("torch.") or isinstance(module, DROPOUTS))
            and type(module).get_extra_state is nn.Module.get_extra_state
        ]
        self._looks = 0
        self._first = [_numbers(module) for _, module in self._modules]
        self._modes: list[bool] = []
        self._mode_changes = 0
        self._said: set[tuple[int, str]] = set()  # modules, by number, and attributes
        self._seen: Seen | None = None

    def changed(self) -> list[str]:
        """Return clauses that name those that have changed since the last call, after a step."""
        self._looks += 1
        if self._looks > LOOKED_STEPS and (self._looks % EACH or (self._seen and self._seen.is_same())):
            return []
        found = []
        for number, ((path, module), before) in enumerate(zip(self._modules, self._first, strict=True)):
            for name, value in _numbers(module).items():
                counts = type(value) is not int or self._looks <= LOOKED_STEPS
                if counts and before.get(name, value) != value and (number, name) not in self._said:
                    self._said.add((number, name))
                    where = f" ({path})" if path else ""
                    found.append(f"the attribute {name!r} of {type(module).__qualname__}{where}")
        found += self._changed_modes()
        self._look()
        return found

    def _changed_modes(self) -> list[str]:
        if self._mode_changes == MOST_MODES:
            return []
        modes = [module.training for _, module in self._every]
        before, self._modes = self._modes, modes
        changed = [
            path or type(module).__qualname__
            for (path, module), then, now in zip(self._every, before or modes, modes, strict=True)
            if then != now
        ]
        if not changed:
            return []
        self._mode_changes += 1
        shown = ", ".join(changed[:SHOWN]) + (f" and {len(changed) - SHOWN} more" if changed[SHOWN:] else "")
        return [f"the training mode (train() or eval()) of {shown}"]

    def _look(self) -> None:
        """Look at what is to be seen whenever it changes."""
        self._seen = Seen()
        for _, module in self._every if self._mode_changes < MOST_MODES else ():
            self._seen.entry(vars(module), "training")
        for number, (_, module) in enumerate(self._modules):
            for name, value in _numbers(module).items():
                if type(value) is not int and (number, name) not in self._said:
                    self._seen.entry(vars(module), name)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float, complex) and not name.startswith("_")
    }
