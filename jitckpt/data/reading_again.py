"""What is read again after a failure takes its time: named before it is needed, and as it happens."""

from collections.abc import Callable

LONG_SECONDS = 60.0  # from then on it is named
TELL_AFTER = 10.0  # seconds; then each time that as much has passed again as until then


def expected(kind: str, batches: int, seconds: float) -> str:
    """Return what a failure would cost by now; the training has waited so long for these batches."""
    return (
        f"After a failure the {batches} batches that this {kind} has given by now would be read again, as "
        f"nothing tells how to leave them out. The training has waited {seconds:.0f} s for them, so that "
        "would take as long or longer, and more with each batch of the pass. One with state_dict and "
        "load_state_dict (torchdata's StatefulDataLoader) would be asked for its place; of a map dataset "
        "nothing is read again."
    )


def so_far(kind: str, done: int, batches: int, seconds: float) -> str:
    """Return how far reading again has come, and how long the rest takes at that rate."""
    return (
        f"{done} of the {batches} batches that a {kind} gave before the failure are read again after "
        f"{seconds:.0f} s; the others take another {seconds * (batches - done) / done:.0f} s at that rate."
    )


class ReadTime:
    """Seconds for which the training has waited for a pass's batches; named once, if they are many."""

    def __init__(self, kind: str, warn: Callable[[str], None]) -> None:
        self._kind, self._warn = kind, warn
        self._seconds, self._is_named = 0.0, False

    def took(self, seconds: float, batches: int) -> None:
        """Count the time for one more batch, after which there are so many."""
        self._seconds += seconds
        if self._seconds >= LONG_SECONDS and not self._is_named:
            self._is_named = True
            self._warn(expected(self._kind, batches, self._seconds))


class ReadingAgain:
    """Tells how far it has come, ever less often."""

    def __init__(self, kind: str, batches: int, warn: Callable[[str], None]) -> None:
        self._kind, self._batches, self._warn = kind, batches, warn
        self._tell_at = TELL_AFTER

    def has_come_to(self, done: int, seconds: float) -> None:
        """So many are read, so long after the first was asked for."""
        if seconds >= self._tell_at and done < self._batches:
            self._tell_at = 2 * seconds
            self._warn(so_far(self._kind, done, self._batches, seconds))
