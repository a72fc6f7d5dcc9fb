"""Calls a function once a module is imported, by whoever does it; until then that costs a look-up."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(calls: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each with its module, by the module's name, as soon as that is imported; at once where it is."""
    waiting = {}
    for name, call in calls.items():
        if (module := sys.modules.get(name)) is not None:
            call(module)
        else:
            waiting[name] = call
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the others find a module, and hangs the call on its loader."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._waiting.pop(name, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(name)  # asks this finder, too, which no longer waits for it
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Loader(spec.loader, call)
        return spec


class _Loader(importlib.abc.Loader):
    """In a loader's place until the module has run."""

    def __init__(self, loader: importlib.abc.Loader, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call(module)
