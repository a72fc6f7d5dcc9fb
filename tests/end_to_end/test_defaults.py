"""Trainings that set for all of torch where and of what type tensors are made come back bit for bit."""

import re

import pytest
from gpt import RUN
from launcher import Launcher

SCRIPT = """
import hashlib, os
import torch
from torch import nn
import jitckpt

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
DEFAULT
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 2)).cuda()
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler, save_every=5)
for step in range(job.restore(), 12):
    model(torch.randn(8, 16, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
state = [*model.state_dict().values(), torch.cuda.get_rng_state(), torch.get_rng_state()]
digest = hashlib.sha256(b"".join(bytes(value.cpu().view(-1).view(torch.uint8).tolist()) for value in state))
os.write(1, f"rank {rank} ends with {digest.hexdigest()}\\n".encode())
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "default",
    [
        "torch.set_default_device(f'cuda:{rank}')",
        "torch.set_default_tensor_type(torch.cuda.FloatTensor)",
        "torch.set_default_dtype(torch.float64)",
        "torch.use_deterministic_algorithms(True)",
    ],
)
def test_what_a_script_sets_for_all_of_torch_does_not_matter(launcher: Launcher, default: str) -> None:
    script = launcher.script(SCRIPT.replace("DEFAULT", default))
    undisturbed = launcher.run(*RUN, script)
    assert undisturbed.status == 0, undisturbed.err
    (launcher.directory / "ckpt").rename(launcher.directory / "before")
    disturbed = launcher.run(*RUN, "--fault", "rank=1 step=8 phase=backward kind=kill", script)
    assert disturbed.status == 0, disturbed.err
    # The device of the killed rank may have been a step behind its host.
    assert re.search(r"Restart 1 went on from step [67]\b", disturbed.err), disturbed.err
    ends = [sorted(re.findall(r"rank \d ends with \w+", one.out)) for one in (undisturbed, disturbed)]
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
