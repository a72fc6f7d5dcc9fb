"""Loops that tell their boundaries, with a rank killed at each kind of place in them."""

import re
import signal

import pytest
from launcher import JITCKPT_RUN, Launcher

from jitckpt.worker.one_connection import VARIABLE

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
# The first argument chooses the training, the second where rank 1 is killed in its first life: a place and
# how often it has been there.
TRAINING = """
import copy, hashlib, os, random, signal, sys, time
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
place, times = sys.argv[2].split(":")
visits = {}
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
                print("evaluates\\n", end="", flush=True)
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
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)
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
    kept = AveragedModel(model, "cuda", multi_avg_fn=get_ema_multi_avg_fn(0.9))
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
    print(f"rank {rank} has {results}\\n", end="", flush=True)
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
    print(f"rank {rank} has {results}\\n", end="", flush=True)
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
            parameter.grad += torch.randn((), device="cuda", generator=own.generator) * 0.01
        at("drawn")
        optimizer.step()
    return model, [optimizer]


model, optimizers = globals()[sys.argv[1]]()
state = hashlib.sha256(repr([group["lr"] for one in optimizers for group in one.param_groups]).encode())
values = [value for one in optimizers for kept in one.state.values() for value in kept.values()]
for tensor in [*model.state_dict().values(), *values, torch.rand(3), torch.rand(3, device="cuda")]:
    state.update(tensor.detach().cpu().numpy().tobytes())
print(f"rank {rank} ended with {state.hexdigest()} {random.random()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
NOWHERE = "nowhere:0"


def ends(out: str) -> list[str]:
    found = sorted(line for line in out.splitlines() if re.match(r"rank \d ended with ", line))
    assert len(found) == 2, out
    return found


@pytest.mark.parametrize(
    ("training", "places"),
    [
        ("adversaries", {"step:4": 4, "step:9": 9}),
        ("gradients", {"step:6": 6, "scheduled:2": 8}),
        ("found", {"reduced:6": 6, "updated:9": 9}),
        ("brought_forward", {"reduced:6": 6}),
        ("average", {"forward:5": 4, "forward:10": 9}),
        ("averaged", {"forward:5": 4}),
        ("averaged_beside", {"forward:5": 4, "updated:9": 9}),
        ("noise", {"drawn:8": 8}),
        ("batches", {"backward:8": 8, "tail:2": 10, "evaluated:1": 5, "scheduled:2": 10}),
        ("warmed", {"backward:3": 3, "backward:12": 12, "backward:19": 19}),
        ("folds", {"tail:2": 10, "caught:1": 10, "backward:13": 13, "caught:2": 18, "backward:21": 21}),
    ],
)
def test_a_rank_that_is_killed_changes_nothing(
    launcher: Launcher, training: str, places: dict[str, int]
) -> None:
    script = launcher.script(TRAINING)
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", NOWHERE, script, training, NOWHERE)
    assert undisturbed.status == 0, undisturbed.err
    for place, step in places.items():
        result = launcher.run(*RUN, "--checkpoint-dir", place, script, training, place)
        assert result.status == 0, result.err
        went_on = re.search(r"Restart 1 went on from step (\d+), ", result.err)
        # The other rank may have been a step behind, as far as it is the host that is.
        assert went_on is not None, (place, result.err)
        assert int(went_on[1]) in (step - 1, step), (place, result.err)
        assert ends(result.out) == ends(undisturbed.out), (place, result.err)
        assert "was dropped before its end" not in undisturbed.err + result.err


def test_what_changes_of_extra_where_a_failure_may_lose_it_and_one_queue_are_told(launcher: Launcher) -> None:
    one_queue = f"import os\nos.environ[{VARIABLE!r}] = '1'\n{TRAINING}"
    result = launcher.run(*RUN, launcher.script(one_queue), "noise", "alone:0")
    assert "`extra` changes between forward pass and optimizer step" in result.err, result.err
    assert f"jitckpt: rank 0: {VARIABLE}" in result.err, result.err
    plain = TRAINING.replace("job.steps(12)", "range(job.restore(), 12)")
    result = launcher.run(*RUN, "--checkpoint-dir", "plain", launcher.script(plain), "average", NOWHERE)
    assert "`extra` changes between an optimizer step and the next forward pass" in result.err, result.err
    # The other rank makes the step, and this one does not come to what it does behind it.
    script = launcher.script(TRAINING)
    result = launcher.run(*RUN, "--checkpoint-dir", "late", script, "average", "outrun:8")
    assert result.status == 0, result.err
    assert "Rank 1 may have failed between its optimizer step 8 and the end of that" in result.err, result.err
    assert "`extra` changes between an optimizer step and the end of its iteration" in result.err, result.err


def test_what_is_changed_at_the_top_of_the_next_iteration_is_not_lost(launcher: Launcher) -> None:
    late = re.search(r"        with .*\n.*zip\(kept.*\n.*\n", TRAINING)
    assert late is not None
    top = "extra=kept)\n    for step in job.steps(12):\n"
    script = launcher.script(TRAINING.replace(late[0], "").replace(top, top + late[0]))
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", NOWHERE, script, "average", NOWHERE)
    result = launcher.run(*RUN, "--checkpoint-dir", "outrun", script, "average", "outrun:8")
    assert result.status == 0, result.err
    assert "went on from step 8" in result.err, result.err
    assert ends(result.out) == ends(undisturbed.out), result.err
    assert "`extra` changes" not in result.err, result.err


def test_what_a_rank_drew_behind_its_step_and_lost_is_told(launcher: Launcher) -> None:
    result = launcher.run(*RUN, launcher.script(TRAINING), "gradients", "behind:2")
    assert result.status == 0, result.err
    assert "Rank 1 may have failed between its optimizer step 8 and the end of that" in result.err, result.err


def test_a_preemption_in_the_middle_of_an_iteration_waits_for_its_end(launcher: Launcher) -> None:
    """There the scheduler's step is still to come, which comes every fourth time."""
    command = [*RUN, launcher.script(TRAINING), "gradients", "preemption:0"]
    undisturbed = launcher.run(*command, "--undisturbed")
    process = launcher.start(*RUN, "--checkpoint-dir", "preempted", *command[len(RUN) :])
    assert process.stdout is not None
    while "evaluates" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    interrupted = launcher.finish(process)
    # The other rank may still have been in its step.
    assert re.search("The state after step [78] lies in", interrupted.err), interrupted.err
    again = launcher.run(*RUN, "--checkpoint-dir", "preempted", *command[len(RUN) :])
    assert again.status == 0, again.err
    assert ends(again.out) == ends(undisturbed.out), (interrupted.err, again.err)


