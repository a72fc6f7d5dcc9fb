"""The facts that the control thread knows of a job, as recovery.decide takes them."""

from dataclasses import replace
from typing import Any

from jitckpt.decisions.recovery import KnownJob, Rank


class Known:
    """Changed by the control thread alone, as it hears of something or has done it."""

    def __init__(self, job: KnownJob) -> None:
        self.job = job

    def rank(self, rank: int) -> Rank:
        """Raises KeyError: there is no such rank."""
        found = next((known for known in self.job.ranks if known.rank == rank), None)
        if found is None:
            raise KeyError(f"rank {rank}")
        return found

    def change(self, rank: int, **facts: Any) -> None:
        ranks = (replace(known, **facts) if known.rank == rank else known for known in self.job.ranks)
        self.job = replace(self.job, ranks=tuple(ranks))

    def note(self, **facts: Any) -> None:
        """Take note of what concerns all ranks."""
        self.job = replace(self.job, **facts)

    def askable(self) -> tuple[int, ...]:
        """Return the ranks that can say where they are."""
        return tuple(
            rank.rank
            for rank in self.job.ranks
            if rank.alive and rank.registered and rank.reachable and not rank.raised and not rank.finished
        )

    def absent(self) -> tuple[int, ...]:
        """Return those that live and make no collectives: not yet, or not any more."""
        return tuple(
            rank.rank for rank in self.job.ranks if rank.alive and (not rank.registered or rank.finished)
        )
