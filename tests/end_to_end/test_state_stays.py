"""Transparent mode with the state on the devices: they get it from where it is left, bit for bit the same."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of

from jitckpt.events import Event, read_events
from jitckpt.rehearsal.runs import lasting_shared_memory

ROOT = Path(__file__).parents[2]
DDP = [str(ROOT / "examples" / "plain_ddp.py"), "--width", "16", "--layers", "1", "--steps"]
TENSOR = [str(ROOT / "scripts" / "campaign_trainings" / "tensor.py"), "--steps"]
FSDP2 = [str(ROOT / "scripts" / "campaign_trainings" / "fsdp2.py"), "--steps"]


@dataclass
class Job:
    """What `jitckpt run` has come to."""

    result: Result
    events: list[Event]

    def named(self, event: str) -> list[Event]:
        return [one for one in self.events if one["event"] == event]

    def ways(self) -> set[str]:
        """Return from where ranks have got their states in all recoveries."""
        return {way for planned in self.named("recovery_planned") for way in planned["ways"]}


def run(launcher: Launcher, ranks: int, training: list[str], *options: str) -> Job:
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(ranks)]
    command += ["--warm-spares", "0", "--warm-start", "--checkpoint-dir", str(directory), *options]
    result = launcher.run(*command, *training)
    assert result.status == 0, result.err
    return Job(result, read_events(directory)[0])


def run_with_faults(
    launcher: Launcher,
    ranks: int,
    training: list[str],
    *faults: str,
    stays: bool = True,
    leaves: bool = False,
    may_be_in_images: bool = False,
) -> Job:
    options = [word for fault in faults for word in ("--fault", fault)]
    job = run(launcher, ranks, training, "--mode", "transparent", *options)
    assert {event["fault"] for event in job.named("fault")} == set(faults)
    assert len(job.named("proxy_connected")) == ranks  # the workers are the same
    for event in ("restart", "detected", "recovery_given_up", "switched_off"):
        assert job.named(event) == [], job.result.err
    assert bool(job.named("state_stays")) == stays
    assert may_be_in_images or bool(job.named("state_in_images")) != stays
    assert ("does not stay" in job.result.err) == leaves
    return job


def ended_with(job: Job) -> list[str]:
    """Return all losses, and the digests of all that the ranks end with."""
    return sorted(line for line in job.result.out.splitlines() if line.startswith(("step ", "rank ")))


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(launcher: Launcher) -> Iterator[None]:
    shared_memory = set(os.listdir("/dev/shm"))
    yield
    assert lasting_shared_memory(shared_memory) == []
    assert list(launcher.directory.glob("jitckpt-*")) == []


def test_every_kind_of_failure_leaves_the_states_of_two_replicas_the_same(launcher: Launcher) -> None:
    # Two steps between them. The state stays from the fifth on.
    job = run_with_faults(
        launcher,
        2,
        [*DDP, "20"],
        "rank=1 step=6 phase=allreduce kind=collective-error",
        "rank=0 step=8 phase=allreduce kind=driver-suspect",
        "rank=1 step=10 phase=forward kind=proxy-kill",
        "rank=0 step=12 phase=backward kind=proxy-kill",
        "rank=1 step=14 phase=optimizer kind=proxy-kill",
        "rank=0 step=16 phase=optimizer kind=sticky call=2",
    )
    assert [event["replicas"] for event in job.named("state_stays")] == [[[0, 1]]]
    assert {"in place", "through the host", "from rank 0", "from rank 1"} <= job.ways()
    assert ended_with(job) == ended_with(run(launcher, 2, [*DDP, "20"]))


def test_shards_get_their_states_from_their_own_replicas_where_two_fail_at_once(launcher: Launcher) -> None:
    job = run_with_faults(
        launcher,
        4,
        [*FSDP2, "10"],
        "rank=0 step=8 phase=backward kind=proxy-kill",
        "rank=3 step=8 phase=backward kind=proxy-kill",
    )
    assert [event["replicas"] for event in job.named("state_stays")] == [[[0, 2], [1, 3]]]
    assert {"in place", "from rank 2", "from rank 1"} <= job.ways()
    assert ended_with(job) == ended_with(run(launcher, 4, [*FSDP2, "10"]))


def test_ranks_that_wait_for_others_in_a_hang_wait_until_it_is_found(launcher: Launcher) -> None:
    # Ranks 1 and 3 have come to their step: their replicas' network is not cut.
    fault = "rank=2 step=8 phase=backward kind=network-cut call=2"
    job = run_with_faults(launcher, 4, ["--hang-timeout", "6", *TENSOR, "10"], fault)
    assert [event["replicas"] for event in job.named("state_stays")] == [[[0, 2], [1, 3]]]
    assert job.named("recovered")
    assert ended_with(job) == ended_with(run(launcher, 4, [*TENSOR, "10"]))


# Gradients go on from those of the last step; statistics, an average and a sum are this rank's own.
KEEPS_GRADIENTS = text_of("state_stays_keeps_gradients")


def test_gradients_that_the_next_minibatch_needs_are_kept(launcher: Launcher) -> None:
    script = launcher.directory / "train.py"
    script.write_text(KEEPS_GRADIENTS)
    faults = ("rank=1 step=8 phase=forward kind=proxy-kill", "rank=0 step=9 phase=backward kind=proxy-kill")
    job = run_with_faults(launcher, 2, [str(script)], *faults)
    assert {"in place", "from rank 0", "from rank 1"} <= job.ways()
    assert ended_with(job) == ended_with(run(launcher, 2, [str(script)]))


# Its steps are counted on the device, which is no state of the optimizer.
COUNTS_ITS_STEPS = text_of("state_stays_counts_its_steps")


def test_a_failure_in_the_first_step_meets_a_state_that_has_not_left_the_images(launcher: Launcher) -> None:
    script = launcher.directory / "train.py"
    script.write_text(COUNTS_ITS_STEPS)
    faults = ["rank=1 step=5 phase=optimizer kind=proxy-kill"]
    job = run_with_faults(launcher, 2, [str(script)], *faults, stays=False)
    assert "which is no state of the optimizer" in job.named("state_in_images")[0]["text"]
    assert ended_with(job) == ended_with(run(launcher, 2, [str(script)]))


def test_states_that_stay_are_put_into_an_image_for_each_validation(launcher: Launcher) -> None:
    """One that a failure comes into is left out, or finds that the state can't stay; so is the next there."""
    job = run_with_faults(
        launcher,
        2,
        ["--validate-every", "4", *DDP, "19"],
        "rank=1 step=8 phase=optimizer kind=proxy-kill",
        "rank=0 step=9 phase=backward kind=proxy-kill",
        "rank=1 step=9 phase=optimizer kind=proxy-kill",
        "rank=0 step=10 phase=forward kind=driver-suspect",
        "rank=1 step=11 phase=backward kind=proxy-kill",
        may_be_in_images=True,
    )
    # Before the fifth step, and the 13th and the 17th.
    assert len(job.named("validated")) >= 2 * 3
    assert len(job.named("state_stays")) >= 3
    assert {"image", "in place", "from rank 0"} <= job.ways()
    assert ended_with(job) == ended_with(run(launcher, 2, [*DDP, "19"]))


