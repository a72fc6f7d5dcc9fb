"""Ranks that a signal has stopped (SIGSTOP, say) while their saves are waited for: noted, and told."""

from collections.abc import Mapping

from jitckpt.agent.control.known import Known
from jitckpt.agent.processes.workers import Worker
from jitckpt.console import say
from jitckpt.decisions.recovery import STOPPED_GRACE, Rank, is_last_of_its_shard
from jitckpt.events import EventLog

STOPPED_LOOK = 0.5  # seconds between two looks whether a rank that is to save is stopped


class StoppedRanks:
    """Looks at this host's, each time that the control thread decides."""

    def __init__(self, known: Known, workers: Mapping[int, Worker], log: EventLog) -> None:
        self._known, self._workers, self._log = known, workers, log
        self._told: set[int] = set()

    def look(self) -> float | None:
        """While saves are waited for: note who is stopped and so can't save. Returns when to look again."""
        job = self._known.job
        if job.save_ordered_at is None or job.ending_since is not None:
            return None
        for rank in job.ranks:
            if rank.own and rank.can_save:
                stopped = self._workers[rank.rank].is_stopped()
                self._known.change(
                    rank.rank, stopped_since=(rank.stopped_since or job.now) if stopped else None
                )
                self._tell(self._known.rank(rank.rank))
        return job.now + STOPPED_LOOK

    def _tell(self, rank: Rank) -> None:
        """Say for whom all wait; a moment may pass before, in which somebody looks at the rank."""
        job = self._known.job
        stands = rank.stopped_since is not None and job.now >= rank.stopped_since + STOPPED_GRACE
        if not stands or rank.rank in self._told or not is_last_of_its_shard(job, rank):
            return
        self._told.add(rank.rank)
        text = (
            f"rank {rank.rank} is stopped by a signal, and no other rank can save what it has: it is waited "
            f"for until the {job.save_deadline:g} s are over. To let it go on: kill -CONT "
            f"{self._workers[rank.rank].pid}"
        )
        self._log.write("warning", rank=rank.rank, text=text)
        say(f"{text}.")
