"""What the rehearsed failures of processes do to one."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitckpt.bindings import clock
from jitckpt.device import LIBRARY_DIR
from jitckpt.faults import injection, processes


def run(code: str) -> "subprocess.Popen[bytes]":
    program = f"from jitckpt.faults import processes\n{code}"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)


def test_a_held_gil_stops_all_threads() -> None:
    process = run(
        "import threading, time\n"
        "from jitckpt.bindings import interpreter\n"
        "def ticks():\n"
        "    while True: print('tick', flush=True); time.sleep(0.01)\n"
        "threading.Thread(target=ticks, daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "print('held', flush=True)\n"
        "interpreter.hold_gil()"
    )
    assert process.stdout is not None
    while process.stdout.readline() != b"held\n":
        pass
    os.set_blocking(process.stdout.fileno(), False)
    time.sleep(1)
    while read := process.stdout.read():  # it takes a moment until it is held
        time.sleep(1)
    assert read is None, "it has ended"
    process.kill()
    process.communicate()


def test_all_descriptors_but_the_first_are_closed() -> None:
    process = run(
        "import os\nos.dup2(1, 900)\nprocesses.close_descriptors()\nprint(os.listdir('/proc/self/fd'))"
    )
    assert process.communicate()[0].strip() == b"['0', '1', '2', '3']"  # the last is the folder's


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_garbage_is_looked_for_all_the_time() -> None:
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.enable()  # an earlier test may have left it off
    try:
        processes.never_rest()
        count = collections()
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        assert collections() >= count + len(kept) // 10
    finally:
        gc.set_threshold(*before)
        if not was_enabled:
            gc.disable()


def test_what_is_written_waits_for_a_blocked_disk_and_nothing_else_does(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, threading
path = {str(tmp_path)!r}
kept, reading = open(path + "/old", "w"), open({__file__!r})
processes.block_disk()
import colorsys
ways = [lambda: open(path + "/new", "w"), lambda: open(path + "/old", "r+b"),
        lambda: os.mkdir(path + "/made"), lambda: os.rename(path + "/old", path + "/other"),
        lambda: os.open(path + "/new", os.O_CREAT)]
threads = [threading.Thread(target=way, daemon=True) for way in ways]
for thread in threads:
    thread.start()
assert open({__file__!r}).read() == reading.read()
subprocess.run(["true"], stdout=subprocess.DEVNULL, check=True)
print(kept.write("it was open before"), sum(thread.is_alive() for thread in threads), flush=True)
os._exit(0)
"""
    assert run(program).communicate()[0] == b"18 5\n"
    assert os.listdir(tmp_path) == ["old"]


def test_a_signal_to_all_reaches_what_is_below_the_agent() -> None:
    """Whoever asks for it included, and not the rest of the machine."""
    process = run(
        "import os, subprocess\n"
        "os.environ['JITCKPT_AGENT_PID'] = str(os.getpid())\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('there', flush=True)\n"
        "processes.signal_all()"
    )
    assert process.communicate()[0] == b"there\n"  # which ends when all that have it have ended
    assert process.returncode == -signal.SIGTERM


def test_without_an_agent_nobody_is_sent_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITCKPT_AGENT_PID", raising=False)
    processes.signal_all()


@pytest.mark.parametrize(("kind", "number"), [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_a_rank_crashes(kind: str, number: int) -> None:
    process = run(
        "from jitckpt.faults import injection\n"
        f"spec = injection.parse_fault('rank=0 step=1 phase=forward kind={kind}')\n"
        "injection.Injector([spec], print, print, print).on_phase(1, 'forward')"
    )
    process.communicate()
    assert process.returncode == -number


@pytest.mark.parametrize("kind", processes.AGENTS_KINDS)
def test_what_befalls_the_agents_processes_is_told_and_does_nothing_here(kind: str) -> None:
    spec = injection.parse_fault(f"rank=0 step=1 phase=forward kind={kind}")
    told: list[injection.FaultSpec] = []
    injection.Injector([spec], told.append, print, print).on_phase(1, "forward")
    assert told == [spec]


def with_clock(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", f"import time\nfrom jitckpt.bindings import clock\n{code}"],
        env=clock.preloaded(str(LIBRARY_DIR / clock.LIBRARY), os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_time_of_day_jumps_and_who_waits_by_it_waits_no_longer() -> None:
    process = with_clock(
        "import ctypes\n"
        "before, monotonic = time.time(), time.monotonic()\n"
        "clock.jump(clock.HOUR)\n"
        "class Until(ctypes.Structure): _fields_ = [('seconds', ctypes.c_long), ('rest', ctypes.c_long)]\n"
        "library, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "assert library.sem_timedwait(semaphore, ctypes.byref(Until(int(time.time()) + 1, 0))) == -1\n"
        "print(time.time() - before > 3600, time.monotonic() - monotonic < 600)\n"
        "clock.jump(-2 * clock.HOUR)\n"
        "print(time.time() < before - 3000)"
    )
    assert process.communicate()[0].split() == ["True"] * 3


def test_root_lets_another_processs_time_of_day_jump() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root writes what another process has in memory")
    process = with_clock("while True: input(); print(time.time(), flush=True)")
    assert process.stdin is not None
    assert process.stdout is not None

    def time_there() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(file=process.stdin, flush=True)
        return float(process.stdout.readline()) - time.time()

    assert abs(time_there()) < 60
    clock.jump_of(process.pid, str(LIBRARY_DIR / clock.LIBRARY), -clock.HOUR)
    assert abs(time_there() + clock.HOUR) < 60
    process.kill()
    process.communicate()


def test_without_the_library_no_clock_jumps() -> None:
    with pytest.raises(clock.ClockError, match="is not preloaded"):
        clock.jump(clock.HOUR)
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process,
        pytest.raises(clock.ClockError, match=f"is not in process {process.pid},"),
    ):
        clock.jump_of(process.pid, str(LIBRARY_DIR / clock.LIBRARY), clock.HOUR)


@pytest.mark.parametrize(("text", "seconds"), [("", 3600), (" jump=-3600", -3600), (" jump=5", 5)])
def test_by_how_much_a_clock_jumps(text: str, seconds: int) -> None:
    assert injection.seconds_of(injection.parse_fault(f"rank=0 step=1 kind=clock{text}")) == seconds


@pytest.mark.parametrize("text", ["kind=clock jump=0", "kind=clock jump=--1", "kind=kill jump=1"])
def test_a_jump_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(injection.FaultError, match="jump"):
        injection.parse_fault(f"rank=0 step=1 {text}")
