"""Generators of random numbers that a script has made itself go on after a failure without being given."""

import re

from launcher import JITCKPT_RUN, Launcher

RUN = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu"]

PROGRAM = """
import os, random, signal, sys
import numpy, torch
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
    if [str(rank), place, str(step)] == [*(sys.argv[1:] + [""] * 9)[3 * start : 3 * start + 3]]:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


class Augment:
    def __init__(self):
        self.rngs = [numpy.random.default_rng(rank), random.Random(rank)]

    def __call__(self, x):
        return x * (1 + self.rngs[0].random() * self.rngs[1].gauss(0, 1))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rng = nn.Linear(8, 4), numpy.random.RandomState(rank)

    def forward(self, x):
        return self.linear(x) + self.rng.normal()


def main():
    on_device = torch.Generator("cuda").manual_seed(rank)
    shuffled = torch.Generator().manual_seed(9)
    augment = Augment()
    model = nn.parallel.DistributedDataParallel(Noisy().cuda())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    loader = DataLoader(data, 6, shuffle=True, generator=shuffled)
    job = jitckpt.init(model=model, optimizer=optimizer)
    for epoch in job.epochs(2):
        of_epoch = torch.Generator().manual_seed(epoch)
        scale = torch.rand(1, generator=of_epoch) + torch.rand(1, generator=shuffled)
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            x = augment(x).cuda() * torch.rand(1, generator=of_epoch).cuda()
            x = x + torch.randn(x.shape, device="cuda", generator=on_device) * scale.cuda()
            x = x + torch.rand(1, generator=shuffled).cuda()
            loss = cross_entropy(model(x), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            at("back", 10 * epoch + step)
            optimizer.step()
            at("stepped", 10 * epoch + step)
        at("epoch", epoch)
    drawn = [torch.rand(1, generator=of_epoch).item(), torch.rand(1, generator=shuffled).item()]
    drawn += [augment.rngs[0].random(), augment.rngs[1].random(), model.module.rng.normal()]
    drawn.append(torch.rand(1, device="cuda", generator=on_device).item())
    os.write(1, f"END {rank} {[one.tolist() for one in model.parameters()]} {drawn}\\n".encode())
    dist.destroy_process_group()


main()
"""


def ends(out: str) -> list[str]:
    found = sorted(set(re.findall(r"^END .*$", out, re.MULTILINE)))
    assert len(found) == 2, out
    return found


def test_generators_of_the_scripts_own_go_on(launcher: Launcher) -> None:
    script = launcher.script(PROGRAM)
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", "undisturbed", script)
    assert undisturbed.status == 0, undisturbed.err
    assert "no save holds" not in undisturbed.err, undisturbed.err
    faults = "1 back 2 0 stepped 6 1 epoch 0"
    result = launcher.run(*RUN, "--checkpoint-dir", "disturbed", script, *faults.split())
    assert result.status == 0, result.err
    assert result.err.count("went on from step") == 3, result.err
    assert ends(result.out) == ends(undisturbed.out), result.err
