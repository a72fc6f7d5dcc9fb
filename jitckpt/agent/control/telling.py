"""What the user and the log hear of a failure, of who saves, and of what is saved."""

import signal
from collections.abc import Callable, Mapping, Sequence

from jitckpt.agent.control.known import Known
from jitckpt.agent.processes.workers import Worker
from jitckpt.console import say
from jitckpt.decisions.recovery import Rank, training_is_over, whole_steps
from jitckpt.errors import JitckptError
from jitckpt.events import EventLog
from jitckpt.ring import local_state
from jitckpt.wire import protocol

MOST_TEXT = 2000  # characters of a failure's description


class Telling:
    """Of one host's agent; where there are several, the first that lives speaks to the user."""

    trouble: str | None = None  # the first failure that was heard of
    newest_begun = 0  # the newest step that was begun here, as the ranks' end began

    def __init__(
        self,
        known: Known,
        log: EventLog,
        workers: Mapping[int, Worker],
        *,
        save_id: int,
        elastic: bool,
        snapshot: Callable[[], int | None],
        not_recovered: Callable[[], str],
    ) -> None:
        """not_recovered: why transparent mode has not recovered, if it was to.

        snapshot: the step of the one to which the ranks go back; None if they don't.
        """
        self._known, self._log, self._workers = known, log, workers
        self._save_id, self._elastic = save_id, elastic
        self._snapshot, self._not_recovered = snapshot, not_recovered

    def say(self, text: str) -> None:
        if self._log.leading:
            say(text)

    def failure(self, cause: str, text: str, ranks: Sequence[int]) -> None:
        """Log a failure; tell the user of the first, the others usually follow from it."""
        text = protocol.shortened(text, MOST_TEXT)  # it goes into orders
        self._log.write("detected", cause=cause, text=text, first=self.trouble is None, ranks=list(ranks))
        if self.trouble is None:
            self.trouble = text
            self.say(f"{text}.")

    def who_saves(self, ranks: Sequence[int]) -> None:
        deadline = self._known.job.save_deadline
        self.say(f"{listed(ranks)} may take {deadline:g} s to save the state.")
        self._log.write("save_ordered", save_id=self._save_id, ranks=ranks, deadline=deadline)

    def ends(self) -> None:
        """The ranks' end begins."""
        self.newest_begun = self._newest_step() or 0
        self.what_is_saved()

    def what_is_saved(self) -> None:
        job = self._known.job
        steps = whole_steps(job.ranks)
        if not steps and not training_is_over(job.ranks) and job.in_memory is not None:
            self._log.write("kept_in_memory", step=job.in_memory, newest=self._newest_step())
            no_file = "" if self._elastic else "; no file is needed"  # for other ranks there is
            self.say(f"the state after step {job.in_memory} is in memory{no_file}.")
        elif steps:
            self._log.write("saved", step=max(steps))
            self.say(f"the state after step {max(steps)} is saved.")
        elif training_is_over(job.ranks):
            self.say("the training had ended on all ranks before that, so nothing is done again.")
        elif (snapshot := self._snapshot()) is not None:
            self.say(f"all ranks go back to the snapshot after step {snapshot}.")
        elif any(rank.registered for rank in job.ranks):
            reasons = ", ".join(f"rank {rank.rank} {_why_not_saved(rank)}" for rank in job.ranks)
            self._log.write("not_saved", text=reasons, step=self._newest_step())
            self.say(f"the state could not be saved: {reasons}.")
        else:
            if not_recovered := self._not_recovered():
                self.say(f"the failure was not recovered from, as was said: {not_recovered}")
            self.say(
                "no rank has come through jitckpt.init yet, so there is no state to save; behind it, and "
                "with save_every=... for failures of all replicas (docs/guides/user-level.md), the job goes "
                "on from a save."
            )

    def _newest_step(self) -> int | None:
        """Return the newest step that a rank of this host has begun; None where that can't be told."""
        try:
            return local_state.newest_step([worker.ring_fd for worker in self._workers.values()])
        except JitckptError as error:
            self._log.write("warning", text=str(error))
            return None


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"ended with exit status {exit_code}"


def _why_not_saved(rank: Rank) -> str:
    if rank.save == "ended":
        return f"saved step {rank.saved_step} of shard {rank.shard} alone"
    if rank.save == "failed":
        return "could not save"
    if rank.raised:
        return "raised an exception"
    if not rank.alive or rank.dying:
        return "has ended"
    if not rank.registered:
        return "had not called jitckpt.init"
    return "did not save in time" if rank.save == "ordered" else "had finished its training"


def listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
