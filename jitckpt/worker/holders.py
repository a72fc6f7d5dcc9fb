"""What may hold variables beside frames: objects, modules of a model's kind, classes, functions.

A function holds what it closes over, its default arguments and its attributes; a partial one its arguments.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Sampler

from jitckpt.state import plain_values
from jitckpt.system import installed

_LOCAL = "<locals>"


class HeldValues(dict[str, Any]):
    """What an object holds, by names; `update` sets it there, too, and `del` deletes it."""

    def __init__(
        self,
        values: Mapping[str, Any],
        set_one: Callable[[str, Any], None],
        delete: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(values)
        self._set, self._delete = set_one, delete

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._delete(name)

    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override]
        for name, value in values.items():
            self[name] = value
            self._set(name, value)


def held_by(value: Any) -> dict[str, Any] | None:
    """Return what one of the script's own objects holds, or which samplers a loader has; None of others."""
    value = value.__self__ if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return _held_by_function(value)
    if isinstance(value, partial):
        arguments = {str(number): one for number, one in enumerate(value.args)} | value.keywords
        return HeldValues({"func": value.func, **arguments}, partial(_set_keyword, value))
    if isinstance(value, type) and installed.is_scripts_class(value):
        return _held_by_class(value)
    if installed.is_scripts_module(value):
        return vars(value)
    if isinstance(value, DataLoader):
        return {"batch_sampler": value.batch_sampler, "sampler": value.sampler}
    return _held_by_object(value)


def reach(scope: Mapping[str, Any], path: str) -> Any:
    """Return what a path of names leads to, from variables on; None if it leads nowhere."""
    first, *names = path.split(".")
    value = scope.get(first)
    for name in names:
        value = (held_by(value) or {}).get(name)
    return value


def path_to(value: Any) -> tuple[str, str] | None:
    """Return the module in which a function or a class is, and the path there; None if no module has it.

    A function that another one is wrapped around, as a decorator does, goes by that.
    """
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", _LOCAL)
    loaded = sys.modules.get(module or "")
    if _LOCAL in path or loaded is None:
        return None
    found = reach(vars(loaded), path)
    while found is not None and found is not value:
        found, path = getattr(found, "__wrapped__", None), f"{path}.__wrapped__"
    return None if found is None else (loaded.__name__, path)


def variables_of_module(name: str) -> dict[str, Any] | None:
    """Return the variables of a module of the script's own that is loaded."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    is_scripts = name == "__main__" or (file is not None and not file.startswith(installed.folders()))
    return vars(module) if isinstance(module, ModuleType) and is_scripts else None


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the default arguments of a function."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def _held_by_function(function: FunctionType) -> dict[str, Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in _filled(cells.items())}

    def set_one(name: str, value: Any) -> None:
        if name in cells:
            cells[name].cell_contents = value
        else:
            setattr(function, name, value)

    return HeldValues({**defaults_of(function), **values, **vars(function)}, set_one)


def _filled(cells: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    for name, cell in cells:
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # nothing is there yet
            continue
        yield name, cell


def _held_by_object(value: Any) -> dict[str, Any] | None:
    if isinstance(value, nn.Module):
        return HeldValues({**vars(value), **value._modules}, partial(setattr, value), partial(delattr, value))
    is_own_sampler = isinstance(value, Sampler) and installed.is_scripts_class(type(value))
    if not (is_own_sampler or plain_values.is_own(value)):
        return None
    try:
        attributes: dict[str, Any] | None = getattr(value, "__dict__", None)
        slots = dict(plain_values.slots_of(value))
    except Exception:
        return None  # its own code for them fails
    return (
        HeldValues(
            {**(attributes or {}), **slots},
            partial(object.__setattr__, value),
            partial(object.__delattr__, value),
        )
        if slots
        else attributes
    )


def _held_by_class(kind: type) -> dict[str, Any]:
    values = {name: one for name, one in vars(kind).items() if not name.startswith("__")}
    plain = {
        name: one.__func__ if isinstance(one, staticmethod | classmethod) else one
        for name, one in values.items()
        if not (inspect.isdatadescriptor(one) or inspect.ismethoddescriptor(one))
        or isinstance(one, staticmethod | classmethod)
    }
    return HeldValues(plain, partial(setattr, kind), partial(delattr, kind))


def _set_keyword(of: "partial[Any]", name: str, value: Any) -> None:
    if name not in of.keywords:
        raise AttributeError(f"the argument {name} of a partial function can't be set")
    of.keywords[name] = value
