"""Where a job's time went: each second once, for a cause."""

from jitckpt.reports.present import CAUSES, USEFUL


class TimeSpent:
    """What has passed since the job's start; at: seconds of it.

    by_cause: seconds by cause, whose sum is `at`. segments: the same in its order: cause, begin, end.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.by_cause = dict.fromkeys(CAUSES, 0.0)
        self.segments: list[tuple[str, float, float]] = []

    def add(self, cause: str, seconds: float) -> None:
        """Let so much time pass for this cause."""
        self.by_cause[cause] += seconds
        if seconds > 0:
            begin = self.at
            if self.segments and self.segments[-1][0] == cause and self.segments[-1][2] == begin:
                begin = self.segments.pop()[1]
            self.segments.append((cause, begin, self.at + seconds))
            self.at += seconds

    def copy(self) -> "TimeSpent":
        """Return one of its own that says the same."""
        other = TimeSpent()
        other.at, other.by_cause, other.segments = self.at, dict(self.by_cause), list(self.segments)
        return other

    def move(self, cause: str, seconds: float) -> float:
        """What was taken for useful was lost to this cause; return the seconds."""
        moved = min(max(0.0, seconds), self.by_cause[USEFUL])
        self.by_cause[USEFUL] -= moved
        self.by_cause[cause] += moved
        return moved

    def move_last(self, cause: str, seconds: float) -> None:
        """The same of the time until now."""
        if not self.segments or self.segments[-1][0] != USEFUL:
            return
        _, begin, end = self.segments[-1]
        moved = self.move(cause, min(seconds, end - begin))
        if moved > 0:
            self.segments[-1:] = [(USEFUL, begin, end - moved), (cause, end - moved, end)]
