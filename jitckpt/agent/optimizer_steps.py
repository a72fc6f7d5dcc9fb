"""Whether this host's ranks send gradients to the hosts that keep their state, for one start of the workers.

Those make the optimizer's steps again (tiers/remaking.py). Where that can't be, or gives other bits than the
device, it is whole copies for the rest of the start, and a sentence says why.
"""

from collections.abc import Callable, Mapping

from jitckpt.console import say, show_size
from jitckpt.events import EventLog
from jitckpt.tiers import host_memory, shard
from jitckpt.tiers.host_memory import GRADIENTS, NO_GRADIENTS, SEND_GRADIENTS, HostMemory
from jitckpt.tiers.remade_peers import MOST_TAIL, PeerOptimizer
from jitckpt.tiers.tier import Shard

MOST_LACKS = 3  # one after the other: then the other host will not have what it needs later either


class GradientSending:
    """Safe for several threads, one a rank."""

    def __init__(
        self,
        memory: HostMemory,
        ranks: Mapping[int, int],
        log: EventLog,
        warn: Callable[[str], None],
        begins_with: int = SEND_GRADIENTS,
    ) -> None:
        """ranks: this host's, with their memfds, to which `begins_with` is said of gradients."""
        self._memory, self._ranks, self._log, self._warn = memory, ranks, log, warn
        self._off = self._said = False
        self._lacks: dict[int, int] = {}  # by rank, one after the other
        for descriptor in ranks.values():
            host_memory.put_word(descriptor, GRADIENTS, begins_with)

    def put(self, peer: PeerOptimizer, where: str, one: Shard) -> int | None:
        """Have another host make a rank's step; return the bytes sent, or None if a whole copy is to go.

        Raises what its link raises.
        """
        index = shard.parse_index(one.index, one.seal)
        if self._off or index.made_by is None:
            return None
        rank, tail = one.rank, one.seal.data_bytes - index.host_from
        if tail > MOST_TAIL:
            self._end(f"rank {rank} has {show_size(tail)} on its host, too much to go with gradients")
            return None
        remade = peer.remake(one, self._memory.beginning(rank, one.slot, index.made_by.sent))
        if remade.differs:
            self._end(
                f"{where} has made rank {rank}'s optimizer step {one.seal.step} again, and {remade.differs} "
                "is not bit for bit what it is on the device"
            )
        elif remade.fails:
            self._end(f"{where} can't make rank {rank}'s optimizer steps again: {remade.fails.rstrip('.')}")
        elif remade.lacks:
            self._lacks[rank] = self._lacks.get(rank, 0) + 1 if remade.lasts else 0
            if self._lacks[rank] >= MOST_LACKS:
                self._end(
                    f"{where} can't make rank {rank}'s optimizer steps again: {remade.lacks.rstrip('.')}"
                )
        else:
            self._lacks[rank] = 0
            gradients = sum(shard.size_of(place) for place in index.made_by.gradients())
            self._tell(rank, remade.sent, one.seal.size - gradients)
            return remade.sent
        return None

    def _end(self, why: str) -> None:
        self._off = True
        for descriptor in self._ranks.values():
            host_memory.put_word(descriptor, GRADIENTS, NO_GRADIENTS)
        self._warn(f"{why}. From now on whole copies are sent, as with --memory-tier peer")

    def _tell(self, rank: int, sent: int, whole: int) -> None:
        if self._said or not self._log.leading:
            return
        self._said = True
        self._log.write("memory_optimizer", rank=rank, sent=sent, whole=whole)
        say(
            f"memory tier: another host makes rank {rank}'s optimizer steps again, bit for bit: "
            f"{show_size(sent)} a step go there, in the place of {show_size(whole)}."
        )
