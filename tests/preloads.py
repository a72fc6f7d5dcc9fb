"""Compiles what tests preload: a disk that fails on order, one without locks, a clock that is wrong."""

import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "native"


def compiled(folder: Path, name: str = "disk") -> Path:
    """Return the library, compiled into a folder."""
    library = folder / f"lib{name}.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, SOURCES / f"{name}.c", "-ldl"], check=True)
    return library
