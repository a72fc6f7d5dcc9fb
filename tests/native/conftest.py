"""Tests of the preloaded library in real processes, on softgpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jitckpt.device import LIBRARY_DIR

HERE = Path(__file__).parent
TIMEOUT = 100  # seconds, of one program


@pytest.fixture(scope="session")
def preloaded() -> dict[str, str]:
    """The environment in which a program gets libjitckpt.so in front of the soft device."""
    libraries = [LIBRARY_DIR / "libjitckpt.so", LIBRARY_DIR / "libsoftgpu.so"]
    missing = [str(library) for library in libraries if not library.exists()]
    if missing:
        pytest.fail(f"{', '.join(missing)} not there: build and install the native libraries first")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "LD_LIBRARY_PATH": str(LIBRARY_DIR / "driver"),
        "SOFTGPU_DEVICES": "2",
    }


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library of plain C that blocks: see blocks.c."""
    library = tmp_path_factory.mktemp("blocks") / "libblocks.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "blocks.c"], check=True)
    return library


@pytest.fixture
def run_program(preloaded: dict[str, str], blocks: Path) -> Callable[..., Any]:
    """Runs one of programs/ and returns what it printed; fails if it did not end as expected."""

    def run(name: str, *arguments: str, status: int = 0, limit: float = TIMEOUT) -> Any:
        ended = subprocess.run(
            [sys.executable, HERE / "programs" / f"{name}.py", *arguments],
            env={**preloaded, "TEST_BLOCKS": str(blocks)},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert ended.returncode == status, f"exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        lines = ended.stdout.splitlines()
        return json.loads(lines[-1]) if status == 0 else ended

    return run
