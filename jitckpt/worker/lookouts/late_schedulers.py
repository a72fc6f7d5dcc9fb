"""Schedulers that the script makes in a later epoch: no restart builds them, and no save holds them."""

import time
import weakref
from collections.abc import Callable

from torch.optim.lr_scheduler import LRScheduler

from jitckpt.state import parallel
from jitckpt.state.host_state import HostState

LATE = (
    "The script has made {name} in epoch {epoch}: no save holds it, so after a failure the rate is that of "
    "the scheduler before. Make all of them before jitckpt.init, and choose at the top of each epoch."
)
RARELY = 100  # times as long as a look takes, at least, passes between two


class LateSchedulers:
    """Of one job; `warn` gets a sentence for each scheduler of the job's optimizers."""

    def __init__(self, host: HostState, warn: Callable[[str], None]) -> None:
        self._host, self._warn = host, warn
        self._known: weakref.WeakSet[LRScheduler] | None = None  # those of before the first batch, and named
        self._looked = self._took = 0.0  # when, and how long
        self._epoch = -1

    def batch_drawn(self, epoch: int) -> None:
        """The script is given a batch: what it makes at an epoch's top is there by now."""
        if epoch == self._epoch:
            return
        begun = time.monotonic()
        if self._known is not None and begun < self._looked + RARELY * self._took:
            return
        self._epoch = epoch
        self._look(epoch)
        self._looked = time.monotonic()
        self._took = self._looked - begun

    def _look(self, epoch: int) -> None:
        """Among all objects there are: a scheduler does not make itself known."""
        found = parallel.all_of(LRScheduler)
        known, self._known = self._known, weakref.WeakSet(found)
        if known is None:
            return
        ours = {id(one.optimizer) for one in self._host.optimizers}
        for one in found:
            if one not in known and id(getattr(one, "optimizer", None)) in ours:
                self._warn(LATE.format(name=f"a {type(one).__qualname__}", epoch=epoch))
