"""Relative checkpoint directories of scripts that change their working directory, as Hydra does."""

import re

from gpt import RUN
from launcher import Launcher

SCRIPT = """
import os, time
WHERE = FOLDER
os.makedirs(WHERE, exist_ok=True)
os.chdir(WHERE)
import torch
from torch import nn
import jitckpt

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
optimizer = torch.optim.SGD(model.parameters())
job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
start = job.restore()
os.write(1, f"rank {rank} begins after step {start}\\n".encode())
for step in range(start, 12):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
torch.distributed.destroy_process_group()
"""
FAULT = ["--fault", "rank=1 step=8 phase=backward kind=kill"]


def test_a_relative_directory_is_that_of_the_first_start(launcher: Launcher) -> None:
    script = launcher.script(SCRIPT.replace("FOLDER", "'start-' + os.environ['JITCKPT_RESTART']"))
    ended = launcher.run(*RUN, *FAULT, script)
    assert ended.status == 0, ended.err
    first, step = re.findall(r"rank 0 begins after step (\d+)", ended.out)
    assert first == "0"
    assert step in ("6", "7")  # rank 0 may have been a step behind
    assert f"Restart 1 went on from step {step}" in ended.err
    assert not (launcher.directory / "start-1" / "ckpt").exists()


def test_ranks_in_different_directories_are_refused(launcher: Launcher) -> None:
    script = launcher.script(SCRIPT.replace("FOLDER", "'rank-' + os.environ['RANK']"))
    ended = launcher.run(*RUN, *FAULT, script)
    assert ended.status == 1
    assert "rank 1 can't go on: Rank 1 has the checkpoint directory" in ended.err
    assert "rank 1 begins" not in ended.out
    assert "Restart" not in ended.err


def test_the_launcher_tells_the_step_that_was_restored(launcher: Launcher) -> None:
    folder = "os.path.abspath('start-' + os.environ['JITCKPT_RESTART'])"
    script = SCRIPT.replace("FOLDER", folder).replace('"ckpt"', 'os.path.abspath("ckpt")')
    ended = launcher.run(*RUN, *FAULT, launcher.script(script))
    assert ended.status == 0, ended.err
    assert re.findall(r"rank 0 begins after step (\d+)", ended.out) == ["0", "0"]
    # The device may be a step behind its host when the rank dies.
    assert re.search(
        r"Restart 1 did not go on from the state after step [67], but from step 0, in", ended.err
    )
