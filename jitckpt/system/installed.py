"""Where Python's packages are installed, as opposed to what is the user's own."""

import os
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

PACKAGES = ("site-packages", "dist-packages")  # folders are called so wherever they lie
_NAMES = ("stdlib", "platstdlib", "purelib", "platlib")


def folders(path: list[str] | None = None, loaded: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the folders of installed modules, each with a separator at its end.

    Beside Python's own those on the path that are called so, and the one that torch lies in: PYTHONPATH, or
    `pip install --target`, may name any.
    """
    path, loaded = sys.path if path is None else path, sys.modules if loaded is None else loaded
    found = [sysconfig.get_path(name) for name in _NAMES]
    found += [one for one in path if os.path.basename(os.path.normpath(one)) in PACKAGES]
    torch = getattr(loaded.get("torch"), "__file__", None)
    if torch:
        found.append(os.path.dirname(os.path.dirname(torch)))
    return tuple(dict.fromkeys(os.path.join(os.path.abspath(one), "") for one in found))
