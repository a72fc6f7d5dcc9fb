"""`jitckpt run` with a real training on softgpu that is told to end; for failures see tests/faults."""

import re
import signal

from gpt import RUN, STEPS, TRAINING, digests
from launcher import Launcher


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