# Which no step of an optimizer does. Until then each step is as the one before. Servers die afterwards, if
# that is asked for.
CHANGES_THE_STATE = """
import ctypes, os, signal, sys
import torch
from torch import distributed as dist, nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 64).cuda())
optimizer = torch.optim.Adam(model.parameters())
weight = model.module.weight
for step in range(11):
    if step == 7:
        with open(f"steady-{rank}", "w") as told:
            print("_jitckpt_steady_step" in optimizer.__dict__, file=told)
        with torch.no_grad():
            CHANGES_IT
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if sys.argv[1:] == ["dies"] and step >= 8 and step % 2 == rank:
        os.kill(ctypes.CDLL(None).jitckpt_proxy_server(), signal.SIGKILL)
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1}: {loss.item().hex()}\\n", end="", flush=True)
print(f"rank {rank}: {model.module.weight.sum().item().hex()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


SHRINKS_ITS_PARAMETERS = CHANGES_THE_STATE.replace("CHANGES_IT", "weight.mul_(0.75)")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("weight.mul_(0.75)", "optimizer.0.parameter.0 has changed outside of the optimizer step"),
        ("optimizer.param_groups[0]['params'].pop()", "the optimizer has got other parameters"),
        ("optimizer.state[weight]['exp_avg'] = optimizer.state[weight]['exp_avg'] * 0.5", ""),
        ("old, optimizer = optimizer, torch.optim.Adam([weight])", "the optimizer has got other parameters"),
    ],
    ids=["a parameter", "the parameters", "a moment", "the optimizer"],
)
def test_a_state_that_changes_outside_of_the_step_is_not_taken_for_the_old_one(
    launcher: Launcher, statement: str, said: str
) -> None:
    script = launcher.directory / "train.py"
    script.write_text(CHANGES_THE_STATE.replace("CHANGES_IT", statement))
    job = run(launcher, 2, [str(script), "dies"], "--mode", "transparent")
    for rank in (0, 1):
        assert (launcher.directory / f"steady-{rank}").read_text() == "True\n"
    assert job.named("state_stays")
    assert len(job.named("recovered")) >= 2, job.result.err
    for event in ("restart", "recovery_given_up", "switched_off"):
        assert job.named(event) == [], job.result.err
    assert said in job.result.err
    assert ("does not stay" in job.result.err) == bool(said)
    assert ("image" in job.ways()) == bool(said)
    assert ended_with(job) == ended_with(run(launcher, 2, [str(script)]))


# An average takes the parameters' place for an evaluation, which torch does not count; a server dies there.
EVALUATES_AN_AVERAGE = """
import ctypes, os, signal
from pathlib import Path
import torch
from torch import distributed as dist, nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 64).cuda())
optimizer = torch.optim.Adam(model.parameters())
average = [parameter.detach().clone() for parameter in model.parameters()]
data = [parameter.data for parameter in model.parameters()]
cuda = ctypes.CDLL(None)
for step in range(11):
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for mean, parameter in zip(average, model.parameters()):
        mean.lerp_(parameter.detach(), 0.1)
    if step == 7:
        kept = [one.clone() for one in data]
        for mean, parameter, one in zip(average, model.parameters(), data):
            PUTS_IT_THERE
        died = Path("died")
        if rank == 1 and os.environ["JITCKPT_MODE"] == "transparent" and not died.exists():
            died.touch()
            os.kill(ctypes.CDLL(None).jitckpt_proxy_server(), signal.SIGKILL)
        evaluated = model.module(torch.ones(4, 8).cuda()).square().mean().item()
        dist.barrier()
        for before, one in zip(kept, data):
            one.copy_(before)
    if rank == 0:
        print(f"step {step + 1}: {loss.item().hex()}\\n", end="", flush=True)
