"""Generators of random numbers that a script has made itself go on after a failure without being given."""

from dying_training import assert_goes_on
from launcher import Launcher

PROGRAM = """
import random
import numpy


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
    end(model, drawn)


main()
"""


def test_generators_of_the_scripts_own_go_on(launcher: Launcher) -> None:
    assert_goes_on(launcher, PROGRAM, "1 back 2 0 stepped 6 1 epoch 0", unsaid="no save holds")
