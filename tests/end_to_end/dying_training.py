"""Trainings on two ranks that die at places in their scripts, and end as an undisturbed one all the same."""

import re

from launcher import JITCKPT_RUN, Launcher

RUN = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--max-restarts", "5"]
# Its arguments: rank, place and step of each start's death.
HEAD = """
import os, signal, sys
import torch
from torch import distributed as dist, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, start = dist.get_rank(), int(os.environ["JITCKPT_RESTART"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8), torch.randint(0, 4, (48,)))


def at(place, step):
    if [str(rank), place, str(step)] == [*(sys.argv[1:] + [""] * 12)[3 * start : 3 * start + 3]]:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


def end(model, values):
    parameters = [one.tolist() for one in model.parameters()]
    os.write(1, f"END {rank} {parameters} {values}\\n".encode())
    dist.destroy_process_group()
"""


def assert_goes_on(launcher: Launcher, program: str, deaths: str, *, unsaid: str) -> str:
    """Return what the disturbed training has said.

    deaths: arguments for HEAD. unsaid: what the undisturbed training must not say.
    """
    script = launcher.script(HEAD + program)
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", "undisturbed", script)
    assert undisturbed.status == 0, undisturbed.err
    assert unsaid not in undisturbed.err, undisturbed.err
    result = launcher.run(*RUN, "--checkpoint-dir", "disturbed", script, *deaths.split())
    assert result.status == 0, result.err
    assert result.err.count("went on from step") == len(deaths.split()) // 3, result.err
    assert _ends(result.out) == _ends(undisturbed.out), result.err
    return result.err


def _ends(out: str) -> list[str]:
    found = sorted(set(re.findall(r"^END .*$", out, re.MULTILINE)))
    assert len(found) == 2, out
    return found