print(f"rank {rank}: {model.module.weight.sum().item().hex()} {evaluated.hex()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "statement",
    [
        "one.copy_(mean.cpu())",
        "dist.all_reduce(one)",
        "cuda.cudaMemsetAsync(ctypes.c_void_p(one.data_ptr()), 1, ctypes.c_size_t(one.nbytes), None)",
        "parameter.data.copy_(mean)",
    ],
    ids=["by a copy", "by a collective", "by a memset", "by a kernel"],
)
def test_what_takes_the_parameters_place_for_a_while_does_so_again_after_a_failure_there(
    launcher: Launcher, statement: str
) -> None:
    """What was there is kept before it, uncounted by torch as it is: a replay would keep the average."""
    script = launcher.directory / "train.py"
    script.write_text(EVALUATES_AN_AVERAGE.replace("PUTS_IT_THERE", statement))
    job = run(launcher, 2, [str(script)], "--mode", "transparent")
    assert job.named("state_stays")
    assert (launcher.directory / "died").exists()
    assert len(job.named("recovered")) == 1
    for event in ("restart", "recovery_given_up", "switched_off"):
        assert job.named(event) == [], job.result.err
    assert "image" not in job.ways()
    assert ended_with(job) == ended_with(run(launcher, 2, [str(script)]))


