"""Wherever and by whomever a job is started: another user without HOME, a long path with spaces."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpt import EXAMPLE, TRAINING, digests
from launcher import LIMIT

USER = 64321
# The environment's own Python may lie where nobody else may look.
PYTHON = Path("/usr/bin") / f"python{sys.version_info[0]}.{sys.version_info[1]}"
LONG = "a folder with spaces " * 10
RUN = "import sys; from jitckpt.cli import main; sys.exit(main())"
OPTIONS = ["run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu", "--checkpoint-dir", "ckpt"]
KILL = ["--fault", "rank=1 step=8 phase=backward kind=kill"]
NAMES = ("json", "queue", "random", "socket", "statistics", "numbers")


def environment() -> dict[str, str]:
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), sysconfig.get_path("purelib")]
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": os.pathsep.join(paths)}


def run(*command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environment(),
        user=USER,
        group=USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}, which other users may run")
    top = Path(tempfile.mkdtemp(prefix="jitckpt-other-", dir="/tmp"))  # pytest's own are root's alone
    made = top / LONG
    made.mkdir()
    for path in (top, made):
        os.chown(path, USER, USER)
    if run(str(PYTHON), "-c", "import torch, jitckpt", folder=made).returncode != 0:
        shutil.rmtree(top)
        pytest.skip("another user may not read what is to be tested")
    yield made
    shutil.rmtree(top)


def test_another_user_without_a_home_in_a_long_path_beside_files_named_like_modules(folder: Path) -> None:
    scripts = folder / "my scripts"
    scripts.mkdir()
    shutil.copy(EXAMPLE.with_name("results.py"), scripts)
    script = shutil.copy(EXAMPLE, scripts / "train here.py")  # it learns the text of its Python's library
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user, and no module')")
    start = [str(PYTHON), "-P", "-c", RUN, *OPTIONS]
    undisturbed = run(*start, "--checkpoint-dir", "other", str(script), *TRAINING[1:], folder=folder)
    assert undisturbed.returncode == 0, undisturbed.stderr
    ended = run(*start, *KILL, str(script), *TRAINING[1:], folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert "Restart 1 went on from step" in ended.stderr
    assert "of the user" not in ended.stderr + ended.stdout
    assert digests(ended.stdout) == digests(undisturbed.stdout)
