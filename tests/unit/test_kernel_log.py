"""The driver's Xid lines in the kernel's log."""

import os
import time
from pathlib import Path

import pytest

from jitckpt.system.kernel_log import KERNEL_LOG, MOST_LINES, xid_lines

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."


def record(age: float, text: str) -> str:
    return f"4,1,{int((time.monotonic() - age) * 1e6)},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"


def test_only_what_the_driver_has_lately_said(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    text = [
        record(50.0, XID.replace("79", "48")),
        record(9.0, "usb 1-1: new device"),
        record(3.0, XID),
        "garbage;NVRM: Xid\n",
    ]
    log.write_text("".join(text))
    assert xid_lines(20.0, log) == [f"3 s ago: {XID}"]
    assert len(xid_lines(100.0, log)) == 2


def test_no_more_than_a_report_has_room_for(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("".join(f"4,1,{int(time.monotonic() * 1e6)},-;{XID} {n}\n" for n in range(70)))
    lines = xid_lines(1e6, log)
    assert len(lines) == MOST_LINES
    assert lines[-1].endswith(" 69")


@pytest.mark.skipif(not os.access(KERNEL_LOG, os.R_OK), reason="this user may not read the kernel's log")
def test_the_kernels_own_log_is_read_to_its_end() -> None:
    assert all("NVRM: Xid" in line for line in xid_lines(1e9))


def test_a_log_that_cant_be_read_is_nothing_where_there_is_no_driver(tmp_path: Path) -> None:
    lines = xid_lines(1e6, tmp_path / "none")
    assert lines == [] if not Path("/proc/driver/nvidia").exists() else "can't be read" in lines[0]
