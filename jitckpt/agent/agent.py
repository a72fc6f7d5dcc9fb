"""The agent of `jitckpt run`: torchrun's own, except for who looks after the worker processes.

TorchElastic ends all workers the moment one fails. Here they are under a supervisor that lets the others save
first; everything else (rendezvous, the workers' environment, logs, restarts) stays torch's.
"""

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID as EXIT_BARRIER
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
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
from jitckpt.agent.checkpoint_directory import CheckpointDirectory, job_of
from jitckpt.agent.memory_tier import MemoryTier, ToCutAnew
from jitckpt.agent.migration import kept_snapshots, lost_job
from jitckpt.agent.migration.all_made_again import AllMadeAgain
from jitckpt.agent.migration.going_back import MadeAgain
from jitckpt.agent.migration.kept_snapshots import ALONE, KeptSnapshots
from jitckpt.agent.object_copies import ObjectCopies
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.spares import Spares
from jitckpt.agent.settings import Settings
from jitckpt.agent.supervisor import Supervisor
from jitckpt.agent.taking_in import TakingIn
from jitckpt.agent.worker_processes import WorkerProcesses, signal_exception
from jitckpt.console import say
from jitckpt.decisions import elastic, quorum
from jitckpt.decisions.elastic import StartBegun
from jitckpt.decisions.recovery import SAME_ENDS, Outcome, brings_no_progress
from jitckpt.decisions.sources import listed
from jitckpt.decisions.suspects import NoDeviceError, Suspects, without
from jitckpt.errors import (
    HostBeginsAgain,
    HostsError,
    HostsMissing,
    HostUnfit,
    JobSuspended,
    NoProgress,
    NotNeeded,
)
from jitckpt.events import EventLog
from jitckpt.hosts import connections, fetch, rendezvous
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.coordinated import CoordinatedRendezvous
from jitckpt.hosts.limited_calls import watched
from jitckpt.hosts.rendezvous_state import with_signature
from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.store_server import address_for, store_at, torchs_store
from jitckpt.hosts.stores import Apart, LastingRendezvous, StoreGone
from jitckpt.saves import directory_lock, starts
from jitckpt.saves.starts import Start
from jitckpt.system import descriptor_limit, descriptor_reserve
from jitckpt.system.disk_thread import waited_for
from jitckpt.system.versions import versions
from jitckpt.wire import environment as variables
from jitckpt.wire.hosts import Host, Past
from jitckpt.wire.moves import JobFacts

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # of schedulers, that the job will be ended soon
MEETING_PAUSE = 0.1  # seconds before the hosts meet again where that has failed


