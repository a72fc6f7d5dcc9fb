# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import pathlib
import pwd
import runpy
import subprocess
import sys
import time

subprocess.run(["sh", "-c", "sleep 0.1 &"])


def tell(text):
    sys.stderr.write(f"{text}\n")  # at once, so that the ranks' lines stay whole


def unknown():
    try:
        return bool(pwd.getpwuid(os.getuid())) and "known"
    except KeyError:
        return "unknown"


def refused(path):
    try:
        path.touch()
    except OSError as error:
        return error.strerror
    path.unlink()


def count_zombies():
    stats = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(path.read_text().rpartition(") ")[2].split())
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has gone meanwhile
    return sum(stat[0] == "Z" and stat[1] == "1" for stat in stats)


first = pathlib.Path("/proc/1/cmdline").read_bytes()
tell(f"seen {os.getuid()} {unknown()} {os.environ.get('HOME')} {b'jitckpt.cli' in first}")
tell(f"root {refused(pathlib.Path('/x'))} | tmp {refused(pathlib.Path('/tmp/x'))}")
caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
tell(f"capabilities {int(caps[0], 16)} {os.statvfs('/dev/shm').f_blocks * 4096}")
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    end = time.monotonic() + 60  # they are looked for again and again, not each at once
    while (zombies := count_zombies()) and time.monotonic() < end:
        time.sleep(0.1)
    tell(f"zombies of process 1: {zombies}")
