"""The agent of `jitckpt run`: torchrun's own, except for who looks after the worker processes.

TorchElastic ends all workers the moment one fails. Here they are under a supervisor that lets the others save
first; everything else (rendezvous, the workers' environment, logs, restarts) stays torch's.
"""

import inspect
import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID as EXIT_BARRIER
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
    rendezvous_handler_registry,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils.store import _barrier_nonblocking
from torch.distributed.launcher import api as launcher

from jitckpt.agent import health, object_copies
from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.migration import going_back, lost_job
from jitckpt.agent.migration.going_back import MadeAgain, NotMadeAgain
from jitckpt.agent.migration.leaving import Departure
from jitckpt.agent.migration.move import Mover
from jitckpt.agent.migration.shelf import Shelf
from jitckpt.agent.migration.snapshots import Snapshots
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.migration.suspending import Suspending
from jitckpt.agent.object_copies import ObjectCopies, WantedObjects
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.spares import Spares
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.progress import ProgressTeller
from jitckpt.agent.protection import Protection
from jitckpt.agent.proxies.control import ControlSocket, Proxies
from jitckpt.agent.proxies.exchange import Settings as Exchange
from jitckpt.agent.proxies.state_transfer import Transfers
from jitckpt.agent.proxies.step_barrier import Messenger, StepBarrier
from jitckpt.agent.supervisor import Reports, Supervisor
from jitckpt.agent.taking_in import TakingIn
from jitckpt.bindings import clock
from jitckpt.bindings.criu import Criu
from jitckpt.console import say, show_size
from jitckpt.decisions import elastic, quorum
from jitckpt.decisions.elastic import Begun
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.decisions.recovery import SAME_ENDS, Outcome, brings_no_progress
from jitckpt.decisions.sources import listed
from jitckpt.decisions.step_tree import Place
from jitckpt.decisions.suspects import VARIABLE, NoDeviceError, Suspects, without
from jitckpt.errors import (
    CheckpointError,
    HostsError,
    HostsMissing,
    HostUnfit,
    JitckptError,
    NoProgress,
    NotNeeded,
    SaveError,
)
from jitckpt.events import EventLog
from jitckpt.faults import injection
from jitckpt.faults.injection import FaultSpec
from jitckpt.hosts import connections, fetch, rendezvous
from jitckpt.hosts.connections import PATIENCE, Arrived, Host, Hosts
from jitckpt.hosts.coordinated import CoordinatedRendezvous
from jitckpt.hosts.coordination import Coordination
from jitckpt.hosts.rendezvous_state import with_signature
from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.store_server import address_for, store_at, torchs_store
from jitckpt.hosts.stores import Apart, LastingRendezvous, StoreGone, watched
from jitckpt.ring import local_state, wishes
from jitckpt.ring.copies import ANSWER_SECONDS, Copier
from jitckpt.saves import directory_lock, folders, starts
from jitckpt.saves.layout import Identity, Kind
from jitckpt.saves.starts import Start
from jitckpt.system import descriptor_limit, descriptor_reserve
from jitckpt.system.disk_thread import waited_for
from jitckpt.system.resting_place import RestingPlace
from jitckpt.system.versions import versions
from jitckpt.wire import environment as variables
from jitckpt.wire import protocol
from jitckpt.wire.agents import WantSave
from jitckpt.wire.protocol import Message

HEARING_SECONDS = 0.5  # in which all hosts have heard what one says
SETTLED_STEPS = 3  # after a start's first, until a healthy training is ended to take in hosts
ROOM = 2  # times what the save before has taken, which has to be free for that
MEETING_PAUSE = 0.1  # seconds before the hosts meet again where that has failed


@dataclass(frozen=True)
class Settings:
    """What `jitckpt run` adds to torchrun's settings; times in seconds."""

    checkpoint_dir: Path | None
    save_deadline: float
    hang_timeout: float
    hang_floor: float  # 0: hang_timeout is not learned
    stall_timeout: float
    staging: int  # bytes
    device_environment: Mapping[str, str]
    warm_spares: int | None  # for each rank; None for one where memory allows
    warm_start: bool  # fork all workers from one process that has loaded torch, those of the first start too
    devices: tuple[str, ...]  # of this host, as in CUDA_VISIBLE_DEVICES
    exclude_suspect: bool
    exchange_broken: bool  # in transparent mode: devices that no new server cures, for others of this host
    move_broken: bool  # the worker of such a rank is made anew, too
    suspendable: bool  # in transparent mode, on one host: `jitckpt suspend`
    snapshot_every: float | None  # the same: to go back to if a worker dies
    criu: Criu | None  # by which that is done
    health_check: str | None  # a command that has to succeed here before each start
    max_standby: int | None  # hosts beyond those that train; None: any number
    stands_by: bool  # takes no part until a host's devices are broken
    temporary: Path | None  # a folder of the launcher's that goes with it
    faults: tuple[FaultSpec, ...]
    host_timeout: float
    recovery_deadline: float | None  # for each order of a transparent recovery; None: user-level mode
    state_on_device: bool  # in transparent mode
    fixed_place: int | None  # of this host among all (--node-rank)
    silent_hosts_are_dead: bool  # the user knows that none is only cut off
    run: str  # a name that no other launcher's has
    secret: bytes | None  # of this job, for agents on several hosts; None: one is made
    memory: Wanted | None = None  # of the memory tier
    coordination: Coordination | None = None  # in the place of a store of torch's
    objects: WantedObjects | None = None  # what is saved is copied there
    wait: float | None = None  # for missing hosts, before the job goes on with fewer; None: it never does


