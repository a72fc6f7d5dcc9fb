"""A failure of a running job, from its first sign until the ranks train again."""

from dataclasses import dataclass, field

from jitckpt.reports.present import PHASES, RecoveryNow
from jitckpt.reports.timeline_transparent import STEPS


@dataclass
class Incident:
    """A failure and what has come of it so far; times since the job's start."""

    scope: str
    cause: str
    text: str
    fault: str | None
    ranks: tuple[int, ...]
    found: float
    at: float
    began: float
    restart: int
    times: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    newest: int | None = None  # step that was saved by any rank, or begun where none could
    saved_step: int | None = None
    kept_step: int | None = None  # in the memory tier
    step: int | None = None
    over_at: float | None = None
    outcome: str = "under way"

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase that has ended."""
        if self.scope == "in_place":
            return {name: self.parts[name] for name in STEPS if name in self.parts}
        times = self.times
        limits = (
            (self.began, self.at),
            (times.get("ordered"), times.get("decided")),
            (times.get("decided"), times.get("restart")),
            (times.get("restart"), times.get("registered")),
            (times.get("registered"), times.get("restored")),
            (times.get("restored", times.get("registered")), times.get("first step")),
        )
        return {
            name: end - begin
            for name, (begin, end) in zip(PHASES, limits, strict=True)
            if begin is not None and end is not None and end >= begin
        }

    def redone(self) -> int | None:
        """At most so many minibatches were done again, the one under way included."""
        return None if self.step is None or self.newest is None else max(0, self.newest - self.step + 1)

    def tier(self) -> str:
        """Return where the state came from, as in RecoveryNow."""
        if self.outcome == "given up" or self.step is None:
            return "unknown"
        if self.scope == "in_place":
            return "in_memory"
        if self.saved_step is not None and self.step >= self.saved_step:
            return "just_in_time"
        if self.kept_step is not None and self.step >= self.kept_step:
            return "memory_tier"
        return "earlier_save" if self.step > 0 else "nothing"

    def now(self) -> RecoveryNow:
        """Return it as it is told."""
        return RecoveryNow(
            scope=self.scope,
            tier=self.tier(),
            cause=self.cause,
            text=self.text,
            fault=self.fault,
            ranks=self.ranks,
            found=self.found,
            at=self.at,
            phases=self.phases(),
            saved_step=self.saved_step,
            step=self.step,
            redone=self.redone(),
            seconds=None if self.over_at is None else self.over_at - self.at,
            outcome=self.outcome,
        )
