"""The processes of one start of a job on this host, under a supervisor, in the place of torch's own."""

import inspect
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from jitckpt.agent.health import SUSPECT, HostReports
from jitckpt.agent.local_state_saves import write_local_states
from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.migration import foretold
from jitckpt.agent.migration.followed_snapshots import FollowedSnapshots
from jitckpt.agent.migration.going_back import MadeAgain
from jitckpt.agent.migration.host_dumps import HostDumps
from jitckpt.agent.migration.host_part import Place
from jitckpt.agent.migration.kept_snapshots import KeptSnapshots
from jitckpt.agent.migration.leaving import Departure
from jitckpt.agent.migration.led_copies import LedCopies
from jitckpt.agent.migration.move import Mover
from jitckpt.agent.migration.part_copier import PartCopier
from jitckpt.agent.migration.snapshots import ProcessSnapshots
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.migration.suspending import Suspending
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.spares import Spares
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.progress import ProgressTeller
from jitckpt.agent.protection import MemoryProtection
from jitckpt.agent.proxies.control import LEADER, ControlSocket, Proxies, WaitsBehindStep
from jitckpt.agent.proxies.exchange import ExchangeSettings
from jitckpt.agent.proxies.state_transfer import Transfers
from jitckpt.agent.proxies.step_barrier import Messenger, StepBarrier
from jitckpt.agent.reports import Reports
from jitckpt.agent.settings import Settings
from jitckpt.agent.supervisor import Supervisor
from jitckpt.agent.taking_in import TakingIn
from jitckpt.bindings import clock
from jitckpt.console import say, show_size
from jitckpt.decisions.recovery import Outcome
from jitckpt.decisions.step_tree import TreePlace
from jitckpt.decisions.suspects import VARIABLE, Suspects
from jitckpt.errors import (
    JitckptError,
)
from jitckpt.events import EventLog
from jitckpt.faults import injection
from jitckpt.faults.injection import FaultSpec
from jitckpt.hosts.connections import PATIENCE, Arrived, HostLost, Hosts, Unclear
from jitckpt.hosts.standbys import Standby
from jitckpt.ring import local_state, wishes
from jitckpt.ring.copies import ANSWER_SECONDS, Copier
from jitckpt.saves import directory_lock
from jitckpt.saves.starts import Start
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire import environment as variables
from jitckpt.wire import protocol
from jitckpt.wire.agents import WantSave
from jitckpt.wire.moves import JobFacts
from jitckpt.wire.protocol import WorkerMessage

HEARING_SECONDS = 0.5  # in which all hosts have heard what one says
SETTLED_STEPS = 3  # after a start's first, until a healthy training is ended to take in hosts
ROOM = 2  # times what the save before has taken, which has to be free for that


def _nobody(hindrance: Callable[[], str | None], take_in: Callable[[str], None]) -> None:
    """Nobody is taken in."""
    del hindrance, take_in


