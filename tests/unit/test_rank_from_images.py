"""A rank whose processes were made again here is waited for by its worker alone."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_leaving import RANK

from jitckpt.agent.migration.rank_from_images import RankFromImages
from jitckpt.agent.processes.children import Children
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu
from jitckpt.ring import local_state

LIMIT = 60.0


def test_its_end_is_left_to_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent takes note of the ends of orphans, too, which lead sessions as it does."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    monkeypatch.setattr(criu, "restore", lambda *_: process.pid)
    dumped = replace(RANK, pids=(process.pid,), sockets=((11, 5, "agent"),), folders=(), said={}, outputs=())
    rank = RankFromImages(dumped, os.open("/", os.O_RDONLY), local_state.create())
    children = Children(1.0, None)
    try:
        rank.restore(Criu(Path("criu"), "", None), LIMIT, {}, "mark")
        worker = rank.worker(children)
        process.kill()
        assert worker.has_ended(LIMIT)
        children._reap_ended()
        assert worker.reap() == -signal.SIGKILL
        worker.close()
    finally:
        children.close()
        os.close(rank.images)
