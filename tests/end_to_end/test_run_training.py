"""`jitckpt run` with a real training on softgpu: whatever befalls a rank, the result is the same."""

import re
import signal

import pytest
from gpt import RUN, STEPS, TRAINING, digests
from launcher import JITCKPT_RUN, Launcher


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("rank=1 step=6 phase=backward kind=kill", "rank 1 was killed by SIGKILL"),
        ("rank=0 step=7 phase=optimizer kind=exit", "rank 0 ended with exit status 1"),
        ("rank=1 step=5 phase=allreduce kind=stop", "rank 1 is stopped"),
        ("rank=0 step=8 phase=forward kind=exception", "rank 0 ended with exit status 1"),
    ],
)
def test_a_failure_changes_no_bit(launcher: Launcher, undisturbed: list[str], fault: str, found: str) -> None:
    result = launcher.run(*RUN, "--fault", fault, *TRAINING)
    assert result.status == 0, result.err
    assert digests(result.out) == undisturbed
    assert f"{found} (rehearsed: {fault})." in result.err
    assert "with at most 1 minibatch done again" in result.err
    assert "The job succeeded after 1 restart." in result.err
    assert "own state" not in result.err, "no rank lost what it alone knew"


def test_a_late_rank_is_no_failure_unless_it_is_for_too_long(launcher: Launcher) -> None:
    """Rank 1 keeps the other waiting for three time-outs, and later for ever: only that is a failure."""
    script = launcher.script(
        """
        import os, time
        import torch
        from torch import distributed, nn
        import jitckpt

        def fetch_a_batch(step):
            if distributed.get_rank() == 1 and step == 5:
                time.sleep(3)
            if distributed.get_rank() == 1 and step == 10 and os.environ["JITCKPT_RESTART"] == "0":
                time.sleep(1000)
            return torch.ones(4, 8, device="cuda")

        distributed.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
        optimizer = torch.optim.SGD(model.parameters())
        job = jitckpt.init(checkpoint_dir="ckpt", model=model.module, optimizer=optimizer)
        for step in range(job.restore(), 12):
            model(fetch_a_batch(step)).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()
        distributed.destroy_process_group()
        """
    )
    options = ["--hang-timeout", "1", "--stall-timeout", "8"]
    result = launcher.run(*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", *options, script)
    assert result.status == 0, result.err
    assert "where rank 1 has not arrived; it is alive, so the others wait for it." in result.err
    assert "The job succeeded after 1 restart." in result.err
    assert "went on from step 10" in result.err
    (report,) = launcher.directory.glob("ckpt/hang-0-*.txt")
    assert "Python stacks of rank 1:" in report.read_text()
    assert "in fetch_a_batch" in report.read_text()


def test_two_failures_in_one_job_change_no_bit(launcher: Launcher, undisturbed: list[str]) -> None:
    faults = ["rank=1 step=4 phase=any kind=kill", "rank=0 step=9 phase=any kind=kill seed=1"]
    result = launcher.run(*RUN, "--fault", faults[0], "--fault", faults[1], *TRAINING)
    assert result.status == 0, result.err
    assert digests(result.out) == undisturbed
    assert "The job succeeded after 2 restarts." in result.err


def test_a_preempted_job_goes_on_when_it_is_started_again(launcher: Launcher, undisturbed: list[str]) -> None:
    process = launcher.start(*RUN, *TRAINING)
    assert process.stdout is not None
    while "step 3 of" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    interrupted = launcher.finish(process)
    assert interrupted.status == 1
    saved = re.search(r"The state after step (\d+) lies in", interrupted.err)
    assert saved is not None, interrupted.err
    again = launcher.run(*RUN, *TRAINING)
    assert again.status == 0, again.err
    steps = [int(number) for number in re.findall(r"step (\d+) of", again.out)]
    assert steps == list(range(int(saved[1]) + 1, STEPS + 1))
    assert digests(again.out) == undisturbed
