# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import copy
import hashlib
import os
import random
import signal
import sys
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
place, times = sys.argv[2].split(":")
visits = {}  # type: ignore[var-annotated]
MADE = {"outrun": 1, "behind": 4}  # places of which each is so many steps behind the last


def at(where):
    visits[where] = visits.get(where, 0) + 1
    doomed = rank == 1 and os.environ["JITCKPT_RESTART"] == "0"
    if doomed and (where, visits[where]) == (place, int(times)):
        torch.cuda.synchronize()
        # Until the other rank, which might be a step behind, has made this one, too.
        while where in MADE and not os.path.exists(f"made-{place}-{MADE[where] * int(times)}"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and where == "made":
        open(f"made-{place}-{visits[where]}", "w").close()


def reduce(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


class Samples(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return (torch.full((8,), index / 20.0) + torch.randn(8) * random.random()).numpy()


torch.manual_seed(0)
random.seed(1 + rank)


def adversaries():
    generator, critic = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    one, other = (torch.optim.Adam(module.parameters(), 0.01) for module in (generator, critic))
    torch.manual_seed(1 + rank)
    job = jitckpt.init(model=both, optimizer=[one, other])
    for step in job.steps(14):
        drawn = torch.randn(4, 4).cuda()
        if step >= 2:
            other.zero_grad()
            (critic(generator(drawn).detach()).mean() - critic(torch.randn(4, 8).cuda()).mean()).backward()
            reduce(critic)
            other.step()
            at("between")
        if step % 3 == 2 or step < 2:
            one.zero_grad()
            (-critic(generator(drawn)).mean()).backward()
            reduce(generator)
            one.step()
        at("step")
    return both, [one, other]


def gradients():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    torch.manual_seed(1 + rank)
    job = jitckpt.init(model=model, optimizer=optimizer, scheduler=scheduler)

    def forces(x):
        x = x.cuda().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()

    for step in job.steps(12):
        optimizer.zero_grad()
        forces(torch.randn(4, 8)).backward()
        reduce(model)
        optimizer.step()
        at("made")
        at("step")
        if step % 4 == 3:
            for number in range(3):
                forces(torch.randn(4, 8) if place == "behind" else torch.full((4, 8), 0.1 * number)).item()
            at("behind")
            if place == "preemption" and step == 7:
                print("evaluates\n", end="", flush=True)
                # For longer than it takes until the save is ordered.
                while len(sys.argv) == 3 and '"save_ordered"' not in open("preempted/events.jsonl").read():
                    forces(torch.ones(4, 8)).item()
                for _ in range(40):
                    forces(torch.ones(4, 8)).item()
                    time.sleep(0.005)
            scheduler.step()
            at("scheduled")
    return model, [optimizer]


def found():
    # A scheduler and a scaler that init is not given.
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
    job = jitckpt.init(model=model, optimizer=optimizer)
    for step in job.steps(12):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((4, 8), 0.1 * step).cuda()).square().mean()).backward()
        reduce(model)
        at("reduced")
        scaler.step(optimizer)
        scaler.update()
        at("updated")
        scheduler.step()
    model.register_buffer("scale", torch.tensor([scaler.get_scale(), scheduler.last_epoch]))
    return model, [optimizer]


def brought_forward():
    # A scheduler that init is not given, and that the script brings forward itself.
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    job = jitckpt.init(model=model, optimizer=optimizer)
    first = job.restore()
    for _ in range(first):
        scheduler.step()
    for step in range(first, 12):
        optimizer.zero_grad()
        model(torch.full((4, 8), 0.1 * step).cuda()).square().mean().backward()
        reduce(model)
        at("reduced")
        optimizer.step()
        scheduler.step()
    model.register_buffer("last", torch.tensor(scheduler.last_epoch))
    return model, [optimizer]


def averaged():
    # Of more bytes than a rank keeps for itself.
    model = nn.Sequential(nn.Linear(8, 60000), nn.Tanh(), nn.Linear(60000, 1)).cuda()
    kept = AveragedModel(model, "cuda", multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = jitckpt.init(model=nn.ModuleList([model, kept]), optimizer=optimizer)
    for step in job.steps(12):
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), 0.1 * step).cuda()).square().mean()
        at("forward")
        loss.backward()
        reduce(model)
        optimizer.step()
        kept.update_parameters(model)
        at("updated")
    return nn.ModuleList([model, kept]), [optimizer]


def averaged_beside():
    model = nn.Sequential(nn.Linear(8, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 1)).cuda()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = jitckpt.init(model=model, optimizer=optimizer)
    for step in job.steps(12):
        optimizer.zero_grad()
        teacher = average(torch.ones(4, 8).cuda()).detach().mean()
        loss = (model(0.1 * step + torch.randn(4, 8).cuda()) - teacher).square().mean()
        at("forward")
        loss.backward()
        reduce(model)
        optimizer.step()
        average.update_parameters(model)
        at("updated")
    return nn.ModuleList([model, average]), [optimizer]


