"""Which exceptions end a process, and which do not: in small processes that tell what was reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from jitckpt.worker.ends import exceptions

# Without the package jitckpt, which would import torch.
PROLOGUE = f"""
import runpy, sys, threading
module = runpy.run_path({exceptions.__file__!r})
def report(error): print(f"told of {{error!r}}", flush=True)
def install(): return module["ExceptionHook"](report)
def fail(): raise ValueError("no")
"""


def run(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run it with both outputs in one, as a script: without -u, so that what is not flushed is missing."""
    script = folder / "script.py"
    script.write_text(PROLOGUE + program)
    return subprocess.run(
        [sys.executable, "-I", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_exception_is_told_once_its_traceback_and_all_output_are_out(tmp_path: Path) -> None:
    ended = run(
        "import os\n"
        "def report(error): os.write(1, b'told'); os._exit(1)\n"
        "sys.excepthook = lambda kind, error, trace: print('traceback')\n"
        "install()\n"
        "fail()",
        tmp_path,
    )
    assert ended.stdout == "traceback\ntold"


@pytest.mark.parametrize(
    "program",
    [
        "install()",
        "install()\nsys.exit(0)",
        "install()\nsys.exit(3)",
        "install()\ntry: fail()\nexcept ValueError: pass",
        "install()\ntry: fail()\nexcept ValueError: sys.excepthook(*sys.exc_info())",
        "install()\nthread = threading.Thread(target=fail)\nthread.start(); thread.join()",
        "install()\nthreading.excepthook = lambda args: sys.excepthook(*args[:3])\n"
        "thread = threading.Thread(target=fail)\nthread.start(); thread.join()",
        "install()\nraise KeyboardInterrupt",
        "install().remove()\nfail()",
    ],
)
def test_what_does_not_end_the_program_by_an_exception_is_not_told(program: str, tmp_path: Path) -> None:
    assert "told of" not in run(program, tmp_path).stdout


def test_hooks_of_the_users_own_are_kept(tmp_path: Path) -> None:
    """One from before is called by ours; one from afterwards calls ours, and stays when ours is removed."""
    ended = run(
        "sys.excepthook = lambda kind, error, trace: print('first')\n"
        "hook = install()\n"
        "ours = sys.excepthook\n"
        "sys.excepthook = lambda *what: (print('second'), ours(*what))\n"
        "fail()",
        tmp_path,
    )
    assert ended.stdout.splitlines() == ["second", "first", "told of ValueError('no')"]
    removed = run(
        "hook = install()\nsys.excepthook = lambda *_: print('mine')\nhook.remove()\nfail()", tmp_path
    )
    assert removed.stdout == "mine\n"


def test_a_program_that_is_run_by_another_is_over_when_that_one_is(tmp_path: Path) -> None:
    """As a warm spare runs the training: by runpy."""
    (tmp_path / "training.py").write_text(f"{PROLOGUE}\ninstall()\nfail()")
    ended = run(f"runpy.run_path({str(tmp_path / 'training.py')!r}, run_name='__main__')", tmp_path)
    assert ended.stdout.endswith("ValueError: no\ntold of ValueError('no')\n")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("pass", "0"),
        ("sys.exit()", "0"),
        ("sys.exit(0)", "0"),
        ("sys.exit(3)", "3"),
        ("sys.exit('no')", "'no'"),
        ("hook.remove()\nsys.exit(3)", "0"),
        ("raise SystemExit(3)", "0"),
    ],
)
def test_the_status_that_a_program_ends_with_is_known_to_its_last_functions(
    tmp_path: Path, program: str, told: str
) -> None:
    ended = run(
        "import atexit\n"
        "hook = module['ExitHook']()\n"
        f"atexit.register(lambda: print(repr(hook.status)))\n{program}",
        tmp_path,
    )
    assert ended.stdout.splitlines()[-1] == told
    assert ended.returncode == {"0": 3 if "3" in program else 0, "3": 3, "'no'": 1}[told]
