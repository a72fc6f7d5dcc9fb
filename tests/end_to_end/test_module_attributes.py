"""What modules keep in plain attributes goes on after a failure; so do modes and rates that epochs set."""

from dying_training import HEAD, RUN, assert_goes_on
from launcher import Launcher

PROGRAM = """
from collections import deque


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def add(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.calls, self.carried, self.temperature = 0, None, 1.0
        self.recent, self.meter = deque(maxlen=3), Meter()

    def forward(self, x):
        self.calls += 1
        self.temperature *= 0.9 + 0.01 * rank
        out = self.body(x) * self.temperature + 0.001 * self.calls
        if self.carried is not None:
            out = out + 0.1 * self.carried
        self.carried = out.detach().mean(0)
        self.recent.append(self.carried.sum())
        self.meter.add(self.carried.sum().item())
        return out + 0.01 * sum(self.recent) + 0.01 * self.meter.sum / self.meter.count


def main():
    net = Net().cuda()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    loader = DataLoader(data, 6, shuffle=True)
    job = jitckpt.init(model=model, optimizer=optimizer)
    epochs = []
    for epoch in job.epochs(3):
        net.meter = Meter()  # a restart in the middle of the epoch makes it anew, too
        if epoch == 1:
            net.body[1].p = 0.25
            net.body[0].eval()
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            loss = cross_entropy(model(x.cuda()), y.cuda())
            at("forward", 10 * epoch + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            at("stepped", 10 * epoch + step)
        net.calls += 100
        at("epoch", epoch)
    ends = [net.calls, net.temperature, net.meter.sum, net.meter.count, net.body[1].p, net.body[0].training]
    ends += [net.carried.tolist(), [one.item() for one in net.recent]]
    end(model, ends)


main()
"""


def test_attributes_of_modules_go_on(launcher: Launcher) -> None:
    deaths = "1 forward 2 0 stepped 12 1 epoch 1 0 forward 23"
    assert_goes_on(launcher, PROGRAM, deaths, unsaid="RuntimeWarning")


PRUNED = """
from torch.nn.utils import prune


def main():
    net = nn.Sequential(nn.Linear(8, {width}), nn.ReLU(), nn.Linear({width}, 4)).cuda()
    for layer in (net[0], net[2]):
        prune.l1_unstructured(layer, "weight", amount=0.1)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    loader = DataLoader(data, 12, shuffle=True)
    job = jitckpt.init(model=model, optimizer=optimizer)
    for epoch in job.epochs(3):
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            loss = cross_entropy(model(x.cuda()), y.cuda())
            at("forward", 10 * epoch + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for layer in (net[0], net[2]):  # by what the last forward pass has left in `weight`
            prune.l1_unstructured(layer, "weight", amount=0.4)
        at("pruned", epoch)
    end(model, [layer.weight_mask.tolist() for layer in (net[0], net[2])] if {width} < 99 else [])


main()
"""


def test_pruning_goes_by_the_weights_of_the_last_forward_pass(launcher: Launcher) -> None:
    deaths = "1 forward 10 0 pruned 1"
    assert_goes_on(launcher, PRUNED.format(width=64), deaths, unsaid="RuntimeWarning")


def test_pruning_by_weights_that_are_too_large_to_keep_is_named(launcher: Launcher) -> None:
    script = launcher.script(HEAD + PRUNED.format(width=4096))
    said = launcher.run(*RUN, "--checkpoint-dir", "ckpt", script).err
    assert "The training prunes 0.weight once more." in said, "the other one is small enough"
