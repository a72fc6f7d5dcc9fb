"""The time of day jumps an hour ahead and back, and nothing comes of it."""

import json
import re

import pytest
from gpt import TRAINING, digests
from launcher import JITCKPT_RUN, Launcher

from jitckpt.bindings.clock import HOUR

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--hang-timeout", "60"]
KILL = "rank=1 step=8 phase=backward kind=kill"
JUMPS = {
    "a rank": ["kind=clock", "kind=clock jump=-3600"],
    "the launcher": ["kind=agent-clock", "kind=agent-clock jump=-3600"],
}


@pytest.mark.parametrize("order", [1, -1], ids=["ahead, then back", "back, then ahead"])
@pytest.mark.parametrize("who", JUMPS)
def test_a_clock_that_jumps_changes_nothing(
    launcher: Launcher, undisturbed: list[str], who: str, order: int
) -> None:
    """A rank is killed between the jumps: what is saved then has that time of day."""
    first, second = JUMPS[who][::order]
    faults = [f"rank=0 step=4 phase=forward {first}", KILL, f"rank=0 step=10 phase=forward {second}"]
    options = [word for fault in faults for word in ("--fault", fault)]
    ended = launcher.run(*RUN, "--checkpoint-dir", "ckpt", *options, *TRAINING)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    # Rank 0 may not have come to its optimizer's step 7 when rank 1 was in step 8.
    assert len(re.findall("Restart 1 went on from step [67],", ended.err)) == 1, ended.err
    assert "Restart 2" not in ended.err, "no clock was a failure"
    folder = launcher.directory / "ckpt"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events]
    times += [json.loads(path.read_text())["time"] for path in folder.glob("step-*/*/metadata.json")]
    assert HOUR - 600 < max(times) - min(times) < HOUR + 600, "it did jump"
