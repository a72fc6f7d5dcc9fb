"""Hooks of jitckpt's own fail in transparent mode: the training goes on, and all know it is unprotected."""

import re
from collections.abc import Callable
from functools import cache

import pytest
from launcher import JITCKPT_RUN, Launcher, Result

from jitckpt.events import Event, read_events

# Trains in one of several ways; says how it ended. Then what is planted, in rank 1 alone.
TRAINING = """
import os, sys
import torch
from torch import distributed as dist, nn

rank = int(os.environ["RANK"])
way, plant = {way!r}, {plant!r}

def planted(owner, name, call):
    original = getattr(owner, name)
    calls = 0

    def fails(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == call:
            raise TypeError(f"planted in {{name}}")
        return original(*arguments, **named)

    setattr(owner, name, fails)

if plant and rank == 1:
    from jitckpt.hooks import torch_steps
    from jitckpt.worker.in_place import keeper, naming, state_on_device, torch_memory
    owner, name, call = plant
    planted(eval(owner), name, call)

torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)).cuda()
model = nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters())
# Its first step overflows, so that it is left out.
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127, enabled=way == "scaler")
torch.manual_seed(rank)

def backward():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8).cuda()).square().mean() * 100
    scaler.scale(loss).backward()
    return loss

for step in range(10):
    if way == "closure":
        optimizer.step(backward)
    else:
        backward()
        scaler.step(optimizer)
        scaler.update()
        assert way != "scaler" or scaler.get_scale() < 2.0**127
torch.cuda.synchronize()
state = [*inner.state_dict().values()] + [v for one in optimizer.state.values() for v in one.values()]
found = torch.cat([one.double().flatten().cpu() for one in state]).numpy().tobytes().hex()
print(f"rank {{rank}}: {{found}}\\n", end="", flush=True)
dist.destroy_process_group()
"""
HOOKS = {
    "before the step": ("loop", ("torch_steps.OptimizerSteps", "_number", 3)),
    "behind the step": ("loop", ("keeper.MinibatchKeeper", "_keep", 3)),
    "in a closure": ("closure", ("torch_steps.OptimizerSteps", "_begins", 3)),
    "a scaler's": ("scaler", ("torch_steps.OptimizerSteps", "_begins", 1)),
    "before a validation": ("loop", ("keeper._Validation", "run", 1)),
    "in a validation": ("loop", ("naming", "named_buffers", 1)),
    "before the state's trial": ("loop", ("state_on_device.StateOnDevice", "trial_begins", 1)),
    "behind the state's trial": ("loop", ("state_on_device.StateOnDevice", "trial_ended", 1)),
    "the state stays, before": ("loop", ("state_on_device.StateOnDevice", "step_begins", 2)),
    "the state stays, behind": ("loop", ("state_on_device.StateOnDevice", "step_ended", 2)),
}
FAULT = "rank=0 step=9 phase=backward kind=proxy-kill"


def run(
    launcher: Launcher, way: str, plant: tuple[str, str, int] | None, *flags: str
) -> tuple[Result, list[Event]]:
    directory = launcher.directory / ("planted" if plant else "plain")
    options = ["--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    options += [
        "--warm-start",
        "--warm-spares",
        "0",
        "--max-restarts",
        "0",
        "--checkpoint-dir",
        str(directory),
    ]
    script = launcher.script(TRAINING.format(way=way, plant=plant), f"{directory.name}.py")
    result = launcher.run(*JITCKPT_RUN, *options, *flags, script)
    return result, read_events(directory)[0]


def ends(result: Result) -> list[str]:
    found = sorted(line for line in result.out.splitlines() if line.startswith("rank "))
    assert len(found) == 2, result.err
    return found


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return what a way of training ends with."""

    @cache
    def of(way: str) -> list[str]:
        result, _ = run(Launcher(tmp_path_factory.mktemp("undisturbed")), way, None)
        return ends(result)

    return of


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_ends_protection_and_not_the_training(
    hook: str, launcher: Launcher, undisturbed: Callable[[str], list[str]]
) -> None:
    way, plant = HOOKS[hook]
    result, events = run(launcher, way, plant)
    assert result.status == 0, result.err
    assert ends(result) == undisturbed(way)
    named = [event["event"] for event in events]
    assert named.count("switched_off") == 1, result.err
    assert not {"device_alarm", "recovered", "recovery_given_up", "restart"} & {*named}
    (text,) = (event["text"] for event in events if event["event"] == "switched_off")
    why = rf"jitckpt's own hooks have failed: TypeError: planted in {plant[1]}, \S+, line \d+ \(rank 1\)\."
    assert re.search(why, text), text
    assert "The training goes on undisturbed, but a failure would now end the job" in text
    assert result.err.count(f"jitckpt: {text}") == 1, result.err


def test_a_later_failure_is_told_with_the_hooks(launcher: Launcher) -> None:
    result, events = run(launcher, *HOOKS["behind the step"], "--fault", FAULT)
    assert result.status != 0
    named = [event["event"] for event in events]
    assert named.count("switched_off") == 1
    assert not {"recovered", "restart"} & {*named}
    (text,) = (event["text"] for event in events if event["event"] == "switched_off")
    assert f"was ended by Killed, and {text}" in result.err  # CUDA's error, as the rank's program gets it
    assert f"jitckpt: the failure was not recovered from, as was said: {text}" in result.err


def test_an_allocator_that_can_not_be_asked_ends_nothing(launcher: Launcher) -> None:
    result, events = run(launcher, "loop", ("torch_memory", "library", 1))
    assert result.status == 0, result.err
    assert "images of the device's memory have what is free, too: TypeError: planted in library" in result.err
    assert "switched_off" not in [event["event"] for event in events]
