"""Wherever and by whomever a job is started, its spares serve and its results are the same."""

import json
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
from launcher import Launcher, Result

USER = 64321
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
# Root may read what belongs to it here, such as its Python, as the other user, too.
MAY_READ = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
WITHOUT_HOME = ["env", "-u", "HOME"]
# As users have it: without the working folder, in which `python -c` looks for modules first.
PROGRAM = [str(Path(sys.executable).parent / "jitckpt")]
# The environment's own Python may lie where nobody else may look. This one finds packages by PYTHONPATH.
SYSTEMS = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
SYSTEMS_PROGRAM = [str(SYSTEMS), "-P", "-c", "import sys; from jitckpt.cli import main; sys.exit(main())"]
RUN = ["run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu", "--warm-start"]
KILL = ["--fault", "rank=1 step=8 phase=backward kind=kill"]
LONG = "a folder with spaces " * 10
NAMES = ("json", "queue", "random", "socket", "statistics", "numbers", "jitckpt")


def by_another_user(folder: Path) -> list[str]:
    """Return jitckpt as who has no rights here runs it; where that can't be, as who may read all."""
    return without_rights(folder) or [*AS_USER, *MAY_READ, *WITHOUT_HOME, *PROGRAM]


def without_rights(folder: Path, *rights: str) -> list[str]:
    """Return jitckpt as another user runs it; [] where that can't be. rights: options of setpriv."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), sysconfig.get_path("purelib")]
    command = [*AS_USER, *rights, *WITHOUT_HOME, f"PYTHONPATH={os.pathsep.join(paths)}", *SYSTEMS_PROGRAM]
    if SYSTEMS.exists():
        tried = subprocess.run([*command, "--version"], cwd=folder, capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return []


@pytest.fixture
def folder(launcher: Launcher) -> Iterator[Path]:
    """Where the job is started, which belongs to the other user if there can be one."""
    top = Path(tempfile.mkdtemp(prefix="jitckpt-surroundings-", dir="/tmp"))  # pytest's own are root's alone
    launcher.directory = top / LONG
    launcher.directory.mkdir()
    if os.geteuid() == 0:
        for path in (top, launcher.directory):
            os.chown(path, USER, USER)
    yield launcher.directory
    shutil.rmtree(top)


def run(launcher: Launcher, program: list[str], script: str, *options: str) -> Result:
    ended = launcher.run(*program, *RUN, *options, script, *TRAINING[1:])
    assert ended.status == 0, ended.err
    return ended


def check(launcher: Launcher, program: list[str], script: str, undisturbed: list[str]) -> None:
    """Run the training with a failure: it ends as it does without, and every worker was a warm spare."""
    ended = run(launcher, program, script, "--checkpoint-dir", f"{launcher.directory}/ckpt", *KILL)
    assert "Restart 1 went on from step" in ended.err
    assert "no module" not in ended.err + ended.out
    assert digests(ended.out) == undisturbed
    lines = (launcher.directory / "ckpt" / "events.jsonl").read_text().splitlines()
    used = [event["rank"] for event in map(json.loads, lines) if event["event"] == "spare_used"]
    assert used == [0, 1, 0, 1]


@pytest.mark.parametrize("user", ["the same", "another"])
def test_without_a_home_in_a_long_path_beside_files_named_like_modules(
    launcher: Launcher, folder: Path, undisturbed: list[str], user: str
) -> None:
    if user == "another" and os.geteuid() != 0:
        pytest.skip("only root can start a job as another user")
    scripts = folder / "my scripts"
    scripts.mkdir()
    shutil.copy(EXAMPLE.with_name("results.py"), scripts)
    script = str(
        shutil.copy(EXAMPLE, scripts / "train here.py")
    )  # it learns the text of its Python's library
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user, and no module')")
    program = [*WITHOUT_HOME, *PROGRAM]
    if user == "another":
        program = by_another_user(folder)
        # Another Python, whose library has another text.
        undisturbed = digests(run(launcher, program, script, "--checkpoint-dir", "undisturbed").out)
    check(launcher, program, script, undisturbed)


def test_from_the_repositorys_root(launcher: Launcher, undisturbed: list[str]) -> None:
    """As the README has it: there the source lies where modules could be looked for."""
    root = EXAMPLE.parents[1]
    check(launcher, ["env", "-C", str(root), *PROGRAM], str(EXAMPLE.relative_to(root)), undisturbed)
