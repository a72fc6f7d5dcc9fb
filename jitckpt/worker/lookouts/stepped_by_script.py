"""Steps of schedulers that a script makes between a restore and its first forward pass, as it had to before.

jitckpt has put the schedulers back already where it finds them by itself: a step more is one too many.
"""

from collections.abc import Callable, Sequence

from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state.host_state import HostState

STEPPED_BY_SCRIPT = (
    "The script makes {count} steps of {name} between the restore and the first forward pass. jitckpt.init "
    "was not given it, and had put it back all the same: {now}. "
    "Leave these steps out, or give jitckpt.init keep_found=False."
)


class SteppedByScript:
    """Of one job; `warn` gets a sentence for each scheduler."""

    _restored: tuple[Sequence[int], Encoded] | None = None  # until the first forward pass

    def __init__(self, host: HostState, warn: Callable[[str], None]) -> None:
        self._host, self._warn = host, warn

    def restored(self) -> None:
        """The schedulers are as they are to be as the first forward pass begins."""
        if self._host.kept.schedulers:
            self._restored = self._host.counts(), self._host.copied_progress()

    def forward_begins(self) -> None:
        """Undo the steps since then."""
        if self._restored is None:
            return
        stepped, is_undone = self._host.undo_steps(*self._restored)
        now = "they are undone" if is_undone else "its rate is another now than an undisturbed run's"
        for name, count in stepped.items():
            self._warn(STEPPED_BY_SCRIPT.format(name=name, count=count, now=now))
        self._restored = None
