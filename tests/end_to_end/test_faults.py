"""`jitckpt run` with faults of the device and of the network (docs/faults.md): the result is the same."""

import re

from gpt import RUN, TRAINING, digests
from launcher import Launcher

# The first is the device's, which ends its rank. Of the second nobody dies: the rank whose own collective
# never completes saves as well as the one that waits for it.
FAULTS = [
    "rank=1 step=4 phase=backward kind=sticky",
    "rank=0 step=8 phase=allreduce kind=collective-hang",
]


def test_a_broken_device_and_a_hang_change_no_bit(launcher: Launcher, undisturbed: list[str]) -> None:
    result = launcher.run(*RUN, "--fault", FAULTS[0], "--fault", FAULTS[1], *TRAINING)
    assert result.status == 0, result.err
    assert digests(result.out) == undisturbed
    # torch's watchdog may meet the error before the training does.
    ended = rf"rank 1 (was killed by SIGABRT|ended with exit status 1) \(rehearsed: {FAULTS[0]}\)\."
    assert re.search(ended, result.err), result.err
    hung = rf"rank [01] has waited .* where all have arrived \(rehearsed: {FAULTS[1]}\)\."
    assert re.search(hung, result.err), result.err
    assert result.err.count("with at most 1 minibatch done again") == 2
    assert "The job succeeded after 2 restarts." in result.err
    assert "own state" not in result.err, "no rank lost what it alone knew"
