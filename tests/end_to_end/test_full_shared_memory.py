"""Transparent mode shares memory between processes that /dev/shm has no part in: it may be full."""

import subprocess

import pytest
from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.events import read_events

# In a name space of its own the folder is small, and full.
FILL = "mount -t tmpfs -o size=64k none /dev/shm && ! head -c 100000 /dev/zero 2> /dev/null > /dev/shm/full"


def test_a_full_dev_shm_is_no_obstacle(launcher: Launcher) -> None:
    try_it = ["unshare", "--mount", "sh", "-c", FILL]
    if subprocess.run(try_it, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--warm-spares", "0", "--checkpoint-dir", str(directory)]
    command += ["--fault", "rank=1 step=3 phase=forward kind=proxy-kill"]
    script = launcher.script(SCRIPT)
    out = launcher.succeed("unshare", "--mount", "sh", "-c", f'{FILL}; exec "$@"', "sh", *command, script)
    assert "rank 0: full" in out.splitlines(), out
    assert "recovered" in [event["event"] for event in read_events(directory)[0]]


SCRIPT = text_of("full_shared_memory")
