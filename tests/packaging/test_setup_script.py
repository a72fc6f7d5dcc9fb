"""What scripts/setup says where it can't go on; that it sets everything up, scripts/test shows each time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup"


def run_setup(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SETUP, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--fast"], "setup: unknown argument --fast; usage:"),
        (["--torch"], "setup: --torch needs a version such as 2.11.0"),
        (["--torch", "newest"], "setup: --torch needs a version such as 2.11.0"),
    ],
)
def test_wrong_arguments(arguments: list[str], sentence: str) -> None:
    result = run_setup(*arguments)
    assert result.returncode != 0
    assert result.stderr.startswith(sentence)
    assert result.stdout == ""


def path_with(tmp_path: Path, *programs: str) -> str:
    """A PATH on which there is nothing but these programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found is not None
        (folder / program).symlink_to(os.path.realpath(found))
    return str(folder)


def test_what_is_missing_is_named_where_it_cannot_be_installed(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    result = run_setup(
        "--test-tools",
        PATH=path_with(tmp_path, "bash", "dirname"),
        PYTHON=sys.executable,
        VIRTUAL_ENV=str(environment),
        CXX="no-such-compiler",
    )
    assert result.returncode == 1
    assert "setup: missing from the system: g++" in result.stderr
    assert "gdb. Install them (apt-get install g++" in result.stderr
    assert not environment.exists()


def test_python_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # what an older Python answers to the question for its version
    old.chmod(0o755)
    path = path_with(tmp_path, "bash", "dirname")
    result = run_setup(PATH=path, PYTHON=str(old), VIRTUAL_ENV=str(tmp_path / "environment"))
    assert result.returncode == 1
    assert result.stderr.startswith("setup: jitckpt needs Python 3.11 or newer and found none")
