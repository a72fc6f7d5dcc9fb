"""`jitckpt run` with scripts that another start can't make better."""

import re

import pytest
from gpt import RUN
from launcher import JITCKPT_RUN, Launcher

from jitckpt.events import read_events

COLD = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
STARTED = "import os; os.write(1, b'started\\n')\n"
REFUSED = """
import torch, jitckpt
from jitckpt.errors import CheckpointError
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=torch.optim.SGD(model.parameters()))
if os.environ["RANK"] == "1":
    raise CheckpointError("This save is another model's. Give another checkpoint_dir.")
torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("import nothing_there", "exit status 1 before torch was imported"),
        ("import torch\nlen(7)", "TypeError: object of type 'int' has no len()"),
        ("import torch, jitckpt\njitckpt.init(model=7)", "TypeError: jitckpt.init needs"),
    ],
)
def test_a_script_with_a_mistake_is_started_twice(launcher: Launcher, mistake: str, told: str) -> None:
    ended = launcher.run(*COLD, launcher.script(STARTED + mistake))
    assert ended.status == 1
    assert len(re.findall(r"rank \d ended with exit status", ended.err)) == 2
    assert ended.err.count("the job ends here, with no restart") == 1
    assert told in ended.err
    assert "suspect" not in ended.err


def test_a_refusal_ends_the_job_at_once_and_is_said_once(launcher: Launcher) -> None:
    ended = launcher.run(*RUN, launcher.script(STARTED + REFUSED))
    assert ended.status == 1
    assert ended.out.count("started") == 2
    assert ended.err.count("jitckpt: rank 1 can't go on: This save is another model's. Give another") == 1
    assert ended.err.count("the job ends here, with no restart") == 1
    assert "suspect" not in ended.err
    events = [event["event"] for event in read_events(launcher.directory / "ckpt")[0]]
    assert "incurable" in events
    assert "restart" not in events