def launch(
    settings: Settings,
    log: EventLog,
    config: launcher.LaunchConfig,
    command: str,
    arguments: list[str],
    *,
    agent: "Callable[..., Agent] | None" = None,
) -> None:
    """Run the job to its end, as torchrun does. agent: its kind.

    Raises ChildFailedError if it failed, SignalException if it was ended by a signal.
    """
    descriptor_limit.raise_limit()
    descriptor_reserve.fill()
    host, _ = parse_rendezvous_endpoint(config.rdzv_endpoint, rendezvous.DEFAULT_PORT)
    store = partial(torchs_store, address_for(host, alone=config.max_nodes == 1))
    with (
        _replaced(launcher, "LocalElasticAgent", partial(agent or Agent, settings, log, config)),
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
        is_spare=settings.is_spare,
        resumes=settings.from_snapshot,
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
        self._directory = CheckpointDirectory(log, settings.checkpoint_dir, settings.objects, self._own_start)
        self._lasting: LastingRendezvous | CoordinatedRendezvous | None = None
        spec = self._worker_group.spec
        if isinstance(spec.rdzv_handler, CoordinatedRendezvous):
            self._lasting = spec.rdzv_handler
            self._lasting.newest_step = self._directory.newest_saved
            log.superseded = starts.is_superseded
        elif config.max_nodes > 1:
            self._lasting = LastingRendezvous(
                config,
                spec.rdzv_handler,
                settings.host_timeout,
                settings.fixed_place,
                settings.secret,
                max_standby=settings.max_standby,
                is_spare=settings.is_spare,
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
        self._reports = health.HostReports(settings.report_host)
        self._devices = list(settings.devices)
        self._signals: list[int] = []
        self._starting = False
        self._make_processes: Callable[..., WorkerProcesses] = WorkerProcesses
        self._processes: WorkerProcesses | None = None
        self._last: Supervisor | None = None  # of the newest start
        self._mistakes: frozenset[str] = frozenset()  # in the start before it
        self._kept_in_memory = 0  # by the newest start before it that had a step there as it failed
        self._in_files = 0  # the newest step that memory had and the job has gone on from by files
        self._worker_store: Any = None  # torch's TCPStore
        self._hosts: Hosts | None = None
        self._ends: list[tuple[int, str]] = []  # of the starts so far
        self._memory: MemoryTier | None = None
        self._objects: ObjectCopies | None = None
        self._snapshots: KeptSnapshots | None = None
        self._succeeded = False
        self._meetings = 0  # in this round of the rendezvous, after the first
        self._free_restarts = 0  # that are not counted, as hosts were lost or have come
        self._begun: list[StartBegun] = []  # the starts on several hosts
        self._takes_in = False  # the next start is made to take in hosts
        self._has_told_why = False  # the first start does not begin
        if self._lasting is not None:
            self._lasting.on_standing_by = self._warm_up

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run the job with the signals that end it in our hands."""
        names = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(",")
        numbers = [signal.Signals[name.strip()] for name in names]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        for number in NOTICES:
            if number not in before:
                before[number] = signal.signal(number, self._on_notice)
        self._snapshots = self._keep_snapshots()
        self._children = self._make_children()
        try:
            self._memory = self._memory_tier()
            result: RunResult = super().run(*args, **kwargs)
            self._tell_what_never_happened()
            self._succeeded = not result.is_failed()
            if not self._succeeded:
                self._write_what_memory_has()
            return result
        except (SignalException, HostsError):
            self._write_what_memory_has()
            raise
        except HostUnfit:
            self._tell_what_goes()
            raise
        finally:
            self._spares.close()
            self._children.close()
            if self._snapshots is not None:
                suspended = self._processes is not None and self._processes.is_suspended
                self._snapshots.close(succeeded=self._succeeded, suspended=suspended)
            if self._objects is not None:
                self._objects.finish()
            if self._hosts is not None:
                self._hosts.close()
            if self._memory is not None:
                self._memory.close(end=True, succeeded=self._succeeded)
            if self._lasting is not None:
                self._lasting.close()
            self._reports.finish()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _keep_snapshots(self) -> KeptSnapshots | None:
        """Return what there is of snapshots, with those of a launcher of this very job that was lost."""
        settings, spec = self._settings, self._worker_group.spec
        if settings.snapshot_every is None or settings.criu is None:
            return None
        assert settings.checkpoint_dir is not None
        of_job = str(spec.entrypoint), spec.args, spec.local_world_size, settings.devices
        whose = partial(lost_job.whose, *of_job)
        hold = partial(directory_lock.hold, run=settings.run)
        kept = KeptSnapshots(
            settings.checkpoint_dir,
            settings.criu,
            self._log,
            hold=hold,
            whose=whose,
            needed=settings.from_snapshot,
            copies=settings.snapshot_copies,
        )
        if self._config.max_nodes == 1:
            kept.take_place(ALONE)
        return kept

    def _make_children(self) -> Children:
        mark = "" if self._snapshots is None else self._snapshots.mark
        made = Children(self._settings.save_deadline, self._settings.temporary, mark)
        if self._snapshots is not None:
            self._snapshots.mark = made.mark
        return made

    def _memory_tier(self) -> MemoryTier | None:
        if self._settings.memory is None:
            return None
        spec = self._worker_group.spec
        named = [os.getcwd(), str(self._settings.checkpoint_dir), spec.entrypoint, *map(str, spec.args)]
        return MemoryTier(self._settings.memory, json.dumps(named), self._log)

    def _write_what_memory_has(self) -> None:
        """The job ends without success: what no file has yet is not to end with it."""
        directory = self._directory.path
        if self._memory is None or self._last is None or directory is None:
            return
        step = self._last.kept_in_memory or self._kept_in_memory
        if step > max(self._directory.newest_saved(), self._in_files):
            own = {worker.global_rank for worker in self._worker_group.workers}
            of_lost, nowhere = self._last.ranks_of_lost_hosts
            by = f"memory{0 if self._hosts is None else self._hosts.index}"
            if self._hosts is not None and self._memory.has_cut_states():
                found, nowhere = self._memory.collect(self._hosts, step, nowhere)
                of_lost |= found
            elif self._hosts is not None and nowhere and self._memory.may_spread:
                nowhere = self._memory.write_parts(self._hosts, step, nowhere, directory)
            self._memory.write_saves(directory, own | of_lost, step, nowhere, by)

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

    def _tell_what_never_happened(self) -> None:
        """Say which rehearsed failures of this host's ranks never came: the rehearsal has shown nothing."""
        group = self._worker_group
        own = {worker.global_rank for worker in group.workers}
        if self._hosts is not None:
            own &= set(self._hosts.all[self._hosts.index].ranks)  # the rest is elsewhere
        ranks = group.workers[0].world_size
        for fault in self._armed:
            is_nobodys = group.group_rank == 0 and fault.rank >= ranks
            if fault.rank in own or is_nobodys:
                self._log.write("fault_never_happened", rank=fault.rank, fault=str(fault))
                why = f"the job ended before step {fault.step}, or the rank never came to its {fault.phase}"
                if is_nobodys:
                    why = f"the ranks are 0 to {ranks - 1}"
                say(f"the rehearsed failure {str(fault)!r} never happened: {why}.")

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._signals.append(signum)
        if self._processes is not None:
            self._processes.supervisor.interrupt(signum)
        elif not self._starting:
            raise signal_exception(signum)

    def _heed_signals(self) -> None:
        if self._signals:
            raise signal_exception(self._signals[0])

    def _on_notice(self, signum: int, _frame: FrameType | None) -> None:
        """Preemption is near: have the state saved beside the training."""
        if self._processes is not None:
            # Not here: what a signal handler interrupts may hold the log's lock.
            name = signal.Signals(signum).name
            threading.Thread(target=self._processes.want_save, args=[name], daemon=True).start()

    def _rendezvous(self, worker_group: Any) -> None:
        processes, self._processes = self._processes, None  # a signal ends the agent at once while it waits
        self._heed_signals()  # that came when the last ranks had just ended
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
                same = not (gone or processes.supervisor.takes_in or before.is_changed)
                if same and not self._lasting.meets_at_once and self._meet_again(worker_group):
                    return
                self._takes_in = processes.supervisor.takes_in
                if isinstance(self._lasting, LastingRendezvous):
                    self._lasting.is_taking_in = self._takes_in and not gone
                if gone and self._log.leading:
                    places = ", ".join(map(before.name, sorted(gone)))
                    wait, left = self._settings.wait, sum(one.ranks_of < 0 for one in before.all) - len(gone)
                    most = timeout if wait is None or left < self._config.min_nodes else wait
                    say(f"waiting for others in the place of {places}, for at most {most:g} s.")
            deadline = 0.0
            while not self._come_together(worker_group):
                deadline = deadline or time.monotonic() + timeout  # a host may have stood by for hours before
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError("hosts or stores were lost again and again")
            if before is not None and processes is not None:
                self._report_lost(before, processes.supervisor.losses)
        except RendezvousTimeoutError as error:
            why = f" ({said})" if (said := str(error).strip().rstrip(".")) else ""
            few = f"{self._config.min_nodes} hosts did not come together in {timeout:g} s{why}."
            raise HostsMissing(f"{few} {again}") from error
        except (RendezvousError, DistError) as error:
            raise HostsError(
                f"The hosts did not come together ({_in_words(error.__cause__ or error)}). {again}"
            ) from error
        finally:
            if before is not None and self._hosts is not before:
                before.close()

    def _warm_up(self) -> None:
        """Have processes that have loaded torch, as this host stands by."""
        spec = self._worker_group.spec
        command = (str(spec.entrypoint), *map(str, spec.args))
        environment = {**os.environ, **self._settings.device_environment}
        environment |= variables.JOB_PROCESSES.to(self._children.mark)
        ranks, least = range(spec.local_world_size), int(self._settings.warm_start)
        try:
            self._spares.fill(dict.fromkeys(ranks, command), dict.fromkeys(ranks, environment), least)
        except OSError as error:
            self._log.write("warning", text=f"This host stands by without warm spares: {error}.")

    def _check_health(self, worker_group: Any, again: bool) -> None:
        """Have no part in a start for which this host is not well.

        Raises HostUnfit at a restart, which others may do without this host; else waits until it is well.
        """
        if again and self._config.max_nodes > 1:
            self._leave_if_unfit(worker_group, f"jitckpt/{self._meetings + 1}")
        elif self._settings.health_check is not None:
            service = self._lasting if isinstance(self._lasting, CoordinatedRendezvous) else None
            tell = health.nobody if service is None else service.tell_health
            health.wait_until_well(self._settings.health_check, rendezvous.join_timeout(self._config), tell)

    def _look_before_it_is_taken(self, worker_group: Any) -> None:
        """Leave if this host, which may have waited for hours, is no longer wanted, or not well."""
        assert self._lasting is not None
        prefix = "jitckpt/0"
        try:
            self._settings.still_wanted()
        except (NotNeeded, HostsMissing):
            self._lasting.decline(worker_group.store, prefix, worker_group.group_rank)
            raise
        self._leave_if_unfit(worker_group, prefix)

    def _leave_if_unfit(self, worker_group: Any, prefix: str) -> None:
        """Raise HostUnfit where this host is not well, for a start which others may do without it.

        prefix: of the keys by which they meet for it.
        """
        if self._settings.health_check is None:
            return
        if why := health.why_unfit(self._settings.health_check):
            assert self._lasting is not None
            self._lasting.decline(worker_group.store, prefix, worker_group.group_rank)
            self._reports.tell(self._settings.host_name, why, health.UNFIT)
            raise HostUnfit(f"the job goes on without this host: {why}.")

    def _report_lost(self, before: Hosts, losses: Mapping[int, str]) -> None:
        """Have a scheduler told of hosts without which the job goes on; one may have come again."""
        if self._hosts is None or not self._log.leading:
            return
        here = {host.address for host in self._hosts.all}
        for place, why in losses.items():
            if (host := before.all[place]).address not in here:
                self._reports.tell(host.name or host.address, why, health.LOST)

    def _come_together(self, worker_group: Any) -> bool:
        """Meet the other hosts in torch's rendezvous; return whether none, nor its store, was lost there."""
        try:
            spec = worker_group.spec
            directory = self._directory.path
            if isinstance(self._lasting, CoordinatedRendezvous) and directory is not None:
                self._lasting.newest_start = self._directory.newest_start_known()
                self._lasting.had_place = kept_snapshots.place_in(directory)
            self._torchs_rendezvous(worker_group)
            if self._lasting is not None and self._lasting.has_waited:
                self._lasting.has_waited = False
                self._look_before_it_is_taken(worker_group)
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
        if self._snapshots is not None:
            self._snapshots.take_place((index, worker_group.group_world_size))
        for_memory = connections.listen(memory.address) if memory is not None and memory.address else None
        own = self._own_host(
            worker_group,
            pasts,
            port=listener.getsockname()[1],
            memory_port=0 if for_memory is None else for_memory.getsockname()[1],
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
        self._answer_others(connected, directory)
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
        self._directory.note_start(directory, met)
        if self._snapshots is not None:
            self._snapshots.agree([host.snapshots for host in met], [host.copies for host in met], index)
        if directory is not None:
            self._directory.fetch(directory, connected)
        if self._memory is not None:
            self._in_files = max(self._in_files, self._memory.gather(connected, self._to_cut_anew(directory)))

    def _answer_others(self, connected: Hosts, directory: Path | None) -> None:
        """Look after what other agents come for."""
        connected.answers[fetch.VISIT] = partial(fetch.serve, directory)
        if self._snapshots is not None:
            self._snapshots.serve(connected)
        if self._memory is not None:
            self._memory.answer_others(connected)

    def _to_cut_anew(self, directory: Path | None) -> ToCutAnew | None:
        """Return where a state goes that other hosts than these had in memory; None where all always meet."""
        if self._settings.wait is None or directory is None:
            return None
        return ToCutAnew(directory, job_of(directory), max(self._directory.newest_saved(), self._in_files))

    def _own_host(self, worker_group: Any, pasts: tuple[Past, ...], *, port: int, memory_port: int) -> Host:
        """Return what this host says of itself to the others."""
        assert self._lasting is not None
        spec, memory, snapshots = worker_group.spec, self._settings.memory, self._snapshots
        is_coordinated = isinstance(self._lasting, CoordinatedRendezvous)
        return Host(
            address=spec.local_addr,
            port=port,
            ranks=tuple(worker.global_rank for worker in worker_group.workers),
            restarts=spec.max_restarts - self._remaining_restarts,
            directory=self._directory.text,
            job=self._directory.job(),
            worker_store=0 if self._worker_store is None else self._worker_store.port,
            reserve=self._lasting.reserve(),
            has_store=self._lasting.has_store,
            pasts=pasts,
            agent=self._lasting.agent,
            stuck=self._stuck(),
            domains=self._settings.domains if memory is None else memory.domains,
            domains_by=self._settings.domains_by if memory is None else memory.domains_by,
            memory=0 if self._memory is None else max(1, self._memory.limit >> 20),
            memory_address="" if memory is None else memory.address,
            memory_port=memory_port,
            starts=self._directory.starts_known() if is_coordinated else (),
            free=self._free_restarts,
            name=self._settings.host_name,
            snapshots=() if snapshots is None else snapshots.named,
            copies=() if snapshots is None else snapshots.copied,
            room=0 if snapshots is None else snapshots.room,
        )

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
        self._begun.append(StartBegun(time.monotonic(), len(met), self._takes_in))
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

    def _own_start(self) -> Start:
        """Return the start that this agent has a part in, as far as a coordination service numbers them."""
        if not isinstance(self._lasting, CoordinatedRendezvous) or self._lasting.start is None:
            return Start()
        return Start(self._lasting.start.number, self._lasting.fence)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._heed_signals()
        spec = worker_group.spec
        if self._hosts is None:
            self._directory.note_start(self._directory.path)
        self._log.restart = spec.max_restarts - self._remaining_restarts
        self._log.write(
            "restart" if self._log.restart else "job_started",
            world_size=worker_group.workers[0].world_size,
            max_restarts=spec.max_restarts,
            versions=versions(),
        )
        if self._log.restart and spec.rdzv_handler.use_agent_store and self._hosts is None:
            self._give_fresh_store(worker_group)
        workers = worker_group.workers
        self._use_objects({worker.global_rank for worker in workers}, workers[0].world_size)
        with _replaced(local_elastic_agent, "start_processes", self._start_processes):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _use_objects(self, ranks: set[int], world_size: int) -> None:
        """Before the ranks start: have what they lack come from the object store, and all be copied there.

        world_size: of the job.
        """
        wanted, directory = self._settings.objects, self._settings.checkpoint_dir
        if wanted is None or directory is None:
            return
        copies = self._objects
        if copies is None or (copies.some and object_copies.lacks_all(directory)):
            fetch = partial(object_copies.fetch, wanted, directory, ranks, self._log, self._own_start())
            waited_for(partial(fetch, world_size=world_size))
        if copies is not None and copies.ranks != ranks:
            copies.close()
            copies = None
        if copies is None:
            copies = self._objects = ObjectCopies(wanted, directory, ranks, self._log)
        copies.begin(self._own_start())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Tell how the workers are; no restart is left where it has no use, or too few devices."""
        result: RunResult = super()._monitor_workers(worker_group)
        if self._processes is not None and self._processes.is_suspended:
            raise JobSuspended("The job is suspended.")
        if self._processes is not None and self._processes.has_left:
            assert self._lasting is not None
            group: Any = worker_group
            # The others wait for all agents in the end: for this one they need not.
            with suppress(StoreGone, DistError):
                arrive = partial(_barrier_nonblocking, group.store, group.group_world_size, EXIT_BARRIER)
                self._lasting.guarded(arrive)
            self._lasting.hand_over()
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
        return [] if self._lasting is None else self._lasting.standbys()

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

    def _facts(self) -> JobFacts:
        group: Any = self._worker_group
        known, own = None if self._lasting is None else self._lasting.start, self._own_start()
        return JobFacts(
            self._run,
            self._log.restart,
            (group.master_addr, group.master_port),
            free=self._free_restarts,
            mistakes=tuple(sorted(self._mistakes)),
            armed=tuple(map(str, self._armed)),
            past=known if isinstance(known, Past) else None,
            number=own.number,
            fence=own.revision,
        )

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
            together = None
            if self._hosts is not None:
                together = AllMadeAgain(self._hosts, lambda: bool(self._signals), self._heed_signals)
            made_again = self._go_back(torch_arguments["envs"][0], together)
            self._mistakes = self._mistakes if self._last is None else self._last.mistakes
            processes = self._make_processes(
                self._settings,
                self._log,
                self._armed,
                self._spares,
                self._first_directories,
                run=self._run,
                children=self._children,
                suspects=self._suspects,
                reports=self._reports,
                devices=self._devices,
                restarts_left=self._remaining_restarts,
                mistakes_before=self._mistakes,
                hosts=self._hosts,
                memory=self._memory,
                standbys=self._who_stands_by,
                taking_in=self._taking_in,
                facts=None if self._hosts is None else self._facts,
                started=self._own_start(),
                snapshots=self._snapshots,
                made_again=made_again,
                said_before=() if together is None else together.others,
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

    def _go_back(self, environment: Mapping[str, str], together: AllMadeAgain | None) -> MadeAgain | None:
        """Make all ranks again from the newest snapshot, if there is one, before another start."""
        if self._snapshots is None:
            return None
        armed = set(map(str, self._armed))
        try:
            return self._snapshots.go_back(
                (environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
                [text for one in self._settings.faults if (text := str(one.with_phase())) not in armed],
                is_first=self._last is None,
                together=together,
            )
        except HostBeginsAgain:
            assert self._lasting is not None
            self._lasting.leave()  # torch would close the rendezvous for the others
            raise


def _check_quorum(met: Sequence[Host]) -> None:
    """Refuse to go on where others, who can't be seen, may go on without these."""
    pasts = [past for host in met for past in host.pasts]
    if few := quorum.missing(pasts, {host.agent for host in met}):
        raise HostsMissing(
            f"Only {few[0]} of {few[1]} hosts that may be alive have come together: the others may go on "
            "without them, so these end. The same command on all hosts goes on from the newest save."
        )


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
