"""The memory of the step barrier, as the device servers find it."""

import mmap
import os
import struct
from pathlib import Path

import pytest

from jitckpt.agent.proxies.step_barrier import StepBarrier


def test_the_memory_has_a_head_and_a_line_for_each_rank_and_keeps_its_size() -> None:
    barrier = StepBarrier(3)
    content = Path(barrier.path).read_bytes()
    assert struct.unpack_from("<QQQ", content) == (int.from_bytes(b"JCPKTOG2", "little"), 3, 1)
    assert content[24:] == bytes(4096 + 3 * 64 - 24)
    assert barrier.of(2) == f"{barrier.path}#2"
    server = os.open(barrier.path, os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(server, 0) as mapped:
        mapped[4096] = 7
        assert Path(barrier.path).read_bytes()[4096] == 7
        with pytest.raises(PermissionError):
            os.ftruncate(server, 0)
        barrier.close()
        assert mapped[4096] == 7
    os.close(server)
    assert not Path(barrier.path).exists()
