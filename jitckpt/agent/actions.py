"""What the control thread does with the ranks once recovery.decide has decided it."""

import signal
import time
from collections.abc import Mapping

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.requests import Requests
from jitckpt.agent.control.telling import Telling
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.decisions.recovery import whole_steps
from jitckpt.events import EventLog
from jitckpt.ring import wishes
from jitckpt.wire import protocol


class Actions:
    """On the ranks of this host; of the others it is known what their agents do."""

    def __init__(
        self,
        known: Known,
        telling: Telling,
        requests: Requests,
        *,
        workers: Mapping[int, Worker],
        local_states: LocalStates,
        log: EventLog,
        save_id: int,
    ) -> None:
        self._known, self._telling, self._requests = known, telling, requests
        self._workers, self._local_states = workers, local_states
        self._log, self._save_id = log, save_id

    def let_end(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            wishes.let_end(self._workers[rank].ring_fd)
            self._known.change(rank, let_end=True)

    def order_save(self, ranks: tuple[int, ...]) -> None:
        assert self._telling.trouble is not None
        if self._known.job.save_ordered_at is None:
            self._known.note(save_ordered_at=time.monotonic())
        order = protocol.Save(
            self._save_id, reason=self._telling.trouble, deadline=self._known.job.save_deadline
        )
        self._telling.who_saves(ranks)
        for rank in ranks:
            problem = self._workers[rank].send(order) if rank in self._workers else None
            self._known.change(rank, save="ordered" if problem is None else "failed")
            if problem is not None:
                self._log.write("warning", rank=rank, text=f"rank {rank} can't be told to save: {problem}")

    def end(self, kill: tuple[int, ...], terminate: tuple[int, ...]) -> None:
        if self._known.job.ending_since is None:
            self._known.note(ending_since=time.monotonic())
            self._telling.ends()
        self._log.write("ranks_ended", kill=kill, terminate=terminate)
        for rank in kill:
            if rank in self._workers:
                self._workers[rank].signal(signal.SIGKILL)
            self._known.change(rank, told="kill")
        interrupts = self._requests.interrupts
        for rank in terminate:
            if rank in self._workers:
                self._workers[rank].signal(interrupts[0] if interrupts else signal.SIGTERM)
            self._known.change(rank, told="terminate")

    def begin_local_states(self) -> None:
        if self._known.job.ending_since is None:  # all ranks have ended by themselves
            self._telling.what_is_saved()
        self._known.note(local_state_begun_at=time.monotonic())
        is_in_memory = self._known.job.in_memory is not None
        self._local_states.all_have_ended(whole_steps(self._known.job.ranks), is_in_memory=is_in_memory)
