"""What a test needs that moves a process: CRIU, and a kernel and rights with which it works."""

import subprocess

import pytest

from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError


def criu_of_this_machine() -> Criu:
    """Skip the test where CRIU is missing or says that it can't work here; what fails then, is ours."""
    try:
        found = criu.find()
    except CriuError as error:
        pytest.skip(str(error))
    checked = subprocess.run([found.program, "check"], capture_output=True, text=True, check=False)
    if checked.returncode:
        pytest.skip(f"criu check: {(checked.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return found
