import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from jitckpt.worker.in_place import cudnn

CONVOLVES = """
import torch
from types import SimpleNamespace
from jitckpt.worker.in_place import cudnn
cudnn.leave_out(SimpleNamespace())
print(torch.backends.cudnn.enabled, torch.backends.cuda.cudnn_sdp_enabled())
"""


def test_on_a_gpu_torch_does_without_and_it_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", CONVOLVES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert "does without cuDNN" in done.stderr


def test_softgpu_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.backends.cudnn.enabled
    cudnn.leave_out(SimpleNamespace(softgpu_shadow=None))
    assert torch.backends.cudnn.enabled == before
    assert capsys.readouterr().err == ""