def launch(
    settings: Settings, log: EventLog, config: launcher.LaunchConfig, command: str, arguments: list[str]
) -> None:
    """Run the job to its end, as torchrun does.

    Raises ChildFailedError if it failed, SignalException if it was ended by a signal.
    """
    descriptor_limit.raise_limit()
    descriptor_reserve.fill()
    host, _ = parse_rendezvous_endpoint(config.rdzv_endpoint, rendezvous.DEFAULT_PORT)
    store = partial(torchs_store, address_for(host, alone=config.max_nodes == 1))
    with (
        _replaced(launcher, "LocalElasticAgent", partial(Agent, settings, log, config)),
        # Torch's own listens at every address of the machine.
        _replaced(c10d_rendezvous_backend, "TCPStore", store),
        _replaced(static_tcp_rendezvous, "TCPStore", store),
        # Torch's own does not know an address of this host that its name does not lead to.
        _replaced(c10d_rendezvous_backend, "_matches_machine_hostname", rendezvous.is_own_address),
        _coordinated(settings, config),
    ):
        launcher.elastic_launch(config, command)(*arguments)


@contextmanager
def _coordinated(settings: Settings, config: launcher.LaunchConfig) -> Iterator[None]:
    """Let the hosts meet by a coordination service, if one is wanted."""
    if settings.coordination is None:
        yield
        return
    handler = CoordinatedRendezvous(
        settings.coordination,
        config.run_id,
        hosts=config.max_nodes,
        timeout=rendezvous.join_timeout(config),
        silence=settings.host_timeout,
        address=config.local_addr or "",
        fixed_place=settings.fixed_place,
        secret=settings.secret,
        silent_hosts_are_dead=settings.silent_hosts_are_dead,
        max_standby=settings.max_standby,
    )
    rendezvous_handler_registry.register(config.rdzv_backend, lambda _: handler)
    try:
        yield
    finally:
        handler.leave()


