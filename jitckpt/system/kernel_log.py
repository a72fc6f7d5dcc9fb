"""What NVIDIA's driver has lately told the kernel's log of: Xid lines name the device and what befell it."""

import os
import time
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
XID = "NVRM: Xid"
MOST_LINES = 32
RECORD_BYTES = 1 << 16  # a read of the log gives one record, and fails if that is longer


def xid_lines(since: float, log: Path = KERNEL_LOG) -> list[str]:
    """Return the driver's Xid lines of the last seconds, the newest MOST_LINES, each with its age.

    since: seconds. One line that says so if there is a driver and the log can't be read. A record is
    `priority,sequence,microseconds,flags;text` (the kernel's Documentation/ABI/testing/dev-kmsg).
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        driver = Path("/proc/driver/nvidia").exists()
        return [f"the kernel's log can't be read: {error.strerror} ({log})"] if driver else []
    found: list[str] = []
    try:
        now = time.monotonic()
        while True:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten while this read; the next ones are there
                continue
            except BlockingIOError:
                break
            if not record:
                break
            for line in record.decode(errors="replace").splitlines():
                head, separator, text = line.partition(";")
                fields = head.split(",")
                if separator and XID in text and len(fields) > 2 and fields[2].isdecimal():
                    age = now - int(fields[2]) / 1e6
                    if age <= since:
                        found.append(f"{max(age, 0.0):.0f} s ago: {text}")
    finally:
        os.close(descriptor)
    return found[-MOST_LINES:]
