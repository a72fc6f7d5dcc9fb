"""Tensors and events on the device between processes, as torch.multiprocessing passes them."""

from collections.abc import Callable
from pathlib import Path


def test_torch_shares_between_processes(run_whole: Callable[..., str]) -> None:
    before = set(Path("/dev/shm").iterdir())
    assert run_whole("share_tensors") == "shared\n"
    assert set(Path("/dev/shm").iterdir()) == before