class Agent(LocalElasticAgent):
    """Starts the workers, and anew after a failure, until they succeed or no restart is left."""

    def __init__(
        self, settings: Settings, log: EventLog, config: launcher.LaunchConfig, **torch_arguments: Any
    ) -> None:
        super().__init__(**torch_arguments)
        self._config = config
        self._settings = settings
        self._log = log
        self._lasting: LastingRendezvous | CoordinatedRendezvous | None = None
        spec = self._worker_group.spec
        if isinstance(spec.rdzv_handler, CoordinatedRendezvous):
            self._lasting = spec.rdzv_handler
            self._lasting.newest_step = self._newest_saved
            log.superseded = starts.is_superseded
        elif config.max_nodes > 1:
            self._lasting = LastingRendezvous(
                config,
                spec.rdzv_handler,
                settings.host_timeout,
                settings.fixed_place,
                settings.secret,
                max_standby=settings.max_standby,
            )
            spec.rdzv_handler = self._lasting
        else:
            own = secrets.token_bytes() if config.rdzv_endpoint.endswith(":0") else None  # nobody else comes
            signature = Signature(config.run_id, settings.secret or own)
            spec.rdzv_handler = with_signature(spec.rdzv_handler, signature)
        self._armed = [fault.with_phase() for fault in settings.faults]
        several = config.max_nodes > 1
        self._run = f"{config.rdzv_endpoint}/{config.run_id}" if several else settings.run
        self._first_directories: dict[str, str] = {}  # see environment.FIRST_DIRECTORIES
        self._spares = Spares(settings.warm_spares)
        self._suspects = Suspects()
        self._devices = list(settings.devices)
        self._signals: list[int] = []
        self._starting = False
        self._processes: WorkerProcesses | None = None
        self._last: Supervisor | None = None  # of the newest start
        self._kept_in_memory = 0  # by the newest start before it that had a step there as it failed
        self._worker_store: Any = None  # torch's TCPStore
        self._hosts: Hosts | None = None
        self._ends: list[tuple[int, str]] = []  # of the starts so far
        self._memory: MemoryTier | None = None
        self._objects: ObjectCopies | None = None
        self._shelf: Shelf | None = None
        self._goes_on_later = False  # the job was ended from outside
        self._meetings = 0  # in this round of the rendezvous, after the first
        self._free_restarts = 0  # that are not counted, as hosts were lost or have come
        self._begun: list[Begun] = []  # the starts on several hosts
        self._takes_in = False  # the next start is made to take in hosts
        self._has_told_why = False  # the first start does not begin

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run the job with the signals that end it in our hands."""
        names = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(",")
        numbers = [signal.Signals[name.strip()] for name in names]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        if signal.SIGUSR2 not in before:
            before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._on_notice)
        self._shelf = self._make_shelf()
        mark = "" if self._shelf is None else self._shelf.mark
        self._children = Children(self._settings.save_deadline, self._settings.temporary, mark)
        try:
            self._memory = self._memory_tier()
            result: RunResult = super().run(*args, **kwargs)
            self._tell_what_never_happened()
            if result.is_failed():
                self._write_what_memory_has()
            return result
        except (SignalException, HostsError):
            self._write_what_memory_has()
            self._goes_on_later = True
            raise
        except HostUnfit:
            self._tell_what_goes()
            raise
        finally:
            self._spares.close()
            self._children.close()
            self._close_shelf()
            if self._objects is not None:
                self._objects.finish()
            if self._hosts is not None:
                self._hosts.close()
            if self._memory is not None:
                self._memory.close(end=True)
            if self._lasting is not None:
                self._lasting.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _make_shelf(self) -> Shelf | None:
        """Return where snapshots are, with those of a launcher of this very job that was lost."""
        settings, spec = self._settings, self._worker_group.spec
        if settings.snapshot_every is None:
            return None
        assert settings.checkpoint_dir is not None
        own = lost_job.whose(str(spec.entrypoint), spec.args, spec.local_world_size, settings.devices)
        shelf = Shelf(settings.checkpoint_dir, own)
        for snapshot, sentence in shelf.refused:
            self._log.write("snapshot_refused", step=snapshot.step, text=sentence)
            say(f"the snapshot after step {snapshot.step} in {snapshot.path} is not gone on from: {sentence}")
        return shelf

    def _close_shelf(self) -> None:
        if self._shelf is None:
            return
        self._shelf.settle()
        if self._goes_on_later and (newest := self._shelf.newest) is not None:
            say(f"the snapshot after step {newest.step} stays: the same command goes on from it.")
        else:
            self._shelf.forget()

    def _memory_tier(self) -> MemoryTier | None:
        if self._settings.memory is None:
            return None
        spec = self._worker_group.spec
        named = [os.getcwd(), str(self._settings.checkpoint_dir), spec.entrypoint, *map(str, spec.args)]
        return MemoryTier(self._settings.memory, json.dumps(named), self._log)

    def _write_what_memory_has(self) -> None:
        """The job ends without success: what no file has yet is not to end with it."""
        if self._memory is None or self._last is None or not self._directory():
            return
        step = self._last.kept_in_memory or self._kept_in_memory
        if step > self._newest_saved():
            own = {worker.global_rank for worker in self._worker_group.workers}
            of_lost, nowhere = self._last.ranks_of_lost_hosts
            by = f"memory{0 if self._hosts is None else self._hosts.index}"
            if (
                self._hosts is not None
                and self._settings.memory is not None
                and self._settings.memory.sharded
            ):
                found = self._memory.collect(self._hosts, step)
                of_lost, nowhere = of_lost | (nowhere & found), nowhere - found
            self._memory.write_saves(Path(self._directory()), own | of_lost, step, nowhere, by)

    def _tell_what_goes(self) -> None:
        """The job goes on without this host, and what that has in memory ends here."""
        last, hosts = self._last, self._hosts
        if self._memory is None or last is None or hosts is None or not last.kept_in_memory:
            return
        ranks = listed([worker.global_rank for worker in self._worker_group.workers])
        what = f"the state of {ranks} after step {last.kept_in_memory}"
        if last.stays_without(hosts.index):
            say(f"{what}, which this host's memory has, is in other hosts', too: they go on from there.")
            return
        text = (
            f"{what} is in this host's memory alone, and ends with it: the others go on from files, or from "
            "the beginning"
        )
        self._log.write("warning", text=text)
        say(f"{text}.")

    def _newest_saved(self) -> int:
        """Return the newest step of which this agent knows a save, 0 for none."""
        return max((event["step"] for event in self._log.events if event["event"] == "saved"), default=0)

    def _tell_what_never_happened(self) -> None:
        """Say which rehearsed failures of this host's ranks never came: the rehearsal has shown nothing."""
        own = {worker.global_rank for worker in self._worker_group.workers}
        for fault in self._armed:
            if fault.rank in own:
                self._log.write("fault_never_happened", rank=fault.rank, fault=str(fault))
                why = f"the job ended before step {fault.step}, or the rank never came to its {fault.phase}"
                say(f"the rehearsed failure {str(fault)!r} never happened: {why}.")

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signals.append(signum)
        if self._processes is not None:
            self._processes.supervisor.interrupt(signum)
        elif not self._starting:
            raise _signal_exception(signum)

    def _on_notice(self, _signum: int, _frame: FrameType | None) -> None:
        """Preemption is near: have the state saved beside the training."""
        if self._processes is not None:
            # Not here: what a signal handler interrupts may hold the log's lock.
            threading.Thread(target=self._processes.want_save, daemon=True).start()

    def _rendezvous(self, worker_group: Any) -> None:
        processes, self._processes = self._processes, None  # a signal ends the agent at once while it waits
        spec = worker_group.spec
        self._check_health(worker_group, again=processes is not None)
        if processes is not None and self._config.max_nodes == 1 and spec.rdzv_handler.use_agent_store:
            return  # a host alone knows its ranks; they get a fresh store when they are started
        again = "Start the same command on all hosts again; the job goes on from its newest save."
        timeout = rendezvous.join_timeout(self._config)
        before = self._hosts
        try:
            if before is not None and processes is not None:
                gone, leaving = processes.supervisor.gone_hosts, processes.supervisor.leaving
                assert self._lasting is not None
                self._lasting.failed(before, leaving, self._settings.silent_hosts_are_dead)
                same = not gone and not processes.supervisor.takes_in
                if same and not self._lasting.meets_at_once and self._meet_again(worker_group):
                    return
                self._takes_in = processes.supervisor.takes_in
                if isinstance(self._lasting, LastingRendezvous):
                    self._lasting.is_taking_in = self._takes_in and not gone
                if gone and self._log.leading:
                    places = ", ".join(map(before.name, sorted(gone)))
                    wait, left = self._settings.wait, len(before.all) - len(gone)
                    most = timeout if wait is None or left < self._config.min_nodes else wait
                    say(f"waiting for others in the place of {places}, for at most {most:g} s.")
            deadline = time.monotonic() + timeout
            while not self._come_together(worker_group):
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError("hosts or stores were lost again and again")
        except RendezvousTimeoutError as error:
            count = self._config.min_nodes
            raise HostsMissing(f"{count} hosts did not come together in {timeout:g} s. {again}") from error
        except (RendezvousError, DistError) as error:
            raise HostsError(
                f"The hosts did not come together ({_in_words(error.__cause__ or error)}). {again}"
            ) from error
        finally:
            if before is not None and self._hosts is not before:
                before.close()

    def _check_health(self, worker_group: Any, again: bool) -> None:
        """Have no part in a start for which this host is not well.

        Raises HostUnfit at a restart, which others may do without this host; else waits until it is well.
        """
        command = self._settings.health_check
        if command is None:
            return
        if not again or self._config.max_nodes == 1:
            health.wait_until_well(command, rendezvous.join_timeout(self._config))
        elif why := health.why_unfit(command):
            assert self._lasting is not None
            self._lasting.decline(
                worker_group.store, f"jitckpt/{self._meetings + 1}", worker_group.group_rank
            )
            raise HostUnfit(f"the job goes on without this host: {why}.")

    def _come_together(self, worker_group: Any) -> bool:
        """Meet the other hosts in torch's rendezvous; return whether none, nor its store, was lost there."""
        try:
            spec = worker_group.spec
            if isinstance(self._lasting, CoordinatedRendezvous) and self._directory():
                self._lasting.newest_start = self._newest_start_known()
            self._torchs_rendezvous(worker_group)
            if worker_group.group_world_size > 1:
                self._meetings = 0
                self._meet(worker_group)
            elif spec.rdzv_handler.use_agent_store and spec.rdzv_handler.get_backend() != "static":
                worker_group.master_addr = spec.local_addr  # and not what somebody has put into torch's store
                self._give_fresh_store(worker_group)
        except (DistError, StoreGone, Apart) as lost:
            if self._config.max_nodes == 1:
                raise HostsError(
                    f"The job's store could not be started: {lost}. If the port is in use, give another one "
                    "with --master-port, or let any free one be taken with --standalone."
                ) from lost
            self._log.write("warning", text=f"the hosts have to meet once more: {lost}")
            time.sleep(MEETING_PAUSE)
            return False
        return True

    def _torchs_rendezvous(self, worker_group: Any) -> None:
        """Torch reads more from the store than is signed: nothing that is run, but it may be nonsense."""
        try:
            super()._rendezvous(worker_group)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HostsError(
                f"What torch found in the rendezvous' store makes no sense: {error!r:.200}. {rendezvous.SAME}"
            ) from error

    def _assign_worker_ranks(self, *arguments: Any, **named: Any) -> Any:
        assign = partial(super()._assign_worker_ranks, *arguments, **named)
        return assign() if self._lasting is None else self._lasting.guarded(assign)

    def _exit_barrier(self) -> None:
        barrier: Callable[[], None] = super()._exit_barrier
        hosts, lasting = self._hosts, self._lasting
        if lasting is None or hosts is None:
            barrier()
            return

        def look() -> None:
            if lost := sorted(hosts.lost):
                raise Apart(f"{hosts.name(lost[0])} is lost")

        # All ranks have succeeded. A host with the store that is gone waits for nobody, and one that is lost
        # just now does not come: torch would wait for it for 300 s.
        with suppress(StoreGone, Apart):
            watched(partial(lasting.guarded, barrier), look)()

    def _meet_again(self, worker_group: Any) -> bool:
        """Meet the same hosts in the same places, without torch's rendezvous, which takes seconds.

        Returns whether it could be done; where hosts differ in whether all are there, all go the long way.
        """
        self._meetings += 1
        try:
            self._meet(worker_group)
        except (DistError, StoreGone, Apart) as error:
            self._log.write("warning", text=f"not all hosts came back: {error}")
            return False
        return True

    def _meet(self, worker_group: Any) -> None:
        """Connect to the agents on the other hosts, count restarts as they do, give the workers a store."""
        assert self._lasting is not None
        spec, index, lasting = worker_group.spec, worker_group.group_rank, self._lasting
        pasts = lasting.pasts(index)
        listener = connections.listen(spec.local_addr)
        self._worker_store = store_at(spec.local_addr) if index == 0 else None
        memory = self._settings.memory
        for_memory = connections.listen(memory.address) if memory is not None and memory.address else None
        own = Host(
            address=spec.local_addr,
            port=listener.getsockname()[1],
            ranks=tuple(worker.global_rank for worker in worker_group.workers),
            restarts=spec.max_restarts - self._remaining_restarts,
            directory=self._directory(),
            job=self._job(),
            worker_store=0 if self._worker_store is None else self._worker_store.port,
            reserve=lasting.reserve(),
            has_store=lasting.has_store,
            pasts=pasts,
            agent=lasting.agent,
            stuck=self._stuck(),
            domains=() if memory is None else memory.domains,
            memory=0 if self._memory is None else max(1, self._memory.limit >> 20),
            memory_address="" if memory is None else memory.address,
            memory_port=0 if for_memory is None else for_memory.getsockname()[1],
            starts=self._starts_known(),
            free=self._free_restarts,
        )
        store, prefix = worker_group.store, f"jitckpt/{self._meetings}"
        place = (index, worker_group.group_world_size)
        exchange = partial(rendezvous.exchange, store, prefix, place, own, lasting.signature)
        try:
            met, secret = lasting.guarded(exchange)
            self._check_progress(met)
            self._check_first_start(met)
            _check_quorum(met)
            lasting.agree(met, index, store, prefix)
        except BaseException:
            listener.close()
            if for_memory is not None:
                for_memory.close()
            raise
        # Who is new goes by what the others say: the same script uses the same directory.
        told = next((host.directory for host in met if host.directory), "")
        directory = Path(own.directory or told) if told else None
        timeout = self._settings.host_timeout
        connected = Hosts(index, met, listener, secret, timeout, memory_listener=for_memory)
        connected.answers[fetch.VISIT] = partial(fetch.serve, directory)
        if self._memory is not None:
            self._memory.answer_others(connected)
        connected.connect(connections.PATIENCE * timeout)
        try:
            lasting.begin(connected, self._settings.silent_hosts_are_dead)
        except Apart:
            connected.close()
            raise
        self._hosts = connected
        worker_group.master_addr, worker_group.master_port = met[0].address, met[0].worker_store
        self._log.leading = index == 0
        self._count(met, spec)
        self._note_start(directory, met)
        if directory is not None:
            self._give_job(directory, met)
            self._fetch(self._hosts, directory)
        if self._memory is not None:
            self._memory.gather(self._hosts)

    def _check_first_start(self, met: Sequence[Host]) -> None:
        """Have the first start wait for all hosts. Raises Apart if some are missing.

        None of these knows of the job: those that do may go on elsewhere.
        """
        lacking = self._config.max_nodes - len(met)
        if lacking and not any(host.pasts for host in met) and not self._settings.silent_hosts_are_dead:
            why = (
                f"{len(met)} hosts have come, and the first start needs all {self._config.max_nodes}, as "
                "hosts that are not here might go on with a start that these know nothing of; with "
                "--silent-hosts dead it does not"
            )
            if not self._has_told_why:
                self._has_told_why = True
                say(f"{why}.")
            raise Apart(why)

    def _count(self, met: Sequence[Host], spec: Any) -> None:
        """Count restarts, and hosts, as all of these do."""
        self._free_restarts = max(host.free for host in met)
        spec.max_restarts = self._config.max_restarts + self._free_restarts
        self._remaining_restarts = spec.max_restarts - max(host.restarts for host in met)
        self._begun.append(Begun(time.monotonic(), len(met), self._takes_in))
        self._takes_in = False
        self._tell_how_many(len(met))

    def _tell_how_many(self, hosts: int) -> None:
        """Say it where the job goes on with another number of hosts than before."""
        most, before = self._config.max_nodes, self._begun[-2].hosts if len(self._begun) > 1 else 0
        if self._settings.wait is None or hosts == before or (hosts == most and not before):
            return
        self._log.write("hosts", hosts=hosts, of=most)
        if not self._log.leading:
            return
        if hosts < most:
            pause = elastic.pause(self._begun, self._settings.wait)
            say(
                f"the job goes on with {hosts} of {most} hosts. Others are taken in at the end of a step "
                f"when they come, not before {pause:g} s from now."
            )
        else:
            say(f"the job goes on with all {most} hosts.")

    def _starts_known(self) -> tuple[tuple[int, int], ...]:
        """Return the starts in the checkpoint directory, each with the step that it has gone on from."""
        directory = self._directory()
        if not directory or not isinstance(self._lasting, CoordinatedRendezvous):
            return ()
        return tuple(sorted(starts.read(Path(directory)).went_on_from.items()))

    def _newest_start_known(self) -> int:
        """Return the newest start that the directory knows of, or where it is new the object store."""
        newest = starts.read(Path(self._directory())).newest
        if newest == 0 and self._settings.objects is not None:
            newest = waited_for(partial(object_copies.newest_start, self._settings.objects))
        return newest

    def _own_start(self) -> Start:
        """Return the start that this agent has a part in, as far as a coordination service numbers them."""
        if not isinstance(self._lasting, CoordinatedRendezvous) or self._lasting.start is None:
            return Start()
        return Start(self._lasting.start.number, self._lasting.fence)

    def _note_start(self, directory: Path | None, met: Sequence[Host] = ()) -> None:
        """Fence off those of earlier starts. Where the directory is not known yet, the ranks do it."""
        start = self._own_start()
        self._log.start = start.number
        if directory is None or start.number == 0:
            return
        try:
            starts.note_of_others(directory, (one for host in met for one in host.starts))
            starts.note_begun(directory, start)
        except (OSError, SaveError) as error:
            raise HostsError(f"Start {start.number} can't begin: {error}") from error

    def _directory(self) -> str:
        """Return the checkpoint directory, as far as it is known."""
        registered = (event["checkpoint_dir"] for event in self._log.events if event["event"] == "registered")
        return str(self._settings.checkpoint_dir or next(registered, ""))

    def _job(self) -> str:
        """Return whose the checkpoint directory is; "" if nobody has used it, or it can't be read."""
        directory = self._directory()
        try:
            return (directory and folders.read_job(Path(directory))) or ""
        except (CheckpointError, OSError):
            return ""  # the ranks say what is wrong with it

    def _give_job(self, directory: Path, met: Sequence[Host]) -> None:
        """Have the directory of a host that is new be this job's, also where it is the first rank's."""
        job = next((host.job for host in met if host.job), "")
        try:
            if job:
                folders.open_directory(directory, job)
        except (CheckpointError, OSError) as error:
            say(f"{directory} can't be used yet: {error}")  # the ranks say so, too, and end if it stays so

    def _fetch(self, met: Hosts, directory: Path) -> None:
        """Fetch the saves that this host's ranks need and only other hosts have."""
        try:
            fetched = waited_for(partial(fetch.fetch, met, directory, self._log.start))
        except (JitckptError, OSError) as error:
            # If a host is gone, that is noticed; ranks that would not go on from one step refuse to.
            say(f"{met.name(met.index)} could not fetch from the others what it lacks: {error}")
            return
        if fetched is not None:
            self._log.write("fetched", **asdict(fetched))
            size = show_size(fetched.bytes)
            say(
                f"{met.name(met.index)} has fetched step {fetched.step} from the others, in {fetched.saves} "
                f"save{'s' if fetched.saves > 1 else ''}: {size} in {fetched.seconds:.2f} s."
            )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._signals:
            raise _signal_exception(self._signals[0])
        spec = worker_group.spec
        if self._hosts is None:
            self._note_start(Path(self._directory()) if self._directory() else None)
        self._log.restart = spec.max_restarts - self._remaining_restarts
        self._log.write(
            "restart" if self._log.restart else "job_started",
            world_size=worker_group.workers[0].world_size,
            max_restarts=spec.max_restarts,
            versions=versions(),
        )
        if self._log.restart and spec.rdzv_handler.use_agent_store and self._hosts is None:
            self._give_fresh_store(worker_group)
        self._use_objects({worker.global_rank for worker in worker_group.workers})
        with _replaced(local_elastic_agent, "start_processes", self._start_processes):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _use_objects(self, ranks: set[int]) -> None:
        """Before the ranks start: have what they lack come from the object store, and all be copied there."""
        wanted, directory = self._settings.objects, self._settings.checkpoint_dir
        if wanted is None or directory is None:
            return
        copies = self._objects
        if copies is None or (copies.some and object_copies.lacks_all(directory)):
            waited_for(partial(object_copies.fetch, wanted, directory, ranks, self._log, self._own_start()))
        if copies is not None and copies.ranks != ranks:
            copies.close()
            copies = None
        if copies is None:
            copies = self._objects = ObjectCopies(wanted, directory, ranks, self._log)
        copies.begin(self._own_start())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Tell how the workers are; no restart is left where it has no use, or too few devices."""
        result: RunResult = super()._monitor_workers(worker_group)
        if self._processes is not None and self._processes.has_left:
            assert self._lasting is not None
            group: Any = worker_group
            # The others wait for all agents in the end: for this one they need not.
            with suppress(StoreGone, DistError):
                arrive = partial(_barrier_nonblocking, group.store, group.group_world_size, EXIT_BARRIER)
                self._lasting.guarded(arrive)
            self._lasting.leave()
            raise NotNeeded("This host's ranks go on on another one; it is not needed any more.")
        if not result.is_failed():
            return result
        assert self._processes is not None
        if self._processes.supervisor.result() is Outcome.FAILED:
            self._remaining_restarts = 0
        if not self._processes.supervisor.takes_in:
            self._ends.append(self._processes.supervisor.end)
        if self._processes.supervisor.is_free and self._processes.supervisor.result() is Outcome.RESTART:
            self._free_restarts += 1
            worker_group.spec.max_restarts += 1
            self._remaining_restarts += 1
        # Several hosts tell each other as they meet: one that stayed away would keep the others waiting.
        if self._hosts is None and self._remaining_restarts > 0 and (text := self._stuck()):
            self._remaining_restarts = 0
            self._log.write("no_progress", text=text)
            if self._log.leading:
                say(f"the job ends here, with no restart: {text}.")
        if self._remaining_restarts > 0:
            self._leave_out_devices(self._processes.broken_devices, worker_group.spec.local_world_size)
        return result

    def _stuck(self) -> str:
        """Return how the last starts have ended, if that was alike and without progress; else nothing."""
        if not brings_no_progress(self._ends):
            return ""
        step, failure = self._ends[-1]
        return f"{SAME_ENDS} starts have come to step {step} and failed alike ({failure})"

    def _check_progress(self, met: Sequence[Host]) -> None:
        """End the job on all hosts at once if one of them has seen it fail again and again."""
        text = next((host.stuck for host in met if host.stuck), "")
        if text:
            self._log.write("no_progress", text=text)
            raise NoProgress(f"The job ends here, with no restart: {text}.")

    def _who_stands_by(self) -> list[Standby]:
        # At a coordination service nobody stands by.
        return self._lasting.standbys() if isinstance(self._lasting, LastingRendezvous) else []

    def _taking_in(
        self, hindrance: Callable[[], str | None], take_in: Callable[[str], None]
    ) -> TakingIn | None:
        """Return what looks who waits; None where no host is missing, or another host looks."""
        wait, lasting = self._settings.wait, self._lasting
        if wait is None or self._hosts is None or self._hosts.index != 0:
            return None
        if len(self._hosts.all) == self._config.max_nodes or not isinstance(lasting, LastingRendezvous):
            return None
        return TakingIn(
            lasting.waiting,
            self._begun,
            hosts=self._config.max_nodes,
            wait=wait,
            hindrance=hindrance,
            take_in=take_in,
        )

    def _facts(self) -> dict[str, Any]:
        group: Any = self._worker_group
        if self._hosts is None:
            return {}
        return {
            "run": self._run,
            "restart": self._log.restart,
            "workers_store": [group.master_addr, group.master_port],
        }

    def _leave_out_devices(self, broken: frozenset[str], ranks: int) -> None:
        """Have the next start do without broken devices if others are free, and without suspects anyway."""
        suspects = self._suspects.devices if self._settings.exclude_suspect else frozenset()
        try:
            try:
                devices = without(self._devices, suspects | broken, ranks)
            except NoDeviceError:
                devices = without(self._devices, suspects, ranks)
        except NoDeviceError as error:
            text = f"the job can't go on here: {error} (--exclude-suspect)."
            self._log.write("no_device", text=text)
            say(text)
            self._remaining_restarts = 0
            return
        if devices != self._devices:
            self._devices = devices
            self._log.write("devices", devices=devices)
            say(f"the ranks of this host get devices {', '.join(devices[:ranks])}.")

    def _give_fresh_store(self, worker_group: Any) -> None:
        # Torch keeps one store over all restarts; new workers would read in it what the old ones wrote, such
        # as NCCL's unique ids and the addresses of processes that are gone.
        self._worker_store = store_at(worker_group.master_addr)
        worker_group.master_port = self._worker_store.port

    def _start_processes(self, *, start_method: str, **torch_arguments: Any) -> "WorkerProcesses":
        del start_method  # all workers are commands here
        self._starting = True
        try:
            processes = WorkerProcesses(
                self._settings,
                self._log,
                self._armed,
                self._spares,
                self._first_directories,
                run=self._run,
                children=self._children,
                suspects=self._suspects,
                devices=self._devices,
                restarts_left=self._remaining_restarts,
                mistakes_before=frozenset() if self._last is None else self._last.mistakes,
                hosts=self._hosts,
                memory=self._memory,
                standbys=self._who_stands_by,
                taking_in=self._taking_in,
                facts=self._facts(),
                started=self._own_start(),
                shelf=self._shelf,
                made_again=self._go_back(torch_arguments["envs"][0]),
                **torch_arguments,
            )
            processes.start()
            if self._last is not None:
                self._kept_in_memory = self._last.kept_in_memory or self._kept_in_memory
            self._processes, self._last = processes, processes.supervisor
            for signum in self._signals:  # that came while they were being started
                processes.supervisor.interrupt(signum)
        finally:
            self._starting = False
        return processes

    def _go_back(self, environment: Mapping[str, str]) -> MadeAgain | None:
        """Make all ranks again from the newest snapshot, if there is one, before another start."""
        shelf, found = self._shelf, self._settings.criu
        if shelf is None or found is None:
            return None
        shelf.settle()
        armed = set(map(str, self._armed))
        fired = [text for one in self._settings.faults if (text := str(one.with_phase())) not in armed]
        store = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        while (snapshot := shelf.newest) is not None:
            try:
                again = going_back.made_again(found, snapshot, store, fired, self._children.mark)
            except NotMadeAgain as error:
                self._log.write("not_gone_back", step=snapshot.step, text=str(error))
                shelf.pass_over(snapshot)
                older = shelf.newest
                then = "The job begins anew." if older is None else f"That after step {older.step} is tried."
                say(f"the snapshot after step {snapshot.step} is of no use: {error} {then}")
            else:
                if self._last is None:  # of a launcher that was lost
                    made = datetime.fromtimestamp(again.plan["made"]).isoformat(sep=" ", timespec="seconds")
                    say(f"goes on from the snapshot of step {snapshot.step}, made at {made}.")
                return again
        return None


def _nobody(hindrance: Callable[[], str | None], take_in: Callable[[str], None]) -> None:
    """Nobody is taken in."""
    del hindrance, take_in


class WorkerProcesses(PContext):
    """One start of all workers: what torch's agent starts, asks for its result and closes."""

    supervisor: Supervisor

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
        devices: Sequence[str],
        restarts_left: int,
        mistakes_before: frozenset[str],
        hosts: Hosts | None,
        memory: MemoryTier | None = None,
        standbys: Callable[[], list[Standby]] = list,
        taking_in: Callable[[Callable[[], str | None], Callable[[str], None]], TakingIn | None] = _nobody,
        facts: Mapping[str, Any] = {},
        started: Start = Start(),  # noqa: B008
        shelf: Shelf | None = None,
        made_again: MadeAgain | None = None,
        numa_options: Any = None,
        **torch_arguments: Any,
    ) -> None:
        """standbys: who stands by now. facts: what one of them needs to know of the job.

        shelf: for snapshots. made_again: the workers, which come from one.
        """
        super().__init__(**torch_arguments)
        self._settings = settings
        self._log = log
        self._armed = armed
        self._spares = spares
        self._first_directories = first_directories
        self._run = run
        self._children = children
        self._suspects = suspects
        self._devices = devices
        self._restarts_left = restarts_left
        self._mistakes_before = mistakes_before
        self._hosts = hosts
        self._memory = memory
        self._memories: dict[int, int] = {}  # of this host's ranks
        self._protection: Protection | None = None
        self._numa_options = numa_options
        self._workers: dict[int, Worker] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._killed: dict[int, ProcessFailure] = {}
        self._commands: dict[int, tuple[str, ...]] = {}
        self._environments: dict[int, dict[str, str]] = {}
        self._waiting_for_first_step = set(range(self.nprocs))
        self._saves_itself = False
        self._open = False
        self._control: ControlSocket | None = None
        self._barrier: StepBarrier | None = None
        self._messenger: Messenger | None = None
        self._progress: ProgressTeller | None = None
        self._device_proxies: Proxies | None = None
        self._mover: Mover | None = None
        self._relay: StoreRelay | None = None
        self._resting_place: RestingPlace | None = None
        self._standbys, self._facts, self._started = standbys, facts, started
        self._make_taking_in = taking_in
        self._first_step = 0  # of this start
        self._taking_in: TakingIn | None = None
        # Where this host comes in the place of another, what that has known.
        self._said_before: Sequence[Arrived] = ()
        self._known_place: Place | None = None
        self._server_variables: Callable[[int], Mapping[str, str]] = lambda rank: {}
        self._shelf, self._made_again = shelf, made_again

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
        """Whether this host's ranks go on on another one."""
        return self._device_proxies is not None and self._device_proxies.moved

    def want_save(self) -> None:
        """Ask all workers to save after one step, and to go on."""
        if self._saves_itself:
            say("SIGUSR2: nothing is saved: a save function of the job's own can't run beside the training.")
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
            say("SIGUSR2: a rank has made no step yet, so there is nothing to save.")
            return
        if self._hosts is not None:
            self._hosts.broadcast(WantSave(step))
        self._log.write("save_wanted", step=step)
        say(f"SIGUSR2: the state after step {step} will be saved; the training goes on.")

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
        except BaseException:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
                worker.reap()
                worker.close()
            self._children.end_all()
            if self._control is not None:
                self._control.close()
            if self._barrier is not None:
                self._barrier.close()
            if self._relay is not None:
                self._relay.close()
            if self._resting_place is not None:
                self._resting_place.close()
            raise
        workers = list(self._workers.values())
        self._copier = self._copier_of_rings()
        if self._memory is not None:
            self._protection = Protection(self._memory, self._memories, self._hosts, self._log)
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
        self.supervisor.start()
        self._taking_in = self._make_taking_in(self._hinders_a_save, self.supervisor.take_in)
        if self._taking_in is not None:
            self._taking_in.start()
        host = 0 if self._hosts is None else self._hosts.index
        self._progress = ProgressTeller({w.rank: w.ring_fd for w in workers}, self._log, host)
        self._progress.start()
        if self._copier is not None:
            self._copier.start()
        self._open = True

    def _proxies(self) -> Proxies | None:
        deadline = self._settings.recovery_deadline
        if self._control is None or deadline is None:
            return None
        # A worker leads a session of its own; it may be a shell in which the training runs.
        sessions = {worker.rank: worker.pid for worker in self._workers.values()}
        transfers = None
        if self._barrier is not None and self._hosts is not None:
            self._messenger, transfers = (
                Messenger(self._barrier, self._hosts, self._known_place),
                Transfers(self._hosts),
            )
        exchange = None
        self._mover = self._make_mover()
        if self._settings.exchange_broken:
            moves = self._mover if self._settings.move_broken else None
            exchange = Exchange(
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
            deadline=deadline,
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

    def _suspension(self) -> Suspending | Snapshots | None:
        if self._shelf is not None and self._mover is not None and self._resting_place is not None:
            assert self._settings.snapshot_every is not None
            return Snapshots(
                self._mover,
                [worker.rank for worker in self._workers.values()],
                self._shelf,
                self._log,
                every=self._settings.snapshot_every,
                say=say,
                place=self._resting_place,
                barrier=self._barrier,
                gone_back_to=None if self._made_again is None else self._made_again.step,
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
        secret = self._settings.secret
        if self._mover is None or self._hosts is None or secret is None or not self._settings.move_broken:
            return {}
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
        )

        def can_leave() -> bool:
            registered = any(event["event"] == "registered" for event in self._log.events)
            return not registered and departure.is_possible()

        return {"can_leave": can_leave, "leave": departure.leave}

    def _make_mover(self) -> Mover | None:
        if self._settings.criu is None or self._relay is None:
            return None
        shared = {} if self._barrier is None else {"jitckpt-steps": self._barrier.file}
        if self._resting_place is not None:
            shared["jitckpt-rest"] = self._resting_place.file
        workers = {worker.rank: worker for worker in self._workers.values()}
        return Mover(self._settings.criu, workers, self._log, say, shared=shared, relay=self._relay)

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

    def _heard(self, worker: Worker, message: Message) -> None:
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
            raise _signal_exception(self.supervisor.interrupts[0])
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
        if self._progress is not None:
            self._progress.stop()
        if self._protection is not None:
            self._protection.stop()
        if self._messenger is not None:
            self._messenger.close()
        if self._copier is not None:
            self._copier.stop()
        for worker in self._workers.values():
            worker.close()
        self._children.end_all()
        if self._barrier is not None:
            self._barrier.close()
        if self._relay is not None:
            self._relay.close()
        if self._resting_place is not None:
            self._resting_place.close()


def _check_quorum(met: Sequence[Host]) -> None:
    """Refuse to go on where others, who can't be seen, may go on without these."""
    pasts = [past for host in met for past in host.pasts]
    if few := quorum.missing(pasts, {host.agent for host in met}):
        raise HostsMissing(
            f"Only {few[0]} of {few[1]} hosts that may be alive have come together: the others may go on "
            "without them, so these end. The same command on all hosts goes on from the newest save."
        )


def _hold(directory: Path, run: str, log: EventLog) -> None:
    try:
        directory_lock.hold(directory, run)
    except JitckptError as error:
        log.write("warning", text=str(error))


def write_local_states(ring_fd: int, directory: Path, steps: set[int], by: str = "") -> dict[int, int]:
    """Write what a rank alone knew after each step that any rank has saved; return the bytes by step.

    Those that an earlier start has written are among them, with 0 bytes. steps: those known to be saved,
    maybe on other hosts. What is on the disk counts as well: a rank may have been ended between the end of
    its save and its report. by: who writes, if that is another than the rank's host. Raises SaveError if
    something can't be read or written.
    """
    listed = folders.listed(directory)  # of the other ranks' saves one a step is looked at, as a rule
    saved = {step for step, names in listed.items() if _is_saved(directory, step, names)}
    kept = {state.step for state in local_state.read(ring_fd)}
    identity = local_state.read_identity(ring_fd)
    if identity is not None:
        starts.check(directory, identity.start)  # what follows may also remove some
    # A start that ends before its first step is done has nothing newer than what it began with; and of the
    # rank's host and the one that keeps a copy the first may have written it.
    drafts = set() if by else kept  # of its own host, which knows more now than when the rank died
    there = {step: 0 for step in listed if _has_local_state(directory, step, identity, step in drafts)}
    needed = ((saved | steps) & kept) - there.keys()
    written = {step: local_state.write_save(ring_fd, directory, step, by) for step in needed}
    if not by and identity is not None:
        for step in (kept & listed.keys()) - saved - steps:  # written when the rank died (states_at_death.py)
            if not _has_local_state(directory, step, identity, better=False):
                continue
            record = folders.look_at(directory, step, "local", identity.rank)
            folders.remove(record.path)
            with suppress(OSError):  # there is more of that step
                record.path.parent.rmdir()
    return {step: size for step, size in sorted((there | written).items()) if step in saved | steps}


def _is_saved(directory: Path, step: int, names: Sequence[tuple[Kind, int]]) -> bool:
    """Return whether there is a finished save of some replica."""
    replicas = (rank for kind, rank in names if kind == "rank")
    return any(folders.look_at(directory, step, "rank", rank).metadata for rank in replicas)


def _has_local_state(directory: Path, step: int, identity: Identity | None, better: bool) -> bool:
    """Return whether there is a whole state of the rank's own; better: a draft counts for none."""
    if identity is None:
        return False
    record = folders.look_at(directory, step, "local", identity.rank)
    if record.metadata is None or record.metadata.identity.job != identity.job:
        return False
    if better and record.metadata.saver == local_state.SAVER_AT_DEATH:
        return False
    return folders.verify(record) is None


def _signal_exception(signum: int) -> SignalException:
    sigval = signal.Signals(signum)
    return SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Put `value` in the place of a module's global for a while: torch has no other way in here."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _in_words(error: BaseException) -> str:
    """Return what an error says; some of torch's say nothing."""
    return str(error).strip().rstrip(".") or f"torch: {type(error).__name__}"