# Torch counts none of these. A fault comes in the minibatch of the change, behind it.
CHANGES_UNCOUNTED = """
import os, sys
import torch
from torch import distributed as dist, nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(rank)
layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
model = nn.parallel.DistributedDataParallel(layers)
parameters = [*layers.parameters()]
optimizer = torch.optim.Adam(parameters)
aliases = [parameter.data for parameter in parameters]
for step in range(11):
    taken = [parameter.data for parameter in parameters]
    norm = torch.stack([one.norm() for one in taken]).sum()
    if step == 7:
        CHANGES_IT
    loss = model(torch.randn(4, 8).cuda()).square().mean() + 0.01 * norm
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1}: {loss.item().hex()}\\n", end="", flush=True)
moments = sum(one["exp_avg"].sum().item() for one in optimizer.state.values())
weights = sum(one.sum().item() for one in parameters)
print(f"rank {rank}: {weights.hex()} {moments.hex()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
MOMENTS = "[one['exp_avg'] for one in optimizer.state.values()]"
WAYS = {
    "aliases": "for one in aliases: one.mul_(0.75)",
    "data": "for one in taken: one.mul_(0.75)",
    "several at once": "torch._foreach_mul_(aliases, 0.75)",
    "moments": f"for one in {MOMENTS}: one.mul_(0.5)",
    "moments at once": f"torch._foreach_mul_({MOMENTS}, 0.5)",
    "dlpack": "for one in parameters: torch.from_dlpack(one.detach()).mul_(0.75)",
    "set_": "for one in parameters: torch.empty(0).cuda().set_(one.untyped_storage()).mul_(0.75)",
    "storage": "for one in parameters: one.untyped_storage().copy_(one.detach().mul(0.75).untyped_storage())",
    "inference": "with torch.inference_mode():\n            for one in aliases: one.add_(0.125)",
    "copies": "for one in aliases: one.copy_(torch.full_like(one, 0.125))",
}
FAULTS = ("sticky", "proxy-kill", "collective-error")


@pytest.mark.parametrize(
    ("how", "kind"), [(how, FAULTS[number % len(FAULTS)]) for number, how in enumerate(WAYS)], ids=[*WAYS]
)
def test_a_state_that_is_changed_uncounted_is_changed_once(launcher: Launcher, how: str, kind: str) -> None:
    script = launcher.directory / "train.py"
    script.write_text(CHANGES_UNCOUNTED.replace("CHANGES_IT", WAYS[how]))
    fault = f"rank={len(how) % 2} step=8 phase=backward kind={kind}"
    job = run(launcher, 2, [str(script)], "--mode", "transparent", "--fault", fault)
    assert job.named("state_stays")
    assert len(job.named("recovered")) == 1
    for event in ("restart", "recovery_given_up", "switched_off"):
        assert job.named(event) == [], job.result.err
    assert "image" not in job.ways()
    assert "outside of the optimizer step" in job.result.err
    assert ended_with(job) == ended_with(run(launcher, 2, [str(script)]))


def test_a_job_of_which_no_device_has_the_state_any_more_ends_with_a_sentence(launcher: Launcher) -> None:
    # In the step before the state is copied to the host, as calls are not known yet.
    faults = [f"rank={rank} step=9 phase=optimizer kind=ecc call=3" for rank in (0, 1)]
    command = [
        *JITCKPT_RUN,
        "--device",
        "softgpu",
        "--nproc-per-node",
        "2",
        "--warm-spares",
        "0",
        "--warm-start",
    ]
    command += ["--mode", "transparent", "--max-restarts", "0"]
    result = launcher.run(*command, "--fault", faults[0], "--fault", faults[1], *DDP, "11")
    assert result.status == 1
    assert "no device has the state after step 9 of shard 0 any more, held by ranks 0, 1" in result.err
