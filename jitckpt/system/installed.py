"""Where Python's packages are installed, as opposed to what is the user's own."""

import os
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

PACKAGES = ("site-packages", "dist-packages")  # folders are called so wherever they lie
_NAMES = ("stdlib", "platstdlib", "purelib", "platlib")


def folders(path: list[str] | None = None, loaded: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the folders of installed modules, each with a separator at its end.

    Beside Python's own those on the path that are called so or have what pip notes of a package, and the one
    that torch lies in: PYTHONPATH, or `pip install --target`, may name any.
    """
    path, loaded = sys.path if path is None else path, sys.modules if loaded is None else loaded
    found = [sysconfig.get_path(name) for name in _NAMES]
    found += [one for one in path if os.path.basename(os.path.normpath(one)) in PACKAGES or _has_notes(one)]
    torch = getattr(loaded.get("torch"), "__file__", None)
    if torch:
        found.append(os.path.dirname(os.path.dirname(torch)))
    return tuple(dict.fromkeys(os.path.join(os.path.abspath(one), "") for one in found))


def _has_notes(folder: str) -> bool:
    return next(Path(folder).glob("*.dist-info/METADATA"), None) is not None


_folders = cache(folders)  # as they are when it is first asked for, with torch among them


def is_scripts_class(kind: type) -> bool:
    """Whether a class is the user's own."""
    return _is_scripts_class(kind)


def is_scripts_module(value: object) -> TypeGuard[ModuleType]:
    """Whether it is a module of the user's own, such as one with the settings."""
    return isinstance(value, ModuleType) and _is_scripts_module(value)


@cache
def _is_scripts_module(module: ModuleType) -> bool:
    file, name = getattr(module, "__file__", None), module.__name__
    is_ours = name.partition(".")[0] == "jitckpt"
    if file is None or is_ours or sys.modules.get(name) is not module:
        return False
    # torch.ops and the like say they are of a file beside nothing.
    return os.path.isabs(file) and not file.startswith(_folders())


@cache
def _is_scripts_class(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_main = kind.__module__ == "__main__"
    return is_main or (
        file is not None and not file.startswith(_folders()) and "jitckpt" not in kind.__module__
    )
