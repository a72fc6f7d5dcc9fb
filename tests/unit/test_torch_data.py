"""Who is told when a program takes a parameter's `data`."""

import subprocess
import sys

# In a process of its own: all tensors are watched from then on.
PROGRAM = """
import torch
from jitckpt.hooks import torch_data

told = []
torch_data.watch(lambda: told.append(1))
parameter = torch.nn.Parameter(torch.ones(2))
parameter.data.mul_(3)
assert (parameter.tolist(), len(told)) == ([3, 3], 1)
parameter.data = torch.zeros(2)
assert (parameter.tolist(), len(told)) == ([0, 0], 1), "an assignment is no taking"
for other in (torch.ones(2), (parameter * 2), parameter.detach()):
    other.data.add_(1)
assert len(told) == 1, "no parameters"
optimizer = torch.optim.SGD([parameter], 0.1)
parameter.sum().backward()
optimizer.step()
torch.nn.utils.clip_grad_norm_([parameter], 1.0)
torch.nn.Linear(2, 2).state_dict()
assert len(told) == 1, "torch itself takes none in a training"
"""


def test_each_taking_of_a_parameters_data_is_told() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
