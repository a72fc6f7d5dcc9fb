"""sharded_training.py whose last snapshot is put away, by a thread inside of torch, as the script ends.

usage: busy_at_the_end.py STEPS raises|ends ARGUMENTS...
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import sharded_training
import torch

from jitckpt.worker.saving import beside, snapshots

last_step, end, *sys.argv[1:] = sys.argv[1:]
BUSY_SECONDS = {"ends": 0.5, "raises": 60}[end]  # or until it is told that the end has come
is_busy = threading.Event()


def busy(put_in: Callable[..., None]) -> Callable[..., None]:
    def put_in_slowly(self: snapshots.Snapshots, begun: beside.Begun, document: Any, tensors: Any) -> None:
        put_in(self, begun, document, tensors)
        if begun.step != int(last_step):
            return
        is_busy.set()
        until = time.monotonic() + BUSY_SECONDS
        source, copy = (torch.zeros(1 << 20, device="cpu") for _ in range(2))
        while time.monotonic() < until and not self._stopping.is_set():
            copy.copy_(source)

    return put_in_slowly


def digest_or_raise(digest: Callable[..., str]) -> Callable[..., str]:
    def raising(training: sharded_training.Training) -> str:
        if end == "raises":
            training.model(torch.ones(8, 8, device="cuda"))  # as it begins, the last snapshot is put away
            is_busy.wait()
            raise ValueError("of the script")
        return digest(training)

    return raising


snapshots.Snapshots._put_in = busy(snapshots.Snapshots._put_in)  # type: ignore[method-assign]
sharded_training.digest = digest_or_raise(sharded_training.digest)
sharded_training.main()