def batches():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)).cuda()
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    torch.manual_seed(1 + rank)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2, collate_fn=list)
    held_out = DataLoader(Samples(), batch_size=10, shuffle=True, collate_fn=list)
    job = jitckpt.init(model=replicated, optimizer=optimizer, scheduler=scheduler)

    def loss_of(arrays):
        return replicated(torch.stack([*map(torch.from_numpy, arrays)]).cuda()).square().mean()

    for epoch in job.epochs(3):
        model.train()
        for batch in job.batches(loader):
            optimizer.zero_grad()
            factor = 1 + random.random()
            (loss_of(batch) * factor).backward()
            at("backward")
            optimizer.step()
        at("tail")
        model.eval()
        with torch.no_grad():
            loss = sum(loss_of(batch) for batch in held_out)
        dist.all_reduce(loss)
        at("evaluated")
        scheduler.step(loss)
        at("scheduled")
    return model, [optimizer]


class StopTraining(Exception):
    pass


def folds():
    # Each but the last is ended by an exception: of the evaluation behind an epoch, and in the middle of one.
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(1 + rank)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True, collate_fn=list)
    job = jitckpt.init(model=model, optimizer=optimizer)
    results = []
    for fold in range(3):
        try:
            for epoch in job.epochs(2 if fold < 2 else 1):
                for number, batch in enumerate(job.batches(loader)):
                    optimizer.zero_grad()
                    loss = model(torch.stack([*map(torch.from_numpy, batch)]).cuda()).square().mean()
                    loss.backward()
                    reduce(model)
                    at("backward")
                    optimizer.step()
                    if (fold, epoch, number) == (1, 1, 2):
                        raise StopTraining(20.0)
                at("tail")
                if (fold, epoch) == (0, 1):
                    raise StopTraining(10.0)
            results.append(0.0)
        except StopTraining as stop:
            at("caught")
            results.append(fold + stop.args[0] + number)
    model.register_buffer("results", torch.tensor(results))
    print(f"rank {rank} has {results}\n", end="", flush=True)
    return model, [optimizer]


def warmed():
    # What loops before and behind those over epochs set is read further on, and changed in between.
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(1 + rank)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True, collate_fn=list)
    job = jitckpt.init(model=model, optimizer=optimizer)

    def train(batch, scale):
        optimizer.zero_grad()
        loss = scale * model(torch.stack([*map(torch.from_numpy, batch)]).cuda()).square().mean()
        loss.backward()
        reduce(model)
        at("backward")
        optimizer.step()
        return loss.item()

    for number, batch in enumerate(job.batches(loader)):
        level = train(batch, 1.0)
    scale = level = 1 + level / 100 + number / 1000
    for step in job.steps(2):
        level += train([torch.full((8,), 0.1 * step).numpy()], level)
    results = [number, scale, level]
    for epoch in job.epochs(2):
        for number, batch in enumerate(job.batches(loader)):
            level = train(batch, scale)
    results += [epoch, number, level]
    for number, batch in enumerate(job.batches(loader)):
        level = train(batch, scale + number)
    results += [number, level]
    model.register_buffer("results", torch.tensor(results))
    print(f"rank {rank} has {results}\n", end="", flush=True)
    return model, [optimizer]


class Noise:  # of a script's own generator
    def __init__(self):
        self.generator = torch.Generator(device="cuda").manual_seed(3)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def average():
    # In the second half of the training through the parameters' data, which torch does not count.
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    kept = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = jitckpt.init(model=model, optimizer=optimizer, extra=kept)
    for step in job.steps(12):
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), 0.1 * step).cuda()).square().mean()
        at("forward")
        loss.backward()
        reduce(model)
        at("outrun")
        optimizer.step()
        at("made")
        with torch.no_grad():
            for one, other in zip(kept.parameters(), model.parameters()):
                (one if step < 6 else one.data).lerp_(other, 0.1)
    return nn.ModuleList([model, kept]), [optimizer]


def noise():
    # Drawn between the forward pass and the step, for which the ranks wait for each other.
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    own = Noise()
    job = jitckpt.init(model=model, optimizer=optimizer, extra=own, step_barrier=place != "alone")
    for step in job.steps(12):
        optimizer.zero_grad()
        model(torch.full((4, 8), 0.1 * step).cuda()).square().mean().backward()
        reduce(model)
        for parameter in model.parameters():
            parameter.grad += torch.randn((), device="cuda", generator=own.generator) * 0.01  # type: ignore[operator]
        at("drawn")
        optimizer.step()
    return model, [optimizer]


model, optimizers = globals()[sys.argv[1]]()
state = hashlib.sha256(repr([group["lr"] for one in optimizers for group in one.param_groups]).encode())
values = [value for one in optimizers for kept in one.state.values() for value in kept.values()]
for tensor in [*model.state_dict().values(), *values, torch.rand(3), torch.rand(3, device="cuda")]:
    state.update(tensor.detach().cpu().numpy().tobytes())
print(f"rank {rank} ended with {state.hexdigest()} {random.random()}\n", end="", flush=True)
dist.destroy_process_group()
