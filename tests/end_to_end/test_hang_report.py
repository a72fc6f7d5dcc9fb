"""What a hang's report says, from the command line to the file, of a rank that is late for too long.

Two things can't be real here. NCCL's RAS service is a thread of NCCL's, which runs on GPUs alone:
tests/nccl_ras_server.py says in its place what NCCL's user guide shows. And NVIDIA's driver tells nothing of
a device that is not there: the agent reads its own /dev/kmsg, in whose place a mount namespace has a file.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher
from nccl_ras_server import STATUS, nccl_ras_server
from programs_of_tests import text_of

from jitckpt.events import read_events
from jitckpt.system.nccl_ras import ADDRESS

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
SCRIPT = text_of("hang_report")


def with_kernel_log(text: Path) -> list[str]:
    """Return the command under which /dev/kmsg is this file; skip where that can't be."""
    unshare = [shutil.which("unshare") or "unshare", "--mount", "sh", "-ec"]
    wrapped = [*unshare, 'mount --bind "$0" /dev/kmsg; exec "$@"', str(text)]
    try:
        done = subprocess.run([*wrapped, "cat", "/dev/kmsg"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(str(error))
    if done.stdout != text.read_text():
        pytest.skip(f"there can be no mount namespace: {done.stderr}")
    return wrapped


def test_it_has_stacks_what_the_driver_told_and_what_nccl_says(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = launcher.directory / "kmsg"
    now = int(time.monotonic() * 1e6)
    log.write_text(f"6,1,{now},-;usb 1-1: new device\n4,2,{now},-;{XID}\n SUBSYSTEM=pci\n")
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--warm-spares", "0"]
    command += ["--hang-timeout", "3", "--stall-timeout", "6", launcher.script(SCRIPT)]
    with nccl_ras_server() as address:
        monkeypatch.setenv(ADDRESS, address)
        result = launcher.run(*with_kernel_log(log), *command)
    assert result.status == 0, result.err
    events = read_events(launcher.directory / "ckpt")[0]
    [report] = [event["path"] for event in events if event["event"] == "hang_report"]
    text = Path(report).read_text()
    assert "rank 0 has waited" in text
    assert "where rank 1 has not arrived" in text
    assert "in wait_for_the_data" in text.partition("Python stacks of rank 1:")[2]
    assert f" s ago: {XID}\n" in text.partition("NVIDIA's driver on ")[2]
    assert "usb" not in text
    assert text.endswith(f"NCCL itself (its RAS service) says:\n{STATUS}")
    folder = str(Path(report).with_suffix(""))
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "--prefix", "rank_"]
    said = launcher.run(*tool)
    assert said.status == 0, said.err
    assert "missing ranks: {1}" in said.out + said.err
