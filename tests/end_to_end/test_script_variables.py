"""Variables that a script's loop changes go on after a failure without being given."""

import re

import pytest
from dying_training import assert_goes_on
from launcher import Launcher

PROGRAM = """
import numpy
from collections import Counter, deque

samples_seen = 0


class Meter:
    def __init__(self, limit):
        self.limit, self.sum, self.count, self.last = limit, 0.0, 0, deque(maxlen=2)

    def add(self, value):
        self.sum, self.count = self.sum + value, self.count + 1
        self.last.append(value)


def count(batch):
    global samples_seen
    samples_seen += len(batch)


class Trainer:
    def __init__(self, model):
        self.model, self.meter, self.steps, self.best = model, Meter(rank), 0, None
        self.optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def train(self, job, loader, epoch, history):
        total, kinds, losses = 0.0, Counter(), []
        scale, carried, smooth = 1.0, torch.zeros(4, device="cuda"), numpy.zeros(2)
        worst = None
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            count(x)
            out = self.model(x.cuda()) * scale + 0.1 * carried + 0.01 * float(smooth[0])
            loss = cross_entropy(out, y.cuda())
            at("forward", 10 * epoch + step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            value = loss.item()
            total += value
            scale *= 0.99 + 0.001 * rank
            carried = 0.5 * carried + out.detach().mean(0)
            smooth += value * numpy.array([0.1, 1.0])
            kinds[int(y[0])] += 1
            losses.append(value)
            self.meter.add(value)
            self.steps += 1
            if worst is None or value > worst[0]:
                worst = value, step
        history.append(total / len(losses))
        return [total, scale, carried.tolist(), smooth.tolist(), sorted(kinds.items()), losses, worst]


def main():
    loader = DataLoader(data, 6, shuffle=True)
    trainer = Trainer(nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda()))
    job = jitckpt.init(model=trainer.model, optimizer=trainer.optimizer)
    history, best, log = [], float("inf"), ()
    for epoch in job.epochs(3):
        results = trainer.train(job, loader, epoch, history)
        at("epoch", epoch)
        log = (*log, results[0])
        if history[-1] < best:
            best = history[-1]
            trainer.best = epoch
    ends = [history, best, log, results, trainer.steps, trainer.best, samples_seen, trainer.meter.limit]
    ends += [trainer.meter.sum, trainer.meter.count, [*trainer.meter.last]]
    end(trainer.model, ends)


main()
"""


def test_variables_of_functions_modules_and_objects_go_on(launcher: Launcher) -> None:
    deaths = "1 forward 1 0 epoch 0 1 forward 12 0 forward 27"
    assert_goes_on(launcher, PROGRAM, deaths, unsaid="that no save holds")


BEHIND = """
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return (data[number] for number in range(24))


def train(job, loader, epoch):
    for step, (x, y) in enumerate(job.batches(loader)):
        loss = cross_entropy(model(x.cuda()), y.cuda())
        at("forward", 10 * epoch + step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        text = f"{epoch}: {len(x)}"
        if step == 3:
            break
    return loss.item(), step, y.tolist(), text


model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
optimizer = torch.optim.Adam(model.parameters(), 0.05)
job = jitckpt.init(model=model, optimizer=optimizer)
losses = []
for epoch in job.epochs(4):
    losses.append(train(job, DataLoader(data, 4, shuffle=True), epoch))
    for x, y in job.batches(DataLoader(Stream(), 6)):
        last = cross_entropy(model(x.cuda()), y.cuda())
        at("stream", 10 * epoch + len(losses))
        optimizer.zero_grad()
        last.backward()
        optimizer.step()
    losses.append((last.item(), x.sum().item()))
end(model, [losses])
"""


def test_what_is_read_behind_a_loop_is_there_after_a_failure_in_the_next_one(launcher: Launcher) -> None:
    """A restart at a loop's end comes there without a batch: the last loss would have no value."""
    assert_goes_on(launcher, BEHIND, "1 stream 1 0 forward 10 1 forward 30", unsaid="no save holds")


STEP = """
def step(x, y):
    loss = cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
"""

LATER = """
class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def add(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


def tasks(epoch):
    of_task = {}
    for task, loader in loaders.items():
        meter = Meter()
        for number, (x, y) in enumerate(job.batches(loader)):
            at(task, 10 * epoch + number)
            meter.add(step(x, y))
        of_task[task] = meter.sum / meter.count, number
    return of_task


model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
optimizer = torch.optim.Adam(model.parameters(), 0.05)
job = jitckpt.init(model=model, optimizer=optimizer)
first, *others = (DataLoader(data, 12, shuffle=True) for _ in range(3))
loaders = dict(zip(["one", "other"], others))
history, best, bad = [], None, 0
for epoch in job.epochs(5):
    total = count = 0
    for x, y in job.batches(first):
        total += step(x, y)
        count += 1
    history.append(total / count)
    for number in job.steps(3):
        at("steps", 10 * epoch + number)
        total += step(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    history.append((total, count, tasks(epoch)))
    if best is None or total < best - 100:
        best, bad = total, 0
    else:
        bad += 1
    history.append(bad)
end(model, [history])
"""


