"""A process that jitckpt has started makes its ranks itself, as mp.spawn and notebook launchers do."""

import re

import pytest
from etcd_cluster import free_ports
from launcher import JITCKPT_RUN, Launcher

SCRIPT = """
import os, sys
import torch
import torch.multiprocessing as mp
from torch import nn
import jitckpt

def work(rank):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torch would wait for the launcher's store
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1]
    )
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
    for step in range(job.restore(), 6):
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, f"rank {rank} has trained {step + 1} steps\\n".encode())
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    descriptors = [os.environ[f"JITCKPT_{name}_FD"] for name in ("AGENT", "STATE", "LIFELINE")]
    mp.spawn(work, nprocs=2)
    print([os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in descriptors])
"""


def test_they_train_and_are_told_how_they_are_protected(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    monkeypatch.setenv("SOFTGPU_DEVICES", "2")
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "1", "--warm-spares", "0"]
    fault = "rank=0 step=3 phase=backward kind=kill"  # it would come in each restart
    ended = launcher.run(*run, "--fault", fault, launcher.script(SCRIPT), str(port))
    assert ended.status == 0, ended.err
    assert f"the rehearsed failure {fault!r} never happened" in ended.err
    assert sorted(re.findall(r"rank \d has trained 6 steps", ended.out)) == [
        "rank 0 has trained 6 steps",
        "rank 1 has trained 6 steps",
    ]
    assert "['socket', '/memfd" in ended.out, "its own descriptors are as they were"
    assert (
        ended.err.count("was not started by jitckpt's agent, but by a training process of its (mp.spawn,")
        == 2
    )
