"""What a start's ranks alone knew: this host writes its own ranks', and those whose rings it keeps copies of.

At a rank's death at once, and again once all have ended; then it tells which are lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jitckpt.agent.local_state_writer import LocalStateWriter, Write
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.states_at_death import StatesAtDeath
from jitckpt.console import say
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.ring.copies import Copies
from jitckpt.wire import protocol

# A rank saves what it alone knows by itself where its agent has ended.
MAY_HAVE_IT = "its own host may have it, if it was only cut off or only its agent has ended"


@dataclass
class LocalStates:
    """For the agent's control thread.

    workers: of this host. registrations: of all ranks that have come through jitckpt.init. Whoever gives
    them, and the lost hosts, changes them. leads: whether this host says what concerns all. wake: called
    from another thread once all is written.
    """

    workers: Mapping[int, Worker]
    registrations: Mapping[int, protocol.Registered]
    hosts: Hosts | None
    lost_hosts: set[int]
    leads: Callable[[], bool]
    log: EventLog
    write: Write
    wake: Callable[[], None]
    copies: Copies = field(default_factory=Copies)  # of the rings of another host's ranks
    _at_death: StatesAtDeath = field(default_factory=StatesAtDeath)
    _writer: LocalStateWriter | None = None
    _is_told: bool = False

    def rank_died(self, rank: int) -> None:
        """Begin to write the states of a rank, if it is this host's and may have some."""
        if rank in self.workers and rank in self.registrations:
            self._at_death.write(rank, self.workers[rank].ring_fd, self.directory())

    def all_have_ended(self, steps: set[int], *, is_in_memory: bool) -> None:
        """Begin to write all that there is of the steps that are saved, or that a missed host may save.

        A host may be lost before it has written its own, and its disk at any later time. is_in_memory: the
        memory tier has a step whole, with all that the ranks alone knew.
        """
        own = {rank: worker.ring_fd for rank, worker in self.workers.items() if rank in self.registrations}
        copied = {
            rank: ring
            for rank, ring in self.copies.rings.items()
            if rank in self.registrations and rank not in self.workers
        }
        self._writer = LocalStateWriter(
            dict(sorted((own | copied).items())),
            copied=set(copied),
            directory=self.directory(),
            steps=steps,
            is_host_missed=bool(self.lost_hosts) and not is_in_memory,
            write=self.write,
            done=self.wake,
            before=self._at_death.finish,
        )
        self._writer.start()

    def are_written(self) -> bool:
        """Return whether they are; the first time it tells which are lost."""
        writer = self._writer
        if writer is None or not writer.is_done or self._is_told:
            return self._is_told
        self._is_told = True
        for rank in sorted(self.registrations):
            if lost := self._why_lost(rank, writer):
                text = f"rank {rank}'s own state (random numbers, buffers ...) is lost: {lost}"
                self.log.write("warning", rank=rank, text=text)
                say(text)
        size = sum(sum(by_step.values()) for by_step in writer.written.values())
        by_rank = {rank: sorted(by_step) for rank, by_step in writer.written.items()}
        self.log.write("local_state_written", steps=by_rank, bytes=size, seconds=writer.seconds)
        return True

    def leave(self, *, is_impatient: bool) -> None:
        """Go on without those that are not written by now."""
        writer = self._writer
        if writer is None or self._is_told:
            return
        writer.give_up()
        why = f"the file system of {writer.directory} does not answer"
        if is_impatient:
            why = "the agent was asked to end once more, and waits for nothing"
        text = f"what the ranks alone knew (random numbers, buffers ...) could not be written: {why}."
        self.log.write("warning", text=text)
        say(text)

    def give_up(self) -> None:
        """Have nobody told any more."""
        if self._writer is not None:
            self._writer.give_up()

    def close(self) -> None:
        """Free what it has taken, once the control thread has ended."""
        self._at_death.close()
        self.copies.close()

    def directory(self) -> Path:
        """Return this host's checkpoint directory; the path of another's may mean nothing here."""
        own = [one for rank, one in self.registrations.items() if rank in self.workers]
        return Path((own or list(self.registrations.values()))[0].checkpoint_dir)

    def _why_lost(self, rank: int, writer: LocalStateWriter) -> str:
        """Return why a rank's own state is lost; empty if it is not, or it is not for this agent to say."""
        if writer.not_needed or not self._answers_for(rank):
            return ""
        if rank in writer.problems:
            return writer.problems[rank]
        if rank not in writer.written:
            return f"the host that had a copy of it is lost, too, or had none yet; {MAY_HAVE_IT}."
        if not writer.steps or max(writer.steps) in writer.written[rank]:
            return ""
        if rank in self.workers:
            return f"its memory has none of step {max(writer.steps)}."
        return f"the copy of its memory has none of step {max(writer.steps)}; {MAY_HAVE_IT}."

    def _answers_for(self, rank: int) -> bool:
        """Return whether it is this agent that has to say so if a rank's own state is lost."""
        if rank in self.workers or self.hosts is None:
            return True
        host = self.hosts.host_of(rank)
        keeper = self.hosts.keeper(host)
        if host not in self.lost_hosts:
            return False
        return self.leads() if keeper in self.lost_hosts else keeper == self.hosts.index