def test_a_restart_in_a_later_loop_of_an_epoch_finds_what_those_before_had_left(launcher: Launcher) -> None:
    """It passes by these without a batch, and does again what comes between them."""
    assert_goes_on(launcher, STEP + LATER, "1 steps 12 0 other 31 1 one 40", unsaid="no save holds")


PHASES = """
def fit(phase, loader):
    best, losses = float("inf"), []
    for epoch in job.epochs(3):
        if epoch > 0 and losses[-1] > 0.1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        total = 0.0
        for number, (x, y) in enumerate(job.batches(loader)):
            at(phase, 10 * epoch + number)
            total += step(x, y)
        losses.append(total)
        best = min(best, total)
        at(f"end of {phase}", epoch)
    return best, epoch, losses


model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
job = jitckpt.init(model=model, optimizer=optimizer)
results = {phase: fit(phase, DataLoader(data, 12, shuffle=True)) for phase in ("one", "other")}
for phase in ("third", "last"):
    results[phase] = fit(phase, DataLoader(data, 8, shuffle=True))
end(model, [results, optimizer.param_groups[0]["lr"]])
"""


def test_the_top_of_an_epoch_and_the_code_behind_epochs_find_what_those_before_had_left(
    launcher: Launcher,
) -> None:
    """A restart does an epoch's top again, and passes by the loops over epochs that were done."""
    deaths = "1 one 21 0 other 11 1 third 22 0 last 10 1 last 21"
    assert_goes_on(launcher, STEP + PHASES, deaths, unsaid="no save holds")


RELOADING = """
import copy, functools
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    loss: float = float("inf")
    bad: int = 0
    model: Any = None
    optimizer: Any = None  # whose tensors are the optimizer's own, once it was loaded


def scaled(value, by):
    return value * by


layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.Adam(model.parameters(), 0.05)
job = jitckpt.init(model=model, optimizer=optimizer)
loader = DataLoader(data, 8, shuffle=True)
cooled, best, losses = functools.partial(scaled, by=2.0), Best(), []
for epoch in job.epochs(5):
    for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
        loss = cooled(cross_entropy(model(x.cuda()), y.cuda()))
        at("forward", 10 * epoch + step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cooled.keywords["by"] *= 0.97
    losses.append(loss.item())
    if epoch in (0, 2):
        best.model = copy.deepcopy(model.state_dict())
        best.optimizer = copy.deepcopy(optimizer.state_dict())
    else:
        best.bad += 1
        model.load_state_dict(best.model)
        optimizer.load_state_dict(best.optimizer)
state = [one.tolist() for part in optimizer.state.values() for one in part.values()]
end(model, [state, losses, best.bad, cooled.keywords])
"""


def test_what_was_loaded_into_the_optimizer_is_its_own_in_a_restart_too(launcher: Launcher) -> None:
    """And so is what its later steps make of that, where it is loaded once more."""
    deaths = "1 forward 12 0 forward 31 1 forward 42"
    assert_goes_on(launcher, RELOADING, deaths, unsaid="that no save holds")


HOLDERS = """
from functools import partial

calls = []


def note(value, seen=[0.0], *, sums={}):
    seen.append(value)
    sums["all"] = sums.get("all", 0.0) + value
    note.last = value
    return 0.001 * sums["all"]


note.last = 0.0


def averaging(share):
    mean, count = None, 0

    def average(value):
        nonlocal mean, count
        count += 1
        mean = value if mean is None else share * mean + (1 - share) * value
        return mean

    return average


class Spread:
    __slots__ = ("count", "mean")
    made = 0

    def __init__(self):
        self.count, self.mean = 0, 0.0

    def add(self, value):
        Spread.made += 1
        self.count += 1
        self.mean += (value - self.mean) / self.count


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.mean = nn.CrossEntropyLoss(label_smoothing=0.4), 0, 0.0

    def forward(self, out, y):
        self.calls += 1
        loss = self.inner(out, y) * (1 + 0.01 * self.calls + 0.01 * self.mean)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss


class Trainer:
    def __init__(self):
        self.loss, self.fast, self.level = Smooth(), averaging(0.1), 1.0

    def losses(self, out, y):
        loss = self.loss(out, y) * self.level
        self._cool()
        return loss * (1 + 0.01 * self.fast(loss.item()))

    def _cool(self):
        calls.append(len(calls))
        self.loss.inner.label_smoothing *= 0.95


def main():
    trainer, slow, steady, spread = Trainer(), averaging(0.9), averaging(0.5), Spread()
    noted, dropout = partial(note, seen=[]), nn.Dropout(0.5)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
    optimizer, loader = torch.optim.Adam(model.parameters(), 0.1), DataLoader(data, 6, shuffle=True)
    optimizer.warmed = 0
    job = jitckpt.init(model=model, optimizer=optimizer)
    for epoch in job.epochs(3):
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            optimizer.warmed += 1
            optimizer.param_groups[0]["lr"] = 0.1 * min(1, optimizer.warmed / 9)
            loss = trainer.losses(dropout(model(x.cuda())), y.cuda())
            at("forward", 10 * epoch + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = slow(loss.item()) + steady(loss.item()) + note(loss.item())
            spread.add(value + noted(value))
            dropout.p *= 0.95
            if (epoch, step) == (0, 1):
                trainer.level = 0.5
    ends = [value, note.__defaults__, note.__kwdefaults__, note.last, noted.keywords, dropout.p, calls]
    ends += [spread.count, spread.mean, Spread.made, trainer.loss.calls, trainer.loss.mean, trainer.level]
    end(model, ends)


main()
"""


