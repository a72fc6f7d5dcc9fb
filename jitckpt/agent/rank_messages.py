"""What the ranks of all hosts say: it goes into the log, and into what is known of the job."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.telling import Telling
from jitckpt.agent.failures import Failures
from jitckpt.agent.hangs import Hangs
from jitckpt.agent.processes.workers import Worker
from jitckpt.decisions.recovery import whole_steps
from jitckpt.events import EventLog
from jitckpt.ring import wishes
from jitckpt.wire import protocol
from jitckpt.wire.protocol import WorkerMessage


class RankMessages:
    """Of one start; `hear` is called on the control thread."""

    def __init__(
        self,
        known: Known,
        telling: Telling,
        failures: Failures,
        hangs: Hangs,
        log: EventLog,
        *,
        save_id: int,
        workers: Mapping[int, Worker],
        registrations: dict[int, protocol.Registered],
        watch_lifeline: Callable[[Worker], None],
        all_registered: Callable[[], None],
    ) -> None:
        """registrations: gets those of all ranks. watch_lifeline: of a worker that has one from now on."""
        self._known, self._telling, self._failures = known, telling, failures
        self._hangs, self._log, self._save_id = hangs, log, save_id
        self._workers, self._registrations = workers, registrations
        self._watch_lifeline, self._all_registered = watch_lifeline, all_registered
        self._saved_periodically: dict[int, set[int]] = {}  # shards, by steps of which there are not all yet

    def hear(self, rank: int, message: WorkerMessage) -> None:
        # Those are long, and of use for a moment or to the agent alone.
        if not isinstance(message, protocol.Loaded | protocol.Progress | protocol.Group):
            fields = asdict(message)
            del fields["time"]
            self._log.write(message.type, **(fields | {"rank": rank}))
        match message:
            case protocol.Registered():
                self._register(rank, message)
            case protocol.AtEnd() | protocol.Finished():
                self._hear_of_end(rank, message)
            case protocol.TorchLoaded() | protocol.Failing() | protocol.WorkRefused() | protocol.Raised():
                self._hear_how_it_ends(rank, message)
            case protocol.Hang():
                self._hangs.hear(rank, message)
            case protocol.Group():
                self._hangs.investigation.name_group(message)
            case protocol.Progress():
                self._hangs.investigation.hear(rank, message)
            case protocol.NcclError():
                self._failures.alarm(
                    "nccl_error", f"{message.operation} of rank {rank} failed: {message.text}", [rank]
                )
            case protocol.SaveWaits() | protocol.SaveBegun() | protocol.SaveEnded() | protocol.SaveFailed():
                self._hear_of_save(rank, message)
            case protocol.PeriodicSave():
                self._hear_of_periodic_save(rank, message)
            case protocol.Warning():
                self._telling.say(f"rank {rank}: {message.text}")

    def _hear_of_save(self, rank: int, message: WorkerMessage) -> None:
        match message:
            case protocol.SaveWaits(save_id=self._save_id):
                self._known.change(rank, goes_on=True)
            case protocol.SaveBegun(save_id=self._save_id):
                self._known.change(rank, saving_step=message.step)
            case protocol.SaveEnded(save_id=self._save_id):
                self._saved(rank, message.step)
            case protocol.SaveFailed(save_id=self._save_id):
                self._known.change(rank, save="failed")
                self._telling.say(f"rank {rank} could not save: {message.reason}")

    def _hear_of_periodic_save(self, rank: int, message: protocol.PeriodicSave) -> None:
        if not message.of_shard:
            return
        shards = self._saved_periodically.setdefault(message.step, set())
        shards.add(message.shard)
        if len(shards) == self._known.rank(rank).shards:
            wishes.note_saved_whole([worker.ring_fd for worker in self._workers.values()])
            self._saved_periodically.clear()

    def _hear_of_end(self, rank: int, message: protocol.AtEnd | protocol.Finished) -> None:
        if isinstance(message, protocol.AtEnd):
            self._known.change(rank, finished=True)
        else:
            self._known.change(rank, reachable=False, finished=message.at_exit)

    def _hear_how_it_ends(self, rank: int, message: WorkerMessage) -> None:
        match message:
            case protocol.TorchLoaded():
                self._known.change(rank, torch_loaded=True)
            case protocol.Failing():
                self._known.change(rank, failing=message.mistake)
            case protocol.WorkRefused():
                # Each rank may say the same.
                if all(known.refused is None for known in self._known.job.ranks):
                    self._telling.say(f"rank {rank} can't go on: {message.reason}")
                self._known.change(rank, refused=message.reason)
            case protocol.Raised():
                self._failures.raised(rank)

    def _register(self, rank: int, message: protocol.Registered) -> None:
        worker = self._workers.get(rank)
        if worker is not None and worker.pid == message.pid and rank not in self._registrations:
            self._watch_lifeline(worker)
        self._registrations[rank] = message
        self._known.change(rank, registered=True, reachable=True, shard=message.shard, shards=message.shards)
        self._log.open(Path(message.checkpoint_dir))
        if all(known.registered for known in self._known.job.ranks):
            self._all_registered()

    def _saved(self, rank: int, step: int) -> None:
        self._known.change(rank, save="ended", saved_step=step)
        if self._known.job.whole_at is None and whole_steps(self._known.job.ranks):
            self._known.note(whole_at=monotonic())
            if self._known.job.ending_since is not None:  # without waiting for it, and said so
                self._telling.what_is_saved()