class WorkerProcesses(PContext):
    """One start of all workers: what torch's agent starts, asks for its result and closes."""

    supervisor: Supervisor
    # What is made as this host starts, where the job needs it.
    _protection: MemoryProtection | None = None
    _control: ControlSocket | None = None
    _barrier: StepBarrier | None = None
    _messenger: Messenger | None = None
    _progress: ProgressTeller | None = None
    _device_proxies: Proxies | None = None
    _mover: Mover | None = None
    _relay: StoreRelay | None = None
    _resting_place: RestingPlace | None = None
    _taking_in: TakingIn | None = None
    _saves_itself = False
    _open = False
    _first_step = 0  # of this start
    # Where this host comes in the place of another, what that has known.
    _known_place: TreePlace | None = None

    def __init__(
        self,
        settings: Settings,
        log: EventLog,
        armed: list[FaultSpec],
        spares: Spares,
        first_directories: dict[str, str],
        *,
        run: str,
        children: Children,
        suspects: Suspects,
        reports: HostReports,
        devices: Sequence[str],
        restarts_left: int,
        mistakes_before: frozenset[str],
        hosts: Hosts | None,
        memory: MemoryTier | None = None,
        standbys: Callable[[], list[Standby]] = list,
        taking_in: Callable[[Callable[[], str | None], Callable[[str], None]], TakingIn | None] = _nobody,
        facts: Callable[[], JobFacts] | None = None,
        started: Start = Start(),  # noqa: B008
        snapshots: KeptSnapshots | None = None,
        made_again: MadeAgain | None = None,
        said_before: Sequence[Arrived | Unclear | HostLost] = (),
        numa_options: Any = None,
        **torch_arguments: Any,
    ) -> None:
        """standbys: who stands by now. facts: what one of them needs to know of the job.

        snapshots: of this launcher. made_again: the workers, from one. said_before: by other hosts.
        """
        super().__init__(**torch_arguments)
        self._settings = settings
        self._log = log
        self._armed = armed
        self._spares = spares
        self._first_directories = first_directories
        self._run = run
        self._children = children
        self._suspects, self._reports = suspects, reports
        self._devices = devices
        self._restarts_left = restarts_left
        self._mistakes_before = mistakes_before
        self._hosts = hosts
        self._memory = memory
        self._memories: dict[int, int] = {}  # of this host's ranks
        self._numa_options = numa_options
        self._workers: dict[int, Worker] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._killed: dict[int, ProcessFailure] = {}
        self._commands: dict[int, tuple[str, ...]] = {}
        self._environments: dict[int, dict[str, str]] = {}
        self._waiting_for_first_step = set(range(self.nprocs))
        self._standbys, self._facts, self._started = standbys, facts, started
        self._make_taking_in = taking_in
        self._server_variables: Callable[[int], Mapping[str, str]] = lambda rank: {}
        self._snapshots, self._made_again = snapshots, made_again
        self._shelf = None if snapshots is None else snapshots.shelf
        self._said_before = said_before

    def start(self) -> None:
        """Start the workers and what copies their logs; signals, unlike in torch, are the agent's affair."""
        self._start()
        for tail_log in self._tail_logs:
            tail_log.start()

    @property
    def broken_devices(self) -> frozenset[str]:
        """Devices that a rank has failed on with a new server, too."""
        return frozenset() if self._device_proxies is None else self._device_proxies.broken_devices

    @property
    def has_left(self) -> bool:
        """Whether this host's ranks go on on another one, and it is not needed any more."""
        proxies = self._device_proxies
        return proxies is not None and proxies.moved and not proxies.leads

    @property
    def is_suspended(self) -> bool:
        """Whether the processes of all hosts are in files."""
        return self._device_proxies is not None and self._device_proxies.suspended

    def want_save(self, signal_name: str) -> None:
        """Ask all workers to save after one step, and to go on. signal_name: what asked for it."""
        if self._saves_itself:
            why = "a save function of the job's own can't run beside the training"
            say(f"{signal_name}: nothing is saved: {why}.")
            return
        rings = [worker.ring_fd for worker in self._workers.values()]
        try:
            margin = wishes.MARGIN
            if self._hosts is not None:  # the others must hear of it before they come to that step
                steps = local_state.newest_step(rings)
                time.sleep(HEARING_SECONDS)
                margin += 2 * (local_state.newest_step(rings) - steps)
            step = wishes.want_save(rings, margin)
        except (JitckptError, OSError) as error:
            say(f"the state can't be saved now: {error}")
            return
        if step is None:
            say(f"{signal_name}: a rank has made no step yet, so there is nothing to save.")
            return
        if self._hosts is not None:
            self._hosts.broadcast(WantSave(step))
        self._log.write("save_wanted", step=step)
        say(f"{signal_name}: the state after step {step} will be saved; the training goes on.")

    def _open_for_workers(self) -> None:
        """Make what the workers in transparent mode are told of."""
        if (found := self._made_again) is not None:
            self._control, self._relay = ControlSocket(), found.relay
            self._barrier, self._resting_place = found.barrier, found.resting_place
            self._server_variables = found.variables
            return
        if self._settings.criu is not None:
            self._relay = StoreRelay(self.envs[0]["MASTER_ADDR"], int(self.envs[0]["MASTER_PORT"]))
        if self._settings.suspendable or self._shelf is not None:
            self._resting_place = RestingPlace(self.nprocs)
        if self._settings.recovery_deadline is not None:
            self._control = ControlSocket()
            if self._settings.state_on_device:
                hosts = 1 if self._hosts is None else len(self._hosts.all)
                self._barrier = StepBarrier(self.nprocs, hosts)

    def _start(self) -> None:
        self._open_for_workers()
        try:
            for local_rank in range(self.nprocs):
                self._prepare_worker(local_rank)
            if self._settings.warm_start:
                self._spares.fill(self._commands, self._environments, at_least=1)
            for local_rank in range(self.nprocs):
                self._workers[local_rank] = self._start_worker(local_rank)
            self._begin_to_supervise()
        except BaseException:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
                worker.reap()
                worker.close()
            self._children.end_all()
            if self._control is not None:
                self._control.close()
            self._close_for_workers()
            raise

    def _begin_to_supervise(self) -> None:
        """Have the workers supervised, which takes descriptors and threads that there may not be."""
        workers = list(self._workers.values())
        self._copier = self._copier_of_rings()
        if self._memory is not None:
            self._protection = MemoryProtection(self._memory, self._memories, self._hosts, self._log)
        self._device_proxies = self._proxies()
        self.supervisor = Supervisor(
            workers=workers,
            log=self._log,
            reports=Reports(
                heard=self._heard,
                registered=self._registered,
                failed=self._failed,
                write_local_states=write_local_states,
                blamed=self._blamed,
                last_copy=(lambda: None) if self._copier is None else self._copier.look,
            ),
            save_id=self._log.restart + 1,
            save_deadline=self._settings.save_deadline,
            stall_timeout=self._settings.stall_timeout,
            restarts_left=self._restarts_left,
            mistakes_before=self._mistakes_before,
            hosts=self._hosts,
            proxies=self._device_proxies,
            protection=self._protection,
            said_before=self._said_before,
            elastic=self._settings.wait is not None,
            snapshot=self._snapshot,
        )
        self._taking_in = self._make_taking_in(self._hinders_a_save, self.supervisor.take_in)
        if self._taking_in is not None:
            self._taking_in.start()
        host = 0 if self._hosts is None else self._hosts.index
        rings = {worker.rank: worker.ring_fd for worker in workers}
        on_progress = self._settings.on_progress if host == 0 else None
        self._progress = ProgressTeller(rings, self._log, host, self._memories, on_progress)
        self._progress.start()
        if self._copier is not None:
            self._copier.start()
        self.supervisor.start()  # the last that may fail: from now on the workers' ends are its affair
        self._open = True

    def _proxies(self) -> Proxies | None:
        deadline = self._settings.recovery_deadline
        if self._control is None or deadline is None:
            return None
        # A worker leads a session of its own; it may be a shell in which the training runs.
        sessions = {worker.rank: worker.pid for worker in self._workers.values()}
        transfers = None
        if self._barrier is not None and self._hosts is not None:
            self._messenger = Messenger(self._barrier, self._hosts, self._known_place)
            transfers = Transfers(self._hosts)
        exchange = None
        self._mover = self._make_mover()
        if self._settings.exchange_broken:
            moves = self._mover if self._settings.move_broken else None
            exchange = ExchangeSettings(
                tuple(self._devices),
                injection.OF_A_BROKEN_DEVICE,
                move=None if moves is None else moves.move,
                check=None if moves is None else moves.check,
                **self._departure(),
            )
        proxies = Proxies(
            self._control,
            sessions,
            self._log,
            say=say,
            deadline=deadline + self._settings.move_wait,  # in which a rank says that it is at rest, too
            hosts=self._hosts,
            messenger=self._messenger,
            transfers=transfers,
            exchange=exchange,
            server_variables=self._server_variables,
            suspension=self._suspension(),
        )
        if self._mover is not None:
            self._mover.begin(proxies, self._copier)
        if self._made_again is not None:
            self._made_again.adopt(proxies)
        return proxies

    def _suspension(self) -> WaitsBehindStep | None:
        if self._shelf is not None and self._mover is not None and self._resting_place is not None:
            assert self._settings.snapshot_every is not None
            assert self._settings.command is not None
            place = Place(self._settings.command)
            if self._hosts is not None:
                place = replace(place, number=self._hosts.index, hosts=len(self._hosts.all))
            dumps = HostDumps(
                self._mover,
                [worker.rank for worker in self._workers.values()],
                self._shelf,
                self._log,
                place=self._resting_place,
                barrier=self._barrier,
            )
            copies = None
            if self._hosts is not None and self._snapshots is not None and self._snapshots.held is not None:
                copier = PartCopier(self._hosts, self._shelf, self._snapshots.held)
                if self._hosts.index != LEADER:
                    return FollowedSnapshots(dumps, place, self._hosts, copier)
                copies = LedCopies(
                    self._snapshots.copies,
                    copier,
                    self._hosts,
                    self._log,
                    say,
                    every=self._settings.snapshot_every,
                )
            return ProcessSnapshots(
                dumps,
                place,
                self._log,
                every=self._settings.snapshot_every,
                say=say,
                gone_back_to=None if self._made_again is None else self._made_again.step,
                hosts=self._hosts,
                copies=copies,
            )
        if self._resting_place is None or self._mover is None or self._log.directory is None:
            return None
        return Suspending(
            self._mover,
            [worker.rank for worker in self._workers.values()],
            self._resting_place,
            self._log.directory,
            self._log,
            say=say,
            children=self._children,
            end_spares=self._spares.close,
            is_interrupted=lambda: bool(self.supervisor.interrupts),
        )

    def _snapshot(self) -> int | None:
        """Return the step that the ranks go back to if one fails; None if there is no snapshot."""
        return None if self._shelf is None else self._shelf.step

    def _departure(self) -> dict[str, Any]:
        """Return what has all ranks of this host go on on another one, if there may be one."""
        secret, moves = self._settings.secret, self._settings.move_broken
        if self._mover is None or self._hosts is None or not moves:
            return {}
        foretell = partial(foretold.tell, self._log, say, self._hosts, secret, self._settings.state_on_device)
        if self._facts is None or secret is None:
            return {"foretell": foretell}
        departure = Departure(
            self._mover,
            self._hosts,
            self._log,
            say,
            standbys=self._standbys,
            facts=self._facts,
            barrier=self._barrier,
            messenger=self._messenger,
            secret=secret,
            wait=self._settings.move_wait,
            is_interrupted=lambda: bool(self.supervisor.interrupts),
            known=lambda: self.supervisor.ranks,
        )

        def leave(orders: Mapping[int, bytes]) -> bool:
            if has_left := departure.leave(orders):
                self._stop_looking()
            return has_left

        return {"can_leave": departure.is_possible, "leave": leave, "foretell": foretell}

    def _stop_looking(self) -> None:
        """Look at the ranks' memory no more."""
        for one in (self._progress, self._copier):
            if one is not None:
                one.stop()
        self._progress, self._copier = None, None

    def _make_mover(self) -> Mover | None:
        if self._settings.criu is None or self._relay is None:
            return None
        shared = {} if self._barrier is None else {"jitckpt-steps": self._barrier.file}
        if self._resting_place is not None:
            shared["jitckpt-rest"] = self._resting_place.file
        workers = {worker.rank: worker for worker in self._workers.values()}
        return Mover(
            self._settings.criu,
            workers,
            self._log,
            say,
            shared=shared,
            relay=self._relay,
            hosts=() if self._hosts is None else [host.address for host in self._hosts.all],
        )

    def _copier_of_rings(self) -> Copier | None:
        """Return what has another host keep copies of the rings."""
        if self._hosts is None:
            return None
        rings = {worker.rank: worker.ring_fd for worker in self._workers.values()}
        keeper = self._hosts.keeper(self._hosts.index)
        return Copier(
            rings,
            partial(self._hosts.send, keeper),
            partial(self._hosts.waiting, keeper),
            partial(self._hosts.confirm, keeper),
            [worker.copies for worker in self._workers.values() if worker.copies is not None],
        )

    def _prepare_worker(self, local_rank: int) -> None:
        environment = {**os.environ, **self.envs[local_rank], **self._settings.device_environment}
        environment |= variables.HANG_TIMEOUT.to(self._settings.hang_timeout)
        environment |= variables.HANG_FLOOR.to(self._settings.hang_floor)
        if tuple(self._devices) != self._settings.devices:
            environment[VARIABLE] = ",".join(self._devices)
        if self._control is not None:
            environment |= self._control.variables
            if self._barrier is not None:
                environment |= variables.PROXY_TOGETHER.to(self._barrier.of(local_rank))
            if not variables.PROXY_SPARE.is_set(environment):
                environment |= variables.PROXY_SPARE.to(self._spares.wanted(len(self.args)) > 0)
        if self._relay is not None:
            environment |= self._relay.variables
        if self._resting_place is not None:
            environment |= self._resting_place.of(local_rank)
        environment |= variables.AGENT_PID.to(os.getpid())
        environment |= variables.RUN.to(self._run)
        environment |= variables.JOB_PROCESSES.to(self._children.mark)
        environment |= variables.STAGING.to(self._settings.staging)
        environment |= variables.FIRST_DIRECTORIES.to(self._first_directories)
        environment |= variables.RESTART.to(self._log.restart)
        environment |= variables.START.to(str(self._started))
        environment |= variables.COPY_PATIENCE.to(ANSWER_SECONDS + PATIENCE * self._settings.host_timeout)
        if self._memory is not None:
            rank = int(environment["RANK"])
            self._memories[rank] = self._memory.given(rank)
            environment |= self._memory.variables(self.nprocs)
        environment |= variables.FAULTS.to(injection.to_environment(self._armed))
        if self._settings.checkpoint_dir is not None:
            environment |= variables.CHECKPOINT_DIR.to(str(self._settings.checkpoint_dir))
        command = (str(self.entrypoint), *(str(argument) for argument in self.args[local_rank]))
        if self._numa_options is not None:
            from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

            wrap: Callable[..., tuple[str, ...]] = _maybe_wrap_command_args_with_numa_binding
            # gpu_index in torch 2.11, device_index in later ones.
            index = next(name for name in inspect.signature(wrap).parameters if name.endswith("_index"))
            command = wrap(command, numa_options=self._numa_options, **{index: local_rank})
        self._commands[local_rank], self._environments[local_rank] = command, environment

    def _start_worker(self, local_rank: int) -> Worker:
        if self._made_again is not None:
            return self._made_again.worker(local_rank, self._children)
        command, environment = self._commands[local_rank], self._environments[local_rank]
        start = partial(
            Worker,
            rank=int(environment["RANK"]),
            command=command,
            environment=environment,
            stdout=self.stdouts[local_rank],
            stderr=self.stderrs[local_rank],
            is_copied=self._hosts is not None,
            memory_fd=self._memories.get(int(environment["RANK"])),
            whole_fd=None if self._memory is None else self._memory.whole(int(environment["RANK"])),
            children=self._children,
        )
        spare = self._spares.take(local_rank)
        if spare is not None:
            try:
                worker = start(ring_fd=local_state.create(), warm=spare)
                self._log.write("spare_used", rank=worker.rank)
                return worker
            except OSError as error:
                self._log.write("warning", rank=int(environment["RANK"]), text=str(error))
        return start(ring_fd=local_state.create())

    def _local_rank(self, worker: Worker) -> int:
        return next(number for number, known in self._workers.items() if known is worker)

    def _registered(self, worker: Worker, message: protocol.Registered) -> None:
        self._children.note_registered(worker.pid)
        if self._protection is not None:
            self._protection.hear_rank(worker.rank)
        self._saves_itself = message.saver == "callback"
        # Between two starts no rank has the lock.
        self._log.aside(partial(_hold, Path(message.checkpoint_dir), self._run, self._log))
        if message.named_directory and not os.path.isabs(message.named_directory):
            self._first_directories.setdefault(message.named_directory, message.checkpoint_dir)

    def _heard(self, worker: Worker, message: WorkerMessage) -> None:
        match message:
            case protocol.Loaded():
                self._spares.note_loaded(self._local_rank(worker), message.modules, message.environment)
            case protocol.FirstStep():
                self._first_step = message.step
                self._prepare_spares(worker)
            case protocol.Fault():
                self._fault_fired(message.fault)

    def _hinders_a_save(self) -> str | None:
        """Return why not all that the ranks know could be saved now, "" if that ends by itself; else None.

        A healthy training is about to be ended for it.
        """
        if self._waiting_for_first_step:
            return ""
        try:
            newest = local_state.newest_step([worker.ring_fd for worker in self._workers.values()])
            sizes = [event["bytes"] for event in self._log.events if event["event"] == "save_ended"]
            directory = self._log.directory
            if newest < self._first_step + SETTLED_STEPS or directory is None:
                return ""  # what belongs to a minibatch is learned in the first ones
            free = shutil.disk_usage(directory).free  # this thread may wait for the disk
        except (JitckptError, OSError) as error:
            return f"it is not known whether all could be saved: {error}"
        needed = ROOM * max(sizes, default=0) * (1 if self._hosts is None else len(self._hosts.all))
        needed *= self.nprocs
        return None if free >= needed else f"{directory} has {show_size(free)} left, too little for a save"

    def _prepare_spares(self, worker: Worker) -> None:
        """Once every rank trains there is time to get ready for the next failure."""
        self._waiting_for_first_step.discard(self._local_rank(worker))
        if not self._waiting_for_first_step and self._restarts_left > 0:
            try:
                ready = self._spares.fill(self._commands, self._environments)
            except OSError as error:
                self._log.write("warning", rank=worker.rank, text=f"There are no warm spares: {error}.")
            else:
                self._log.write("spares_started", spares=ready)

    def _fault_fired(self, text: str) -> None:
        fired = next((fault for fault in self._armed if str(fault) == text), None)
        if fired is not None:
            self._armed.remove(fired)
            if fired.kind == "guardian":
                self._children.kill_guardian()
            elif fired.kind == "template":
                self._spares.kill_template()
            elif fired.kind == "agent-clock":
                clock.jump(injection.seconds_of(fired))
            elif fired.kind in injection.LASTING_KINDS and self._device_proxies is not None:
                self._device_proxies.break_device(fired.rank)

    def _blamed(self, worker: Worker) -> None:
        local_rank = self._local_rank(worker)
        if local_rank >= len(self._devices):  # ranks that share devices
            return
        device, host = self._devices[local_rank], socket.gethostname()
        if self._suspects.note(worker.rank, device):
            self._log.write("suspect", rank=worker.rank, device=device, host=host)
            way = "a restart" if self._settings.exclude_suspect else "--exclude-suspect"
            what = f"has failed twice on device {device} of {host}, which is suspect now"
            say(f"rank {worker.rank} {what}; {way} leaves it out.")
            why = f"rank {worker.rank} has failed twice on device {device}"
            self._reports.tell(self._settings.host_name, why, SUSPECT)

    def _failed(self, worker: Worker, exit_code: int, killed_by_agent: bool) -> None:
        local_rank = self._local_rank(worker)
        failures = self._killed if killed_by_agent else self._failures
        failures[local_rank] = ProcessFailure(
            local_rank=local_rank, pid=worker.pid, exitcode=exit_code, error_file=self.error_files[local_rank]
        )

    def _poll(self) -> RunProcsResult:
        """Wait until all workers have ended: nothing else can happen to a job on one node."""
        outcome = self.supervisor.result()
        if outcome is Outcome.INTERRUPTED:
            raise signal_exception(self.supervisor.interrupts[0])
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        if outcome is Outcome.SUCCEEDED:
            result.return_values = dict.fromkeys(range(self.nprocs))
        else:
            # Where all ranks hung, none has failed but those that were killed for it.
            result.failures = self._failures or self._killed or self._elsewhere()
        return result

    def _elsewhere(self) -> dict[int, ProcessFailure]:
        """What torch is told where this host's ranks had all succeeded when the job failed on another."""
        worker, file = self._workers[0], self.error_files[0]
        return {0: ProcessFailure(local_rank=0, pid=worker.pid, exitcode=-signal.SIGTERM, error_file=file)}

    def pids(self) -> dict[int, int]:
        return {local_rank: worker.pid for local_rank, worker in self._workers.items()}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if not self._open:
            return
        self._open = False
        if self._taking_in is not None:
            self._taking_in.stop()
        self.supervisor.stop(death_sig)
        self._stop_looking()
        if self._protection is not None:
            self._protection.stop()
        if self._messenger is not None:
            self._messenger.close()
        for worker in self._workers.values():
            worker.close()
        self._children.end_all()
        self._close_for_workers()

    def _close_for_workers(self) -> None:
        for one in (self._barrier, self._relay, self._resting_place):
            if one is not None:
                one.close()


def _hold(directory: Path, run: str, log: EventLog) -> None:
    try:
        directory_lock.hold(directory, run)
    except JitckptError as error:
        log.write("warning", text=str(error))


def signal_exception(signum: int) -> SignalException:
    """Return what torch's launcher ends with after a signal."""
    sigval = signal.Signals(signum)
    return SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
