"""A rank dies between its part in an all-reduce and its own optimizer step, which its replica takes."""

import json
import re
from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher

from jitckpt.saves import folders

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
TRAINING = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import jitckpt

STEPS, FATAL, VICTIM = 12, int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)]
model = DistributedDataParallel(nn.Sequential(*layers).to("cuda"), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


class Batches:
    given = 0

    def next(self):
        self.given += 1
        return torch.randn(4, 8).to("cuda", non_blocking=True) + self.given * random.random()

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


batches = Batches()
torch.manual_seed(1 + rank)
random.seed(1 + rank)
job = jitckpt.init(
    checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler, extra=batches
)
start = job.restore()
passed = Path("passed")
for step in range(start + 1, STEPS + 1):
    for last in (False, True):
        with model.no_sync() if not last else torch.enable_grad():
            model(batches.next()).square().mean().backward()
    fatal = step == FATAL and os.environ["JITCKPT_RESTART"] == "0"
    if fatal and rank == VICTIM:
        torch.cuda.synchronize()
        while not passed.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    scheduler.step()
    if fatal:
        torch.cuda.synchronize()
        passed.touch()
    optimizer.zero_grad()
state = hashlib.sha256()
for tensor in [*model.state_dict().values(), torch.rand(3), torch.rand(3, device="cuda")]:
    state.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
end = f"{state.hexdigest()} {batches.given} {random.random()} {scheduler.get_last_lr()}"
print(f"rank {rank} {end}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


def results(out: str) -> list[str]:
    found = sorted(line for line in out.splitlines() if line.startswith("rank "))
    assert len(found) == 2, out
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    out = launcher.succeed(*RUN, launcher.script(TRAINING), "0", "0")
    return results(out)


@pytest.mark.parametrize("victim", [0, 1])
def test_its_own_state_is_that_of_the_step_that_its_replica_took(
    launcher: Launcher, undisturbed: list[str], victim: int
) -> None:
    script = launcher.script(TRAINING)
    result = launcher.run(*RUN, "--max-restarts", "1", script, "7", str(victim))
    assert result.status == 0, result.err
    assert results(result.out) == undisturbed
    assert re.search("went on from step [67],", result.err), result.err  # the other may be a step behind
    folder = launcher.directory / "ckpt"
    assert {record.rank for record in folders.find(folder) if record.kind == "rank"} == {1 - victim}
    local = folder / "step-0000000007" / f"local-{victim:05d}"
    document = json.loads((local / "state.json").read_bytes())["local"]
    assert document["final"] is False, "taken in the forward pass: the optimizer step never came"
    assert document["missing"] == document["left_out"] == []
    assert Path(local / "tensors.safetensors").stat().st_size > 0
