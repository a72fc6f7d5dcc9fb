MAGIC: int
STEP_BITS: int

class Memory:
    """The memory at `path`, as StepBarrier makes it. Raises RuntimeError for another."""

    def __init__(self, path: str) -> None: ...
    def here(self) -> tuple[int, int, bool]:
        """Return what all ranks of this host have come to, and want: see step_tree.Come."""

    def everywhere(self, recovery_and_step: int, whole_from: int, left: bool) -> None:
        """Let the ranks go on that the ranks of all hosts have come to that."""

    def happenings(self) -> int:
        """Return a number that changes when there may be news from this host's ranks."""

    def notify(self) -> None:
        """Have who waits look again."""

    def wait(self, seen: int, milliseconds: int) -> None:
        """Wait for news, at most so long; seen: what `happenings` returned before the caller looked."""
