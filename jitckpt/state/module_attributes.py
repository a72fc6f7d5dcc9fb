"""Which attributes of a model's modules are kept once they change.

torch's state of a module is its parameters, buffers and extra state. Beside it modules of the script's own
classes may keep anything plain; all others numbers (a rate of dropout, a momentum), what each forward pass
makes of their parameters anew (a pruned weight), and whether they are in training mode.
"""

import inspect
from collections.abc import Iterable
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from jitckpt.state.plain_attributes import Owner
from jitckpt.system import installed
from jitckpt.system.bytecode import instructions as instructions_of

MODE = "training"
OF_TORCH = frozenset(vars(nn.Module())) - {MODE}  # what torch keeps in each module
METRICS = "torchmetrics"  # its modules' sums are attributes


def owners_of(model: nn.Module) -> dict[str, Owner]:
    """Return the modules whose attributes are looked at, by their names."""
    return {name: Owner(module, may_keep(module)) for name, module in model.named_modules()}


def may_keep(module: nn.Module) -> Any:
    """Return what tells of an attribute, by its name and value, whether it is looked at."""
    # FSDP2 gives a module a class of its own, with that of before as its base.
    kinds = [one for one in type(module).__mro__ if not one.__module__.startswith("torch.distributed.")]
    kind: Any = kinds[0]
    package = kind.__module__.partition(".")[0]
    has_own_state = kind.get_extra_state is not nn.Module.get_extra_state
    if has_own_state or (package == "torch" and not kind.__module__.startswith("torch.nn.modules.")):
        return _is_mode
    if installed.is_scripts_class(kind) or package == METRICS:
        return partial(is_kept, names_of_others(kind))
    return partial(_is_setting, module)


def is_derived(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch.nn.utils (pruning, weight_norm, spectral_norm) sets it in each forward pass.

    Pruning once more goes by what the last one has left there, of the parameters before the last step.
    """
    return f"{name}_orig" in module._parameters or f"{name}_g" in module._parameters


def is_kept(of_others: frozenset[str], name: str, value: object) -> bool:
    """Whether an attribute of an object of the script's own class is looked at.

    of_others: as names_of_others says of the class.
    """
    return name == MODE or not (name in of_others or name.startswith("_jitckpt"))


def _is_mode(name: str, value: object) -> bool:
    return name == MODE


def _is_setting(module: nn.Module, name: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return is_derived(module, name)
    return type(value) in (bool, int, float, complex) and not name.startswith("_")


def names_of_others(kind: type) -> frozenset[str]:
    """Return the attributes that the functions of a class's bases set which are not the script's own.

    Of torch's modules those of every module alone: what a layer sets is a setting.
    """
    return _names_of_others(kind)


@cache
def _names_of_others(kind: Any) -> frozenset[str]:
    others = [base for base in kind.__mro__ if not _is_the_scripts(base)]
    of_torch = OF_TORCH if issubclass(kind, nn.Module) else frozenset()
    return (of_torch | _names_set_in(others)) - {MODE}


def _is_the_scripts(base: Any) -> bool:
    """Whether what a class sets is kept: a layer's numbers and a metric's sums are, as the script's own."""
    is_layer = base.__module__.startswith("torch.nn.modules.") and base is not nn.Module
    return is_layer or installed.is_scripts_class(base) or base.__module__.partition(".")[0] == METRICS


def names_set_by(package: str, kind: type) -> frozenset[str]:
    """Return the attributes that the functions of a class's bases of this package set."""
    return _names_set_in([base for base in kind.__mro__ if base.__module__.partition(".")[0] == package])


def _names_set_in(classes: Iterable[Any]) -> frozenset[str]:
    found: set[str] = set()
    for one in (one for kind in classes for one in vars(kind).values()):
        function = inspect.unwrap(getattr(one, "fget", None) or one)
        if isinstance(function, FunctionType):
            stores = (op.argval for op in instructions_of(function) if op.opname == "STORE_ATTR")
            found.update(stores)
    return frozenset(found)
