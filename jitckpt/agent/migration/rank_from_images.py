"""A rank whose processes are made again from images: those of a snapshot, or on another host."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from jitckpt.agent.migration.move import end_what_is_left, inherited_outputs, lifeline_of
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.processes import children
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import Proxies
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, Options
from jitckpt.decisions.belongings import SERVER
from jitckpt.system import process_tree
from jitckpt.wire.moves import DumpedRank


@dataclass
class RankFromImages:
    """images: their folder. ring: the memory of the rank's own state. ends: our sockets to it, by name."""

    dumped: DumpedRank
    images: int
    ring: int
    ends: dict[str, socket.socket] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.dumped.rank

    @property
    def pid(self) -> int:
        """The worker's."""
        return self.dumped.pid

    def restore(self, found: Criu, limit: float, shared: Mapping[str, int], mark: str) -> None:
        """Make the processes again. Raises CriuError or OSError; then some of them may be left.

        shared: memory of this process that ranks have mapped, by its name. mark: for CRIU's own processes.
        """
        dumped, memory = self.dumped, {"jitckpt-local-state": self.ring, **shared}
        for folder in dumped.folders:
            os.makedirs(folder, exist_ok=True)
        with contextlib.ExitStack() as stack:
            inherit = list(inherited_outputs(dumped.outputs, stack))
            inherit += [(memory[name], f"/memfd:{name}") for name in dumped.memory if name in memory]
            for inode, kind, name in dumped.sockets:
                self.ends[name], theirs = socket.socketpair(socket.AF_UNIX, kind)
                stack.callback(theirs.close)
                inherit.append((theirs.fileno(), f"socket:[{inode}]"))
                for message in dumped.said.get(name, []):
                    theirs.send(bytes.fromhex(message))
                if name.startswith(SERVER):
                    self.ends.pop(name).close()
            variables = {process_tree.MARK: mark}
            children.note_own(self.pid)  # who has it as a worker waits for it, and nobody else
            criu.restore(found, Options(self.images, limit, inherit=inherit, variables=variables))

    def worker(self, kept: Children) -> Worker:
        """Return its worker, whose processes are there again."""
        return Worker.adopted(
            self.rank,
            self.pid,
            own=self.ends["agent"],
            copies=self.ends.get("copies"),
            ring_fd=self.ring,
            lifeline=lifeline_of(self.pid),
            children=kept,
        )

    def adopt(self, proxies: Proxies, relay: StoreRelay) -> None:
        """Have it go on, with its servers and the job's store."""
        if "control" in self.ends:
            proxies.adopt(self.rank, self.ends["control"])
        for name, process, ended in self.dumped.askers:
            proxies.servers.adopt(self.rank, self.ends[name], process, dict(ended))
        for name, said in self.dumped.conversations.items():
            relay.take_over(self.ends[name], bytes.fromhex(said))
            relay.go_on([self.ends[name]])

    def end(self) -> None:
        """End what there is of its processes, and close the sockets to them. May be called twice."""
        end_what_is_left(self.dumped.pids)
        children.waited_for(self.pid)
        for end in self.ends.values():
            end.close()
        self.ends.clear()