def test_what_functions_classes_and_other_modules_hold_goes_on(launcher: Launcher) -> None:
    deaths = "1 forward 2 0 forward 11 1 forward 22"
    assert_goes_on(launcher, HOLDERS, deaths, unsaid="that no save holds")


CACHED = """
from torch.utils.data import Dataset


class Cached(Dataset):
    def __init__(self):
        self.cache, self.reads = {}, 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.reads += 1
        if index not in self.cache:
            self.cache[index] = data[index][0] + torch.randn(8)
        return self.cache[index], data[index][1]


def main():
    torch.manual_seed(rank)
    dataset = Cached()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    job = jitckpt.init(model=model, optimizer=optimizer)
    for epoch in job.epochs(3):
        for step, (x, y) in enumerate(job.batches(DataLoader(dataset, 6, shuffle=True))):
            loss = cross_entropy(model(x.cuda()), y.cuda())
            at("forward", 10 * epoch + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        at("epoch", epoch)
    end(model, [dataset.reads, [one.tolist() for one in dataset.cache.values()]])


main()
"""


def test_what_a_dataset_keeps_of_its_samples_goes_on(launcher: Launcher) -> None:
    assert_goes_on(launcher, CACHED, "1 forward 2 0 forward 11 1 epoch 1", unsaid="no save holds")


EVALUATING = """
import time


def evaluate(step, waits):
    if sys.argv[1:] and start == 0 and step == 6:
        dist.barrier()  # so both are behind their steps
        at("evaluation", step)
        if waits == "collective":
            dist.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
        for _ in range(60):  # ever at another place
            time.sleep(0.1)


def main():
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    job = jitckpt.init(model=model, optimizer=optimizer)
    done, begun, best, history, log = job.restore(), 0, float("inf"), [], []
    carried = torch.zeros(4, device="cuda")
    for number in job.steps(9):
        begun += 1
        x, y = data[torch.randint(0, 48, (6,))]
        loss = cross_entropy(model(x.cuda()) * (1 + 0.01 * done) + carried, y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            history.append(loss.item())
            best = min(best, loss.item())
        evaluate(number, sys.argv[-1])
        done += 1
        if number < 3:
            carried = 0.5 * carried + torch.arange(4.0, device="cuda")
            log.append(number)
    end(model, [done, begun, best, history, log])


main()
"""


@pytest.mark.parametrize("waits", ["collective", "sleep"])
def test_a_rank_that_stands_behind_its_step_saves_its_variables_as_they_are(
    launcher: Launcher, waits: str
) -> None:
    said = assert_goes_on(launcher, EVALUATING, f"1 evaluation 6 {waits}", unsaid="that no save holds")
    stood = re.search(r"Rank 0 stood at .*", said)
    assert stood is not None, said
    assert "in evaluate" in stood[0]
    assert "'log'" in stood[0]
    assert "'history'" not in stood[0]


CHOOSING = """
class Phases:
    def __init__(self, model):
        self.model, self.step = model, self.first

    def first(self, x):
        return self.model(x)

    def second(self, x):
        return self.model(x + 0.1)


def main():
    model = nn.Linear(8, 4).cuda()
    ddp = nn.parallel.DistributedDataParallel(model)
    adam, sgd = torch.optim.Adam(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    job = jitckpt.init(model=model, optimizer=[adam, sgd])
    small, large = DataLoader(data, 4, shuffle=True), DataLoader(data, 8, shuffle=True)
    optimizer, loss_function, loader, phases = adam, cross_entropy, small, Phases(ddp)
    losses, done = [], 0
    for epoch in job.epochs(3):
        if epoch == 2:
            loader = large
        for step, (x, y) in enumerate(batches := job.batches(loader), batches.first):
            if done == 15:
                optimizer, phases.step = sgd, phases.second
            if done == 20:
                loss_function = smooth
            loss = loss_function(phases.step(x.cuda()), y.cuda())
            at("forward", 100 * epoch + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done += 1
        at("epoch", epoch)
    end(model, [losses, optimizer is sgd, loss_function is smooth, loader is large])


main()
"""


@pytest.mark.parametrize("deaths", ["0 forward 105 1 forward 109 0 forward 202", "1 epoch 1 0 epoch 2"])
def test_what_the_loop_chooses_late_is_chosen_after_a_failure(launcher: Launcher, deaths: str) -> None:
    assert_goes_on(launcher, CHOOSING, deaths, unsaid="no save holds")
