"""This host's workers as the control thread hears them: what they say, that they die, how they have ended."""

import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.nonsense import Nonsense
from jitckpt.agent.processes.workers import Worker
from jitckpt.wire.agents import Told
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.protocol import WorkerMessage

STATUS_OF_AN_EXCEPTION = 1  # of a Python that an exception has ended


@dataclass(frozen=True)
class Heard:
    """Who acts on what is heard of a worker."""

    said: Callable[[Worker, WorkerMessage], None]
    dying: Callable[[Worker, int], None]  # its end has begun, with this exit code, which is a failure
    ended: Callable[[Worker, int, Told], None]  # with the exit code, and how the agent has begun to end it


class OwnWorkers:
    """Waits for them by a selector, whose keys have what is to be called."""

    def __init__(
        self,
        workers: dict[int, Worker],
        known: Known,
        selector: selectors.BaseSelector,
        heard: Heard,
        nonsense: Nonsense,
    ) -> None:
        """workers: all who see to them know them by this."""
        self._workers, self._known, self._selector = workers, known, selector
        self._heard, self._nonsense = heard, nonsense

    def watch(self) -> None:
        for worker in self._workers.values():
            self._selector.register(worker.socket, selectors.EVENT_READ, _bound(self._receive, worker))
            self._selector.register(worker.pidfd, selectors.EVENT_READ, _bound(self._ended, worker))

    def watch_lifeline(self, worker: Worker) -> None:
        """It has one from now on."""
        worker.lifeline.watch()
        released = worker.lifeline.released
        self._selector.register(released, selectors.EVENT_READ, _bound(self._let_go, worker))

    def let_go(self) -> None:
        """They go on on another host: what there was of them here has ended, and was waited for."""
        for rank in tuple(self._workers):
            self._known.change(rank, own=False)
            worker = self._workers.pop(rank)
            for file in (worker.socket, worker.pidfd, worker.lifeline.released):
                if file in self._selector.get_map():
                    self._selector.unregister(file)
            worker.not_made_again()
            worker.reap()

    def kill(self) -> None:
        """Leave none."""
        for rank in self._known.job.ranks:
            if rank.alive and rank.own:
                self._workers[rank.rank].signal(signal.SIGKILL)
                self._workers[rank.rank].reap()

    def _receive(self, worker: Worker) -> None:
        for message in worker.receive():
            if message is None:
                self._selector.unregister(worker.socket)
                # A process that ends closes its socket a moment before its death can be seen.
                if self._known.rank(worker.rank).reachable and worker.has_ended(within=0.5):
                    self._reap(worker)
                else:
                    self._known.change(worker.rank, reachable=False)
            elif isinstance(message, ProtocolError):
                self._nonsense.note(f"rank {worker.rank}", message)
            else:
                try:
                    self._heard.said(worker, message)
                except Exception as error:
                    self._nonsense.note(f"rank {worker.rank}", error)

    def _let_go(self, worker: Worker) -> None:
        """The worker's end may have begun; a failure is acted on before it has ended."""
        self._selector.unregister(worker.lifeline.released)
        if worker.socket.fileno() in self._selector.get_map():
            self._receive(worker)  # what it said before
        rank = self._known.rank(worker.rank)
        if not rank.alive or rank.raised or rank.told != "nothing":
            return
        if exit_code := worker.dies_with():
            self._heard.dying(worker, exit_code)

    def _ended(self, worker: Worker) -> None:
        if worker.socket.fileno() in self._selector.get_map():
            self._receive(worker)  # what it said before it ended
        if self._known.rank(worker.rank).alive:
            if worker.socket.fileno() in self._selector.get_map():
                self._selector.unregister(worker.socket)
            self._reap(worker)

    def _reap(self, worker: Worker) -> None:
        self._selector.unregister(worker.pidfd)
        if worker.lifeline.released in self._selector.get_map():
            self._selector.unregister(worker.lifeline.released)
        exit_code = worker.reap()
        rank = self._known.rank(worker.rank)
        told: Told = "nothing" if rank.dying else rank.told
        if rank.raised:
            exit_code, told = STATUS_OF_AN_EXCEPTION, "nothing"  # it has failed, though we may have ended it
        self._heard.ended(worker, exit_code, told)


def _bound(call: Callable[[Worker], None], worker: Worker) -> Callable[[], None]:
    return lambda: call(worker)
