"""What replicas tell each other of their states."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from jitckpt.worker.self_check.replicas import Replicas


def test_trainings_one_after_the_other_in_a_process_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    first, second = (Replicas(0, 0, 0, lambda: store) for _ in range(2))
    assert first.post(2, {"weight": "a"}) is None
    assert second.post(2, {"weight": "b"}) is None
    other = Replicas(1, 0, 0, lambda: store)
    other._prefix = second._prefix  # as the second one in a process of its own
    assert other.post(2, {"weight": "c"}) == (0, {"weight": "b"})
    assert first.is_first_to_say()
    assert second.is_first_to_say()
    assert not other.is_first_to_say()
