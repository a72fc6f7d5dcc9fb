"""Generators of random numbers that a script has made itself go on after a failure without being given."""

from dying_training import HEAD, RUN, assert_goes_on
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


NOISE = """
import random


def main():
    own = torch.Generator("cuda").manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 6, shuffle=True)
    random.seed(4)
    job = jitckpt.init(model=model, optimizer=optimizer, step_barrier={barrier})
    for epoch in job.epochs(2):
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            loss = cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            for one in model.parameters():
                one.grad.add_(torch.randn(one.shape, device="cuda", generator=own), alpha=random.random())
            at("noise", 10 * epoch + step)
            optimizer.step()
    end(model, [torch.rand(1, device="cuda", generator=own).item(), random.random()])


main()
"""


def test_random_numbers_drawn_for_the_gradients_are_drawn_once_with_the_step_barrier(
    launcher: Launcher,
) -> None:
    program = NOISE.format(barrier=True)
    assert_goes_on(launcher, program, "1 noise 2 0 noise 5 1 noise 11", unsaid="draws random numbers")


def test_without_it_they_are_named(launcher: Launcher) -> None:
    script = launcher.script(HEAD + NOISE.format(barrier=None))
    said = launcher.run(*RUN, "--checkpoint-dir", "ckpt", script).err
    assert "draws random numbers between forward pass and optimizer step. A rank that fails there" in said
