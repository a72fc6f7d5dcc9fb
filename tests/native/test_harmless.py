"""Preloaded into programs that have nothing to do with it, the library does nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jitckpt.device import LIBRARY_DIR

COUNT_THREADS = "ls /proc/$PPID/task | wc -l; ls /proc/$PPID/fd | wc -l"
PROGRAMS = {
    "bash": ["bash", "-c", "echo out; echo err >&2; ls /proc/$$/task | wc -l; ls /proc/$$/fd; exit 3"],
    "git": ["git", "-c", f"alias.threads=!{COUNT_THREADS}", "threads"],
    "gdb": ["gdb", "-nx", "-batch", "-ex", f"shell {COUNT_THREADS}", "-ex", "print 6 * 7"],
    "python": [
        sys.executable,
        "-c",
        "import os, subprocess;"
        "print(len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')));"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True))",
    ],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_output_threads_and_descriptors(program: str) -> None:
    if shutil.which(PROGRAMS[program][0]) is None:
        pytest.skip(f"{program} is not installed")

    def run(environment: dict[str, str]) -> tuple[int, str, str]:
        ended = subprocess.run(
            PROGRAMS[program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return ended.returncode, ended.stdout, ended.stderr

    plain = run({})
    assert plain[1]
    assert run({"LD_PRELOAD": str(LIBRARY_DIR / "libjitckpt.so")}) == plain


def test_it_brings_no_library_along() -> None:
    """A C++ library of ours would become that of the program, which may need a newer one."""
    needed = subprocess.run(
        ["objdump", "-p", LIBRARY_DIR / "libjitckpt.so"], capture_output=True, text=True, check=True
    ).stdout
    libraries = [line.split()[1] for line in needed.splitlines() if "NEEDED" in line]
    assert set(libraries) <= {"libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2"}


def test_a_device_call_without_a_device_is_a_clear_error() -> None:
    program = (
        "import ctypes; calls = ctypes.CDLL(None);"
        "print(calls.cudaStreamSynchronize(None), calls.cudaStreamSynchronize(None))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_PRELOAD": str(LIBRARY_DIR / "libjitckpt.so")},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    shared_object_symbol_not_found = 302
    assert ended.stdout.split() == [str(shared_object_symbol_not_found)] * 2
    assert ended.stderr == (
        "jitckpt: cudaStreamSynchronize was called, but no library that is loaded has it: "
        "load libcudart.so.13 first.\n"
    )


@pytest.mark.parametrize("agent", ["with_agent", "without_agent"])
def test_a_forked_child_has_nothing_of_the_job(run_program: Callable[..., Any], agent: str) -> None:
    seen = run_program("forks", agent)
    reports = [seen["running"]] + ([seen["held"]] if agent == "with_agent" else [])
    for report in reports:
        assert report == {
            "threads": 1,
            "descriptor": "closed",
            "holding": 0,
            "report": -1,
            "status": -signal.SIGTERM,
        }
