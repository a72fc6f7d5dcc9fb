"""Compiles native/disk.c: preloaded, it makes a disk fail, block or lose its power on order."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "disk.c"


def compiled(folder: Path) -> Path:
    """Return the library, compiled into a folder."""
    library = folder / "libdisk.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, SOURCE, "-ldl"], check=True)
    return library
