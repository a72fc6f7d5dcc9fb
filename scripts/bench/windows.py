"""Windows of a running job's steps, with what is measured and without it, by turns."""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

WARM_UP = 10  # steps before the first window


@dataclass
class Windows:
    """So many windows of so many steps each; every other one, the first among them, is `with_it`.

    What a job does before and after them is with it, too.
    """

    number: int
    length: int
    with_it: bool = True
    seconds: list[list[float]] = field(default_factory=list)  # of the steps of each window so far

    @property
    def steps(self) -> int:
        """How many steps a job makes that ends with the last window."""
        return WARM_UP + self.number * self.length

    @property
    def medians(self) -> list[float]:
        """The median seconds of a step of each window."""
        return [statistics.median(of) for of in self.seconds]

    def over(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield the steps; how long the loop takes for each of a window is noted."""
        for step in steps:
            window, rest = divmod(step - WARM_UP, self.length)
            is_inside = 0 <= window < self.number
            self.with_it = not is_inside or window % 2 == 0
            if is_inside and rest == 0:
                self.seconds.append([])
            began = time.perf_counter()
            yield step
            if is_inside:
                self.seconds[window].append(time.perf_counter() - began)


def snapshots_in(windows: Windows) -> None:
    """Let jitckpt make its snapshots only where a window is with them."""
    from jitckpt.worker.saving.snapshots import Snapshots

    is_due = Snapshots.is_due

    def in_turn(self: Snapshots, step: int) -> bool:
        return windows.with_it and is_due(self, step)

    Snapshots.is_due = in_turn  # type: ignore[method-assign]
