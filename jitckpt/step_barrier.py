"""Memory in which the ranks' device servers tell each other which optimizer steps they are ready for.

The agent makes it, and the servers map it: it outlives each of them. They alone write there; see
native/proxy/transport/together.h.
"""

import fcntl
import os
import struct

VARIABLE = "JITCKPT_PROXY_TOGETHER"  # the file's path, in the workers
MAGIC = 0x31474F544B50434A
HEAD_BYTES = 4096
RANK_BYTES = 64


class StepBarrier:
    """Of one start of a job's ranks, all of them on this host. path: of the file, while this object lives."""

    def __init__(self, ranks: int) -> None:
        self._file = os.memfd_create("jitckpt-steps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, HEAD_BYTES + ranks * RANK_BYTES)
        os.pwrite(self._file, struct.pack("<QQ", MAGIC, ranks), 0)
        fcntl.fcntl(
            self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Who has it mapped keeps it."""
        os.close(self._file)