def test_a_loop_that_draws_its_batches_elsewhere_is_named_with_what_to_write(launcher: Launcher) -> None:
    plain = TRAINING.replace("job.epochs(3)", "range(3)").replace("job.batches(loader)", "loader")
    result = launcher.run(*RUN, launcher.script(plain), "batches", NOWHERE)
    assert result.status == 0, result.err
    said = [line for line in result.err.splitlines() if line.startswith("jitckpt: rank ")]
    named = [line for line in said if "The training draws from a DataLoader over Samples" in line]
    assert len(named) == 1
    assert "`for epoch in job.epochs(n):` and in it `for batch in job.batches(loader):`" in named[0]
    exact = launcher.run(*RUN, "--checkpoint-dir", "exact", launcher.script(TRAINING), "batches", NOWHERE)
    assert "DataLoader" not in exact.err, "an evaluation's own loader disturbs nothing"
    assert ends(exact.out) == ends(result.out), "the loop alone changes nothing"


PLAIN = """
import os
import numpy, torch
from torch import distributed as dist, nn
from torch.optim.swa_utils import AveragedModel
import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.Adam(model.parameters())
late = AveragedModel(model.module)
parameters = [*model.parameters()]
averages = [parameter.detach().clone() for parameter in parameters]
generator = numpy.random.default_rng(dist.get_rank())


def train():
    loss = model(torch.ones(2, 4).cuda() * generator.random()).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, parameter in zip(averages, parameters):
            average.lerp_(parameter, 0.1)


job = jitckpt.init(model=nn.ModuleList([model, late]), optimizer=optimizer)
for step in range(job.restore(), 8):
    train()
    if step >= 5:
        late.update_parameters(model.module)
dist.destroy_process_group()
"""


def test_what_a_plain_loop_carries_on_in_variables_is_named(launcher: Launcher) -> None:
    result = launcher.run(*RUN, launcher.script(PLAIN))
    assert result.status == 0, result.err
    named = re.findall(r"rank \d: The loop changes variables .* no save holds: ([\w, ]+)\.", result.err)
    assert named == ["averages"], result.err
    assert result.err.count("rank 0: An AveragedModel is updated between an optimizer step") == 1, result.err


TAIL = """
import os
import torch
from torch import distributed as dist, nn
from torch.utils.data import DataLoader
import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(torch.ones(6, 4), batch_size=1)
job = jitckpt.init(model=model, optimizer=optimizer, accumulation=4)


def step():
    optimizer.step()
    optimizer.zero_grad()


for epoch in job.epochs(2):
    for index, batch in enumerate(job.batches(loader)):
        model(batch.cuda()).sum().backward()
        if (index + 1) % 4 == 0:
            step()
    if (index + 1) % 4:
        step()
dist.destroy_process_group()
"""


def test_an_optimizer_step_behind_a_loop_is_named_with_how_to_make_it_in_the_loop(launcher: Launcher) -> None:
    named = "rank 0: An optimizer step is made behind a loop over job.batches"
    result = launcher.run(*RUN, launcher.script(TAIL))
    assert result.status == 0, result.err
    assert result.err.count(named) == 1, result.err
    assert "top of the loop" not in result.err, "no batch is drawn ahead"
    behind = "    if (index + 1) % 4:\n        step()\n"
    inside = TAIL.replace(behind, "").replace("if (index + 1) % 4 == 0:", "if job.sync_gradients:")
    assert inside != TAIL
    result = launcher.run(*RUN, "--checkpoint-dir", "inside", launcher.script(inside))
    assert (result.status, "optimizer step" in result.err) == (0, False), result.err
