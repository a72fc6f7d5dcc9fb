"""The agent of a host that has taken another's place: its first start was begun there, later ones are as any.

To all others it is that host's agent: it has its number, its part in the start that is under way, and its
vote on how that goes on.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker
from torch.distributed.launcher import api as launcher

from jitckpt.agent.agent import Agent
from jitckpt.agent.migration.leaving import LEADER
from jitckpt.agent.processes.children import Children
from jitckpt.agent.settings import Settings
from jitckpt.agent.worker_processes import WorkerProcesses
from jitckpt.console import say
from jitckpt.errors import HostsError, NotNeeded
from jitckpt.events import EventLog
from jitckpt.faults.injection import parse_fault
from jitckpt.hosts.connections import PATIENCE, Hosts
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.waiting_places import WaitingPlace
from jitckpt.wire import agents
from jitckpt.wire.moves import HandOver, Move


class RanksLeft(NotNeeded):
    """The ranks that have come here have gone on to another host, before any new start."""


class Successor(Agent):
    """Goes on with ranks that were started elsewhere, and starts them anew as every agent does."""

    def __init__(
        self,
        settings: Settings,
        log: EventLog,
        config: launcher.LaunchConfig,
        *,
        move: Move,
        last: HandOver,
        links: socket.socket,
        place: WaitingPlace,
        children: Children,
        adopted: Callable[..., WorkerProcesses],
        **torch_arguments: Any,
    ) -> None:
        """last: what the other agent said last. links: where the other agents call.

        place: where this host has waited. adopted: makes the first start, of what came here.
        """
        super().__init__(settings, log, config, **torch_arguments)
        self._move, self._handed_over, self._links, self._place = move, last, links, place
        self._kept_children = children
        facts = move.facts
        self._run, self._mistakes = facts.run, frozenset(facts.mistakes)
        self._armed = [parse_fault(text) for text in facts.armed]
        self._free_restarts = facts.free
        spec = self._worker_group.spec
        spec.max_restarts = config.max_restarts + facts.free
        self._remaining_restarts = spec.max_restarts - facts.restart
        self._make_processes = adopted
        self._adopts = True  # until these ranks have ended

    def _make_children(self) -> Children:
        return self._kept_children

    def _rendezvous(self, worker_group: Any) -> None:
        if self._hosts is None:
            self._take_place(worker_group)
            return
        if (of := self._handed_over.hosts[self._move.index].ranks_of) >= 0:
            raise HostsError(f"The ranks that came from host {of} start again there.")
        if self._adopts:
            self._adopts, self._make_processes = False, WorkerProcesses
            self._place.leave()
        super()._rendezvous(worker_group)

    def _take_place(self, worker_group: Any) -> None:
        """Be what the other host was, to the others."""
        move, silence = self._move, self._settings.host_timeout
        secret = bytes.fromhex(move.secret)
        every = [*self._handed_over.hosts]
        is_one_more = every[move.index].ranks_of >= 0  # that host's agent stays in its place
        reserve = None if is_one_more else self._place.reserve()
        assert self._lasting is not None
        assert self._config.local_addr is not None
        every[move.index] = replace(
            every[move.index],
            address=self._config.local_addr,
            port=self._links.getsockname()[1],
            reserve=0 if reserve is None else reserve.port,
        )
        hosts = Hosts(move.index, every, self._links, secret, silence, takes_place=True)
        hosts.connect(PATIENCE * silence)
        if is_one_more:
            self._lasting.leave()  # it meets nobody, and its end is not the end of where the others meet
        else:
            self._lasting.take_place(hosts, move.facts, reserve)
        self._hosts, self._log.leading = hosts, False
        own, ranks = every[move.index].ranks, sum(len(host.ranks) for host in every)
        worker_group.workers = [
            Worker(number, global_rank=rank, role_rank=rank, world_size=ranks, role_world_size=ranks)
            for number, rank in enumerate(own)
        ]
        # Where these hosts met the other one has said all, and they do not meet there again.
        torchs: Any = self
        worker_group.store = torchs._store = HashStore()
        worker_group.group_rank, worker_group.group_world_size = move.index, len(every)
        worker_group.master_addr, worker_group.master_port = move.facts.workers_store
        last = self._handed_over
        moved = agents.RanksMoved([*own], last.size, last.dump, last.transfer, last.restore)
        hosts.send(LEADER, moved)  # who alone writes events
        text = ", ".join(map(str, own))
        if (of := every[move.index].ranks_of) < 0:
            say(f"this host has taken the place of host {move.index}: ranks {text}.")
        else:
            say(f"this host has the ranks of host {of}, which stays without: ranks {text}.")

    def _use_objects(self, ranks: set[int], world_size: int) -> None:
        if not self._adopts:  # which lack nothing
            super()._use_objects(ranks, world_size)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        try:
            return super()._monitor_workers(worker_group)
        except NotNeeded as error:
            if self._adopts:
                raise RanksLeft(str(error)) from error
            raise

    def _exit_barrier(self) -> None:
        if not self._adopts:  # else the other host has come there for this one
            super()._exit_barrier()

    def _who_stands_by(self) -> list[Standby]:
        return self._place.others()
